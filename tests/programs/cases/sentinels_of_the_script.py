"""Objects that pickle by their name: a sentinel, a mode, a `typing.NewType`; a script has them at its top."""

import typing

from enqueuer import OrderedEnqueuer, Processes


class Missing:
    only = None

    def __new__(cls):
        cls.only = cls.only or super().__new__(cls)
        return cls.only

    def __reduce__(self):
        return "MISSING"


class Mode:
    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return self.name


MISSING = Missing()
TRAIN, TEST = Mode("TRAIN"), Mode("TEST")
UserId = typing.NewType("UserId", int)


def use(i, default=MISSING):
    return UserId(i), default is MISSING is Missing(), MISSING, TRAIN, TEST


problems = []
for method in ("fork", "forkserver", "spawn"):
    with OrderedEnqueuer([1, 2], use, backend=Processes(method)) as enqueuer:
        got = list(enqueuer)
    if got != [use(1), use(2)]:
        problems.append((method, got))
print("FAIL: " + "; ".join(map(str, problems)) if problems else "ok")
