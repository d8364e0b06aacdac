"""lerobot#3520 (2026: "AuthenticationError: digest received was wrong"): a cache in a multiprocessing.Manager, with
proxies inside proxies, and a queue for notes of the workers. They reach the manager, for every start method."""

import multiprocessing

from enqueuer import OrderedEnqueuer, Processes


class Cached:
    def __init__(self, manager):
        self.cache = manager.dict()
        self.cache["log"] = manager.list()
        self.queue = manager.Queue()

    def __len__(self):
        return 8

    def __getitem__(self, i):
        self.queue.put(i)
        self.cache["log"].append(i)  # a proxy that the manager hands out
        return i


def main():
    problems = []
    with multiprocessing.get_context("spawn").Manager() as manager:
        for method in ("fork", "forkserver", "spawn"):
            data = Cached(manager)
            try:
                with OrderedEnqueuer(data, workers=2, backend=Processes(method)) as e:
                    got = list(e)
                if (
                    not got == sorted(data.cache["log"]) == list(range(8))
                    or data.queue.qsize() != 8
                ):
                    problems.append(f"{method}: {got}, {data.cache['log']}")
            except Exception as error:
                problems.append(f"{method}: {type(error).__name__}: {error}")
    print("FAIL: " + "; ".join(problems) if problems else "ok")


if __name__ == "__main__":
    main()
