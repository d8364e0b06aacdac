"""scikit-learn#29294/#30380 (2024; warning filters), dask#12224 (2026), numpy: settings that the program made at run time
and that a plain loop obeys: warning filters, numpy.seterr, decimal precision, the recursion limit, a default locale
of pandas, torch's default dtype. What does a worker have? Silence = another result than the plain loop's."""

import decimal
import sys
import warnings

import numpy as np

from enqueuer import GeneratorEnqueuer, Processes

warnings.simplefilter("ignore")
warnings.filterwarnings("error", message="deprecated by us")
np.seterr(divide="raise")
decimal.getcontext().prec = 50
sys.setrecursionlimit(20_000)
np.set_printoptions(precision=2)


def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)


def probe():
    try:
        warnings.warn("deprecated by us")
        yield "warning filter: not an error"
    except UserWarning:
        yield "warning filter: error"
    try:
        np.array([1.0]) / 0
        yield "seterr: no error"
    except FloatingPointError:
        yield "seterr: error"
    yield f"decimal: {decimal.Decimal(1) / 3}"
    try:
        yield f"recursion: {depth(15_000)}"
    except RecursionError:
        yield "recursion: RecursionError"
    yield f"print: {np.array([1 / 3])}"


want = list(probe())
problems = []
for method in ("fork", "forkserver", "spawn"):
    backend = Processes(start_method=method)
    with GeneratorEnqueuer(probe, backend=backend) as e:
        got = list(e)
    if got != want:
        problems.append(f"{method}: " + ", ".join(g[:40] for g, w in zip(got, want) if g != w))
print("FAIL: " + "; ".join(problems) if problems else "ok")
