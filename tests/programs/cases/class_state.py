"""cloudpickle#195 (2018), #101, playa#213 (2026), delta of spyder#16696: a class of the script (or of a notebook) whose objects
come from worker processes. The class has state of its own in the loop's process: a counter, a registry, a method that was
replaced, and methods that use globals of the script. A plain loop, threads, fork and multiprocessing's spawn keep it."""

import concurrent.futures
import multiprocessing

log = []
FACTOR = 1


class Batch:
    seen = 0
    by_number: dict = {}

    def __init__(self, number):
        self.number = number

    def note(self):
        Batch.seen += 1
        self.by_number[self.number] = self
        log.append(self.number)
        return self.number * FACTOR


def make(i):
    return Batch(i)


def rows(shard):
    for i in shard.split(range(6)):
        yield Batch(i)


def loop(batches):
    """What a training script does; returns what it has at the end."""
    global FACTOR
    Batch.seen, Batch.by_number, FACTOR = 0, {}, 1
    log.clear()
    own = log
    products = []
    for batch in batches:
        FACTOR += 1
        products.append(batch.note())
    return {
        "counter": Batch.seen,
        "registry": len(Batch.by_number),
        "global list": len(own),
        "products": products,
    }


if __name__ == "__main__":
    from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes

    want = loop(map(make, range(6)))
    for method in ("fork", "forkserver", "spawn"):
        with concurrent.futures.ProcessPoolExecutor(
            2, mp_context=multiprocessing.get_context(method)
        ) as pool:
            print("  concurrent.futures,", method, loop(pool.map(make, range(6))) == want)
    problems = []
    for method in ("thread", "fork", "forkserver", "spawn"):
        backend = "thread" if method == "thread" else Processes(start_method=method)
        for name, run in {
            "shards": lambda: GeneratorEnqueuer(rows, workers=2, backend=backend),
            "tasks": lambda: OrderedEnqueuer(range(6), make, workers=2, backend=backend),
        }.items():
            got = loop(run())
            if got != want:
                problems.append(
                    f"{name}, {method}: "
                    + ", ".join(f"{k} {got[k]}, not {want[k]}" for k in want if got[k] != want[k])
                )
    if loop(map(make, range(6))) != want:
        problems.append(
            "afterwards even a plain loop gives other results: the methods of the class have been replaced"
        )
    print("FAIL: " + "; ".join(problems) if problems else "ok")
