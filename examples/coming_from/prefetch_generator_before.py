from prefetch_generator import BackgroundGenerator


def batches(count):
    for i in range(count):
        yield [i] * 4


for batch in BackgroundGenerator(batches(3), max_prefetch=3):
    print(batch)
