"""Count the instructions of an item, a task, a large batch and the import; fail if they grew.

    python benchmarks/instructions.py                  # compare with benchmarks/instructions.json
    python benchmarks/instructions.py --only ints-process tiny-process
    python benchmarks/instructions.py --repeats 3      # medians, and the spread
    python benchmarks/instructions.py --renew          # write the figures

Times on a shared machine differ by a third from run to run; counted instructions differ by less
than 1 %. Valgrind counts them. Each program runs with n and with 2n items, and the difference is
that of n items. With processes, the loop's and the worker's instructions are counted separately.

A figure holds for the versions that it was taken with. With other versions the program prints
both and does not fail.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_FIGURES = _HERE / "instructions.json"
_TOLERANCE = 0.05  # more than this above the figure fails
_ROUNDS = 16  # and twice as many; enough that a start, which varies by 20,000, does not matter
_ITEMS = {"large-process": 4}  # in a round, see counted.py; 64 if not given
_LIMIT_S = 300.0  # for one program, on a machine with other work; it takes about 6 s
_DIGITS = 3  # of a figure that is kept, so that noise does not change it
_TAIL = 2000  # characters of the output of a program that failed

_COUNT = [
    *("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"),
    sys.executable,
]
_COUNTED = re.compile(r"^==(\d+)== I +refs: +([\d,]+)$", re.MULTILINE)

_BUILD = ("python", "libc", "valgrind", "machine")
CASES: dict[str, tuple[str, ...]] = {
    # versions that the count depends on
    "ints-thread": _BUILD,
    "ints-process": _BUILD,
    "tiny-thread": (*_BUILD, "numpy"),
    "tiny-process": (*_BUILD, "numpy"),
    "task-thread": (*_BUILD, "numpy"),
    "task-process": (*_BUILD, "numpy"),
    "large-process": (*_BUILD, "numpy"),
    "import": (*_BUILD, "numpy"),
}


class CountError(Exception):
    """A counted program failed."""


@dataclass(frozen=True)
class Comparison:
    """A count beside its figure.

    Attributes:
        name: Name of the case and of its part.
        count: Instructions of one item.
        figure: The figure that is kept, or None.
        verdict: `"ok"`, `"above"`, `"below"`, `"no figure"` or `"other versions"`.
    """

    name: str
    count: float
    figure: float | None
    verdict: str

    @property
    def fails(self) -> bool:
        """Whether the run fails because of it."""
        return self.verdict in ("above", "no figure")

    def __str__(self) -> str:
        if not self.figure:
            return f"{self.name:22} {self.count:14,.0f} {'-':>14} {'':>9}  {self.verdict}"
        change = self.count / self.figure - 1
        verdict = "" if self.verdict == "ok" else self.verdict
        return (
            f"{self.name:22} {self.count:14,.0f} {self.figure:14,.0f} {change:+9.1%}  {verdict}"
        ).rstrip()


def main() -> int:
    """Run what the command line asks for; return 1 if a count grew."""
    options = _options()
    if shutil.which("valgrind") is None:
        print("SKIPPED: instructions are not counted, as valgrind is not installed")
        return 0
    here = versions()
    try:
        counts = count_all(options.only, options.repeats)
    except CountError as error:
        print(f"FAILED: {error}")
        return 1
    if options.renew:
        renew(counts, here, options.figures)
        return 0
    kept = json.loads(options.figures.read_text())
    compared = list(compare(counts, here, kept))
    print(f"{'instructions per item':22} {'now':>14} {'figure':>14} {'change':>9}")
    print(*compared, *remarks(compared, here, kept["taken_with"]), sep="\n")
    return int(any(one.fails for one in compared))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", choices=CASES, default=list(CASES), help="cases"
    )
    parser.add_argument("--repeats", type=int, default=1, help="of each count (default: 1)")
    parser.add_argument("--renew", action="store_true", help="write the figures")
    parser.add_argument(
        "--figures", type=Path, default=_FIGURES, help=f"file of them (default: {_FIGURES.name})"
    )
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.renew and len(options.only) < len(CASES):
        parser.error("--renew counts all cases, since their versions are kept only once")
    return options


# --- comparing ---


def compare(
    counts: Mapping[str, float], here: Mapping[str, str], kept: Mapping[str, Mapping[str, object]]
) -> Iterator[Comparison]:
    """Yield each count beside its figure.

    Args:
        counts: Instructions of one item, by the name of the case and of its part.
        here: Versions that the counts were taken with.
        kept: What `instructions.json` holds.
    """
    taken_with, figures = kept["taken_with"], kept["figures"]
    for name, count in counts.items():
        figure = figures.get(name)
        needed = CASES[name.split()[0]]
        if any(here.get(one) != taken_with.get(one) for one in needed):
            verdict = "other versions"
        elif figure is None:
            verdict = "no figure"
        elif count > figure * (1 + _TOLERANCE):
            verdict = "above"
        elif count < figure * (1 - _TOLERANCE):
            verdict = "below"
        else:
            verdict = "ok"
        yield Comparison(name, count, figure, verdict)


def remarks(
    compared: list[Comparison], here: Mapping[str, str], taken_with: Mapping[str, str]
) -> Iterator[str]:
    """Yield lines about what the comparison means."""

    def named(verdict: str) -> str:
        return ", ".join(one.name for one in compared if one.verdict == verdict)

    if above := named("above"):
        yield f"FAILED: more than {_TOLERANCE:.0%} above the figure: {above}."
        yield "Make it cheaper, or renew the figures as CONTRIBUTING.md describes."
    if missing := named("no figure"):
        yield f"FAILED: {_FIGURES.name} has no figure of {missing}. Write it with --renew."
    if below := named("below"):
        yield f"NOTE: more than {_TOLERANCE:.0%} below the figure: {below}."
        yield "Renew the figures with --renew, so that they guard this as well."
    if other := named("other versions"):
        differ = ", ".join(
            f"{one} {here.get(one)} instead of {taken_with.get(one)}"
            for one in sorted({*here, *taken_with})
            if here.get(one) != taken_with.get(one)
        )
        yield f"NOTE: instructions were not compared with figures of other versions ({differ}):"
        yield f"{other}."


def renew(counts: Mapping[str, float], here: Mapping[str, str], file: Path) -> None:
    """Write the figures and the versions that they were taken with."""
    figures = {name: rounded(count) for name, count in counts.items()}
    file.write_text(json.dumps({"taken_with": here, "figures": figures}, indent=2) + "\n")
    for name, figure in figures.items():
        print(f"{name:22} {figure:14,d}")
    print(f"wrote {file}")


def rounded(count: float) -> int:
    """Return a count without the digits that differ from run to run."""
    return int(float(f"{count:.{_DIGITS}g}"))


def versions() -> dict[str, str]:
    """Return the versions that a count depends on."""
    printed = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True)
    # Another build of the same CPython executes other instructions.
    build = f"{platform.python_compiler()}, {platform.python_build()[1]}"
    # Without AVX2, glibc and numpy copy in another way. Valgrind hides what is newer.
    cpu = Path("/proc/cpuinfo")
    has_avx2 = cpu.exists() and " avx2 " in cpu.read_text()
    return {
        "python": f"{platform.python_version()} ({build})",
        "libc": " ".join(platform.libc_ver()),
        "valgrind": printed.stdout.strip().removeprefix("valgrind-"),
        "machine": platform.machine() + (" with AVX2" if has_avx2 else ""),
        "numpy": version("numpy"),
    }


# --- counting ---


def count_all(cases: list[str], repeats: int) -> dict[str, float]:
    """Count cases, as many programs at a time as there are CPUs; return medians.

    Other work on the machine does not change a count.

    Raises:
        CountError: A program failed.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        waiting: dict[str, list[tuple[Future[list[int]], Future[list[int]]]]] = {}
        for case in cases:
            warm_up(case)
            few, many = programs(case)
            waiting[case] = [
                (pool.submit(count, few), pool.submit(count, many)) for _ in range(repeats)
            ]
        counts: dict[str, float] = {}
        for case, pairs in waiting.items():
            size = 1 if case == "import" else _ROUNDS * _ITEMS.get(case, 64)
            found = [
                [
                    (more - less) / size
                    for less, more in zip(few.result(), many.result(), strict=True)
                ]
                for few, many in pairs
            ]
            for part, values in zip(parts(case), zip(*found, strict=True), strict=True):
                name = f"{case} {part}".strip()
                counts[name] = statistics.median(values)
                if repeats > 1:
                    spread = max(values) / min(values) - 1
                    print(f"{name:22} {min(values):14,.0f} to {max(values):,.0f}, {spread:.2%}")
    return counts


