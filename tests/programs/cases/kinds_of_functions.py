"""pathos#97 (2017), #156, spyder#16696, nbmultitask#4, autograde#24, pebble#146: functions that pickle refuses: lambdas, methods
of local classes, decorated and cached functions, builtins, ufuncs; in worker processes of every start method."""

import functools
import operator
import pathlib
import re

import numpy as np

from enqueuer import OrderedEnqueuer, Processes, imap


def logged(f):
    @functools.wraps(f)
    def inner(*a, **k):
        return f(*a, **k)

    return inner


@logged
def decorated(i):
    return i + 1


@functools.lru_cache(None)
def cached(i):
    return i + 1


@functools.singledispatch
def dispatched(i):
    return "other"


@dispatched.register
def _(i: int):
    return i + 1


def factory(base):
    class Local(base):
        def add(self, i):
            return i + self.one

    return Local


class Base:
    one = 1

    def __init__(self):
        self.f = lambda i: i + self.one

    def run(self, i):
        return self.f(i)

    @classmethod
    def cls(cls, i):
        return i + cls.one

    @staticmethod
    def static(i):
        return i + 1

    part = functools.partialmethod(lambda self, k, i: i + k, 1)

    @property
    def bound(self):
        return self.run


class Slots:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 1

    def __call__(self, i):
        return i + self.n


def recursive(i):
    return 1 if i == 0 else 1 + recursive(i - 1)


def mutual(i):
    return other(i)


def other(i):
    return i + 1


local = factory(Base)()
functions = {
    "lambda": lambda i: i + 1,
    "decorated": decorated,
    "cached": cached,
    "singledispatch": dispatched,
    "local class": local.add,
    "lambda in self": Base().run,
    "classmethod": Base.cls,
    "static": Base.static,
    "partialmethod": Base().part,
    "property": Base().bound,
    "slots": Slots(),
    "partial": functools.partial(operator.add, 1),
    "builtin method": (1).__add__,
    "ufunc": functools.partial(np.add, 1),
    "recursive": recursive,
    "mutual": mutual,
    "vectorize": np.vectorize(lambda i: i + 1, otypes=[int]),
    "attrgetter": lambda i, g=operator.attrgetter("real"): g(i) + 1,
    "compiled": lambda i, r=re.compile("x"): i + 1 if not r.match("y") else 0,
    "reduce": functools.partial(functools.reduce, lambda a, b: a + b)
    and (lambda i: functools.reduce(operator.add, [i, 1])),
}
want = list(range(1, 6))
problems = []
for method in ("forkserver", "spawn", "fork", None):
    for name, f in functions.items():
        backend = "thread" if method is None else Processes(start_method=method)
        try:
            with OrderedEnqueuer(range(5), f, workers=1, backend=backend) as e:
                got = [int(x) for x in e]
        except Exception as error:
            got = f"{type(error).__name__}: {str(error)[:120]}"
        if got != want:
            problems.append(f"{name} {method}: {got}")
got = list(imap(pathlib.PurePosixPath, ["a", "b"], workers=1, backend="process"))
if got != [pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b")]:
    problems.append(f"a class as the function: {got}")
if list(imap(str.upper, ["a", "b"], workers=1, backend="process")) != ["A", "B"] or list(
    imap(len, ["a", "bb"], workers=1, backend="process")
) != [1, 2]:
    problems.append("builtins")
print(f"FAIL: {len(problems)}: " + "; ".join(problems[:6]) if problems else "ok")
