"""spyder#16696 (2021), autograde#24, vscode-jupyter#12485: files that hold pickled objects of a class of the script (a plain
pickle, numpy's object arrays, joblib, torch.save) are read, or written, by the workers. A plain loop, threads, fork, and
multiprocessing's spawn (which imports the script as __mp_main__) can do it."""

import collections
import concurrent.futures
import dataclasses
import multiprocessing
import os
import pickle
import tempfile


@dataclasses.dataclass
class Sample:
    number: int


Point = collections.namedtuple("Point", "x y")
folder = os.environ.setdefault("ENQ_FOLDER", tempfile.mkdtemp())


def path(i):
    return os.path.join(folder, f"{i}.pkl")


def load(i):
    with open(path(i), "rb") as f:
        return pickle.load(f)


def rows(shard):
    for i in shard.split(range(6)):
        yield load(i)


def caching(i):
    with open(path(100 + i), "wb") as f:
        pickle.dump(Sample(i), f)
    return i


def number(i):
    """For multiprocessing: whether it can read them."""
    return load(i).number


if __name__ == "__main__":
    from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes

    for i in range(6):
        with open(path(i), "wb") as f:
            pickle.dump(Sample(i), f)
    problems = []
    for method in ("thread", "fork", "forkserver", "spawn"):
        backend = "thread" if method == "thread" else Processes(start_method=method)
        for name, run in {
            "shards": lambda: [
                s.number for s in GeneratorEnqueuer(rows, workers=2, backend=backend)
            ],
            "tasks": lambda: [
                s.number for s in OrderedEnqueuer(range(6), load, workers=2, backend=backend)
            ],
            "written": lambda: [
                int(x) for x in OrderedEnqueuer(range(6), caching, workers=2, backend=backend)
            ],
        }.items():
            try:
                got = run()
            except Exception as error:
                got = f"{type(error).__name__}: {str(error)[:140]}"
            if got != list(range(6)):
                problems.append(f"{name}, {method}: {got}")
    for method in ("fork", "forkserver", "spawn"):
        with concurrent.futures.ProcessPoolExecutor(
            2, mp_context=multiprocessing.get_context(method)
        ) as pool:
            print("  concurrent.futures,", method, list(pool.map(number, range(6))))
    print("FAIL: " + "; ".join(problems) if problems else "ok")
