"""An async map with concurrency=1 in worker processes: its tickets must not share a packet."""

from enqueuer import OrderedEnqueuer, Processes


async def double(i):
    return 2 * i


def main(method, concurrency, batch_size):
    backend = Processes(start_method=method)
    given = dict(workers=1, concurrency=concurrency, batch_size=batch_size, collate=None)
    if batch_size is not None:
        given["collate"] = list
    with OrderedEnqueuer(range(300), double, backend=backend, **given) as enqueuer:
        for _ in range(3):
            got = list(enqueuer)
            if batch_size is not None:
                got = sum(got, [])
            if got != list(range(0, 600, 2)):
                return [f"{method}, {concurrency}, {batch_size}: {got[:5]}"]
    return []


if __name__ == "__main__":
    wrong = []
    for method in ("fork", "forkserver"):
        for concurrency in (1, 2):
            for size in (None, 1, 4):
                wrong += main(method, concurrency, size)
    print(f"FAIL: {wrong}" if wrong else "ok")
