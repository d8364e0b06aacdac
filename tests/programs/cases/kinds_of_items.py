"""Objects of each kind that a script defines, out of workers and into them, and what it holds."""

import abc
import collections
import contextvars
import dataclasses
import enum
import functools
import struct
import threading
import typing
import weakref

import numpy as np

from enqueuer import OrderedEnqueuer, Processes

HEADER = struct.Struct("<II")
VAR = contextvars.ContextVar("v", default=3)
tl = threading.local()
tl.x = 5


class TL(threading.local):
    def __init__(self):
        self.n = 1


tl2 = TL()


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    def other(self):
        return Color.BLUE if self is Color.RED else Color.RED


class Flag(enum.IntFlag):
    A = 1
    B = 2


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class DC:
    n: int
    tag: str = "t"


class Slots:
    __slots__ = ("n",)

    def __init__(self, n):
        self.n = n


class Base(abc.ABC):
    registry = {}

    def __init_subclass__(cls):
        Base.registry[cls.__name__] = cls

    @abc.abstractmethod
    def f(self): ...


class Child(Base):
    def __init__(self, n):
        self.n = n

    def f(self):
        return self.n


class Meta(type):
    made = []

    def __new__(m, name, bases, ns):
        c = super().__new__(m, name, bases, ns)
        Meta.made.append(name)
        return c


class WithMeta(metaclass=Meta):
    count = 0

    def __init__(self, n):
        self.n = n
        WithMeta.count += 1


class Outer:
    class Inner:
        def __init__(self, n):
            self.n = n


T = typing.TypeVar("T")


class Gen(typing.Generic[T]):
    def __init__(self, n):
        self.n = n


class Cached:
    def __init__(self, n):
        self.n = n

    @functools.cached_property
    def sq(self):
        return self.n**2

    @functools.lru_cache(None)
    def m(self):
        return self.n + 1


class D(dict):
    pass


class Arr(np.ndarray):
    pass


class Singleton:
    _inst = None

    def __new__(cls, *a):
        if cls._inst is None:
            cls._inst = super().__new__(cls)
        return cls._inst

    def __reduce__(self):
        return Singleton, ()


class Weak:
    live = weakref.WeakValueDictionary()

    def __init__(self, n):
        self.n = n
        Weak.live[n] = self


def helper(n):
    return n


def cached(i):
    made = Cached(i)
    made.sq
    return made


MAKE = {
    "enum": lambda i: list(Color)[i % 2],
    "flag": lambda i: Flag.A | Flag.B,
    "point": lambda i: Point(i, 1),
    "dc": DC,
    "slots": Slots,
    "child": Child,
    "meta": WithMeta,
    "inner": Outer.Inner,
    "gen": Gen[int],
    "cached": cached,
    "d": lambda i: D(a=i),
    "arr": lambda i: np.arange(i + 3).view(Arr),
    "single": Singleton,
    "weak": Weak,
    "fn": lambda i: helper,
    "cls": lambda i: Child,
    "struct": lambda i: HEADER.size + VAR.get() + tl.x + tl2.n,
    "nest": lambda i: {"a": [DC(i), (Color.RED, Child(i))]},
}


def make_all(i):
    return [make(i) for make in MAKE.values()]


def kinds_of(items):
    return [type(item) for item in items]


problems = []


def check(name, got, want):
    if got != want:
        problems.append(f"{name}: {got}, not {want}")


def state():
    return list(Base.registry), list(Meta.made), WithMeta.count, len(Weak.live)


def main():
    class Local:
        seen = 0

        def __init__(self, n):
            self.n = n

    def local(i):
        Local.seen += 1
        return Local(i)

    for method in ("fork", "forkserver", "spawn"):
        kw = dict(workers=2, backend=Processes(start_method=method))
        want = [make_all(i) for i in range(3)]
        before = state()
        with OrderedEnqueuer(range(3), make_all, **kw) as e:
            got = list(e)
        check(f"{method}, state", state(), before)
        for out, own in zip(got, want):
            check(f"{method}, types", kinds_of(out), kinds_of(own))
            same = [kind for kind, a, b in zip(MAKE, out, own) if a is b]
            check(f"{method}, identity", set(same) >= {"enum", "fn", "cls"}, True)
        for how, elements in {"sequence": want, "iterable": iter(want)}.items():
            with OrderedEnqueuer(elements, kinds_of, **kw) as e:
                check(f"{method}, {how}", list(e), [kinds_of(own) for own in want])
        Local.seen = 0
        with OrderedEnqueuer(range(4), local, **kw) as e:
            check(f"{method}, local class", {type(item) is Local for item in e}, {True})
        check(f"{method}, local state", Local.seen, 0)
        if method != "fork":
            with OrderedEnqueuer(iter([Local(1), Local(2)]), lambda x: x, **kw) as e:
                check(f"{method}, back", {type(item) is Local for item in e}, {True})
    print("FAIL: " + "; ".join(problems) if problems else "ok")


main()
