"""dask#12224 (2026), cpython#128384 (2025), numpy#9444: context variables, decimal.localcontext, numpy.errstate that hold
where the loop is written: a plain generator runs in that context; a thread of workers has an empty one."""

import contextvars
import decimal

import numpy as np

from enqueuer import OrderedEnqueuer, imap, prefetch

tenant = contextvars.ContextVar("tenant", default="nobody")


def rows():
    for _ in range(2):
        yield tenant.get(), str(decimal.Decimal(1) / 3), np.geterr()["divide"]


def load(i):
    return tenant.get(), str(decimal.Decimal(1) / 3), np.geterr()["divide"]


problems = []
tenant.set("somebody")
with decimal.localcontext() as context, np.errstate(divide="raise"):
    context.prec = 5
    want = list(rows())
    for name, run in {
        "prefetch": lambda: list(prefetch(rows)),
        "workers=0": lambda: list(prefetch(rows, workers=0)),
        "tasks": lambda: list(OrderedEnqueuer(range(2), load)),
        "concurrency": lambda: list(OrderedEnqueuer(range(2), load, concurrency=2)),
        "imap": lambda: list(imap(load, range(2))),
    }.items():
        got = run()
        if got != want:
            problems.append(f"{name}: {got[0]} instead of {want[0]}")
print("FAIL: " + "; ".join(problems) if problems else "ok")