def programs(case: str) -> tuple[list[str], list[str]]:
    """Return the arguments of Python with n items and with 2n."""
    if case == "import":
        # The modules of the enqueuers are imported when they are first used.
        used = "import enqueuer; enqueuer.GeneratorEnqueuer, enqueuer.OrderedEnqueuer"
        return ["-c", "import numpy"], ["-c", f"import numpy; {used}"]
    program = str(_HERE / "counted.py")
    return [program, case, str(_ROUNDS)], [program, case, str(2 * _ROUNDS)]


def parts(case: str) -> tuple[str, ...]:
    """Return the names of what is counted separately."""
    return ("loop", "worker") if case.endswith("-process") else ("",)


def warm_up(case: str) -> None:
    """Run a case without valgrind, so that its modules are compiled."""
    _run([sys.executable, *programs(case)[1]])


def count(program: list[str]) -> list[int]:
    """Return the instructions of a program: of its first process, then of the one it forked.

    Raises:
        CountError: It failed.
    """
    pid, errors = _run([*_COUNT, *program])
    counted = {int(pid): int(refs.replace(",", "")) for pid, refs in _COUNTED.findall(errors)}
    if pid not in counted:
        raise CountError(f"valgrind counted nothing of {' '.join(program)}: {errors[-_TAIL:]}")
    return [counted.pop(pid), *counted.values()]


def _run(command: list[str]) -> tuple[int, str]:
    """Run a program; return its process and what it wrote to the standard error."""
    process = subprocess.Popen(
        command,
        cwd=_HERE,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise CountError(f"{' '.join(command)} did not end within {_LIMIT_S:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        raise CountError(f"{' '.join(command)} failed:\n{errors[-_TAIL:]}")
    return process.pid, errors


def _environment() -> dict[str, str]:
    """Return an environment in which a program does the same each time."""
    ours = {name: value for name, value in os.environ.items() if not _is_setting(name)}
    # Threads of BLAS spin while they have nothing to do.
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**ours, **one_thread, "PYTHONPATH": str(_HERE.parent), "PYTHONHASHSEED": "0"}


def _is_setting(name: str) -> bool:
    return name.startswith(("PYTHON", "ENQUEUER_", "MALLOC_", "GLIBC_", "VALGRIND_"))


if __name__ == "__main__":
    sys.exit(main())
