from enqueuer import prefetch


def batches(count):
    for i in range(count):
        yield [i] * 4


for batch in prefetch(batches(3), max_queue_size=3):
    print(batch)
