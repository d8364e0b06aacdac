"""What a script defines and sets, in its workers: each definition comes once, and is named then."""

import logging
import multiprocessing
import os
import pickle
import traceback

import numpy as np

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes

CACHE = {}


class Big:
    table = np.zeros(1_000_000)
    calls = 0

    def __init__(self, n):
        self.n = n


class Lazy:
    model = None
    loads = 0

    @classmethod
    def get(cls):
        if cls.model is None:
            cls.model = object()
            cls.loads += 1
        return cls.loads


class El:
    seen = 0

    def __init__(self, n):
        self.n = n

    def use(self):
        type(self).seen += 1
        return type(self).seen, os.getpid()


class Unreached:
    def __init__(self, n):
        self.n = n

    def twice(self):
        return helper2(self.n) * FACTOR


FACTOR = 2


def helper2(n):
    return n


def use(el):
    return el.use()


def lazy(i):
    return Lazy.get()


def big(i):
    return Big(i)


def remember(i):
    CACHE[i] = 1
    return len(CACHE)


def inpool(i):
    with multiprocessing.get_context("fork").Pool(1) as p:
        return p.map(helper2, [i])[0]


def unp(data):
    return pickle.loads(data).twice()


def pickled(i):
    return pickle.dumps(Unreached(i))


class Broken(Exception):
    pass


def boom(i):
    raise Broken(i)


def onerr(error):
    return ("handled", type(error) is Broken)


def gl(i):
    global FACTOR
    FACTOR += 1
    return FACTOR


def mainattr(i):
    import __main__

    return (
        __main__.helper2(i) + __main__.FACTOR,
        getattr(__main__, "__file__", "").endswith("definitions_of_the_script.py"),
        hasattr(__main__, "nothing"),
    )


problems = []


def check(name, got, want):
    if got != want:
        problems.append((name, got, want))


class Log(logging.Handler):
    def emit(self, record):
        logged.append(self.format(record))


logged = []


class State:
    def __init__(self, n):
        self.n = n


class It:
    def __init__(self):
        self.s = State(0)

    def __iter__(self):
        return self

    def __next__(self):
        self.s = State(self.s.n + 1)
        if self.s.n > 5:
            raise StopIteration
        return self.s

    def state_dict(self):
        return {"s": self.s}

    def load_state_dict(self, st):
        self.s = st["s"]


def main():
    logging.getLogger("enqueuer").addHandler(Log())
    for m in ("forkserver", "spawn"):
        be = Processes(start_method=m)
        kw = dict(workers=1, backend=be)
        with OrderedEnqueuer(range(3), big, **kw) as e:
            got = list(e)
        check(
            m + " big",
            ([g.n for g in got], all(g.table is Big.table for g in got)),
            ([0, 1, 2], True),
        )
        with OrderedEnqueuer(range(3), lazy, **kw) as e:
            check(m + " lazy", list(e), [1, 1, 1])
        for seq in ([El(i) for i in range(4)], (El(i) for i in range(4))):
            with OrderedEnqueuer(seq, use, **kw) as e:
                check(m + " el", [a for a, _ in e], [1, 2, 3, 4])
        with OrderedEnqueuer(range(3), remember, **kw) as e:
            check(m + " cache", list(e), [1, 2, 3])
        check(m + " cache here", CACHE, {})
        with OrderedEnqueuer(range(3), inpool, **kw) as e:
            check(m + " pool", list(e), [0, 1, 2])
        with OrderedEnqueuer([pickle.dumps(Unreached(i)) for i in range(3)], unp, **kw) as e:
            check(m + " unreached", list(e), [0, 2, 4])
        with OrderedEnqueuer(range(3), pickled, **kw) as e:
            check(m + " pickled", [pickle.loads(data).twice() for data in e], [0, 2, 4])
        with OrderedEnqueuer(range(2), boom, on_error=onerr, **kw) as e:
            check(m + " onerr", list(e), [("handled", True)] * 2)
        with OrderedEnqueuer(range(1), boom, on_error="skip", **kw) as e:
            list(e)
        check(m + " log", "raise Broken(i)" in logged[-1] and __file__ in logged[-1], True)
        try:
            with OrderedEnqueuer(range(2), boom, **kw) as e:
                list(e)
        except Broken as error:
            text = "".join(traceback.format_exception(error))
            check(
                m + " tb",
                "raise Broken(i)" in text and "definitions_of_the_script.py" in text,
                True,
            )
        with OrderedEnqueuer(range(3), gl, **kw) as e:
            check(m + " global", list(e), [3, 4, 5])
        check("FACTOR", FACTOR, 2)
        with OrderedEnqueuer(range(2), mainattr, **kw) as e:
            check(m + " main", list(e), [(2, True, False), (3, True, False)])
        with GeneratorEnqueuer(It(), backend=be, workers=1) as e:
            it = iter(e)
            a = [next(it).n, next(it).n]
            st = e.state_dict()
        e = GeneratorEnqueuer(It(), backend=be, workers=1)
        e.load_state_dict(st)
        with e:
            rest = list(e)
        check(
            m + " iter state",
            (a, [r.n for r in rest], {type(r) is State for r in rest}),
            ([1, 2], [3, 4, 5], {True}),
        )

        # lambdas as elements seeing current globals
        def els():
            global FACTOR
            for i in range(3):
                yield lambda: FACTOR
                FACTOR += 10

        with OrderedEnqueuer(els(), lambda f: f(), max_queue_size=1, **kw) as e:
            got = list(e)
        check(m + " lambdas", got, [2, 12, 22])
        globals()["FACTOR"] = 2
        # redefinition
        global El2

        class El2:
            v = 1

        El2.__qualname__ = "El2"
        old = El2()
        with OrderedEnqueuer(range(2), mk, **kw) as e:
            check(m + " v1", [x.v for x in e], [1, 1])

        class El2:
            v = 2

        El2.__qualname__ = "El2"
        with OrderedEnqueuer(range(2), mk, **kw) as e:
            check(m + " v2", [(x.v, type(x) is El2) for x in e], [(2, True)] * 2)
        check(m + " old", old.v, 1)
        # the size of an item does not depend on its class
        with GeneratorEnqueuer(points, backend=be) as e:
            list(e)
            check(m + " size", e.stats().workers[0].bytes < 10_000, True)
    print("FAIL: " + "; ".join(map(str, problems)) if problems else "ok")


def mk(i):
    return El2()


def points():
    for i in range(100):
        yield El(i)


if __name__ == "__main__":
    main()
