"""Judge `stats().bottleneck()` by outcomes, on programs whose bottleneck is known.

    python benchmarks/diagnosis.py --out before.json
    python benchmarks/diagnosis.py --only http-thread stragglers --burners 2
    python benchmarks/diagnosis.py --sentence http-thread

Each situation is a small program that was built to have one bottleneck. Its advice is taken
literally: the program runs again with the setting that the advice names, and with every other
setting that an advice could name. An advice is useful if it gains at least half of what the best
of these gains, and it harms if it loses more than 5 %. Each number is measured in a fresh process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from auto import burning, busy

# Seconds after the first batch that do not count.
WARM_UP_S = 1.0
# Seconds that count when a setting is tried for the first time. The best one is measured again
# if the advice could be useful or not with a gain of the best that differs by this ratio.
TRY_S = 1.0
NOISE = 1.25
# Ratio to the rate before; the advice of a program that nothing makes faster need only not harm.
NOTABLE = 1.1
HARMS = 0.95
# Share of what the best known setting gains.
USEFUL = 0.5
# Further runs of the program before and after an advice that seems to harm.
CONFIRMATIONS = 2
# Seconds; a measurement that takes longer has failed.
LIMIT_S = 120
# Shares of the situations, in percent: kind right with no other programs and beside some, and
# unknown at most.
GOAL_IDLE, GOAL_BUSY, GOAL_UNKNOWN = 95, 90, 10
GROUPS = Path("/sys/fs/cgroup")
# Of the file by which a program enters its control group.
ENTRANCE = "DIAGNOSIS_GROUP"
# Of the server of objects, for the processes that fetch them.
PORT = "DIAGNOSIS_PORT"
OBJECT_S = 0.05

ENDLESS = range(10**9)
DEFAULTS = {
    **{"workers": 1, "concurrency": 1, "backend": "thread", "ordered": True},
    **{"max_queue_size": 10, "batch_size": None},
}


def wait(seconds: float, element: int) -> int:
    """Wait as for a file."""
    time.sleep(seconds)
    return element


def compute(seconds: float, element: int) -> int:
    """Compute in Python."""
    busy(seconds)
    return element


_SIGNAL = np.linspace(0, 1, 200_000)
_MATRIX = np.linspace(0, 1, 500 * 500).reshape(500, 500)
_LARGE = np.zeros(10_000_000, np.uint8)
_OWN = threading.local()


def spectrum(element: int) -> float:
    """Compute in numpy, which releases the GIL."""
    return float(np.sin(_SIGNAL + element).sum())


def product(element: int) -> float:
    """Compute in BLAS, which has a thread for each CPU."""
    return float((_MATRIX @ _MATRIX)[0, element % 500])


def filled(element: int) -> np.ndarray:
    """Fill an array of 10 MB, which takes less time than to copy it."""
    _LARGE.fill(element % 256)
    return _LARGE


def filled_in_place(element: int) -> np.ndarray:
    """Fill an array of 10 MB that a worker process need not copy."""
    from enqueuer import empty

    array = empty(_LARGE.shape, "uint8")
    array.fill(element % 256)
    return array


def copied(element: int) -> int:
    """Copy 40 MB between arrays of this thread, for which the memory is the limit."""
    if not hasattr(_OWN, "arrays"):
        _OWN.arrays = [np.ones(40_000_000, np.uint8) for _ in range(2)]
    np.copyto(*_OWN.arrays)
    return element


def fetch(element: int) -> int:
    """Return the size of an object that the server has, which takes 50 ms to answer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{os.environ[PORT]}/{element}") as answer:
        return len(answer.read())


def fetch_and_decode(element: int) -> float:
    """Fetch an object, and compute 0.25 ms in numpy, as to decode it."""
    return fetch(element) + float(np.sin(_SIGNAL[:50_000]).sum())


def straggling(element: int) -> int:
    """Wait 10 ms, but for each 20th element 200 ms."""
    time.sleep(0.01 if element % 20 else 0.2)
    return element


def stack_slowly(elements: list[int]) -> np.ndarray:
    """Compute in Python to make a batch."""
    busy(0.01)
    return np.array(elements)


def waiting_shard(seconds: float, shard: Any) -> Iterator[int]:
    """Wait for each item, as for a file."""
    for number in shard.split(ENDLESS):
        yield wait(seconds, number)


def fetching_shard(shard: Any) -> Iterator[int]:
    """Fetch an object of the server for each item."""
    for number in shard.split(ENDLESS):
        yield fetch(number)


def uneven_shard(times: float, shard: Any) -> Iterator[int]:
    """Wait for each item, and `times` as long in the second shard."""
    for number in shard.split(ENDLESS):
        yield wait(0.01 * (times if shard.index == 1 else 1), number)


def small_items() -> Iterator[int]:
    """Yield numbers."""
    yield from ENDLESS


def bursts() -> Iterator[int]:
    """Wait 2 ms for most items, and 40 ms for one of nine."""
    for number in ENDLESS:
        yield wait(0.04 if number % 9 == 4 else 0.002, number)


def use_bursts(number: int) -> None:
    """Wait as `bursts` does, but when that is quick."""
    time.sleep(0.04 if number % 9 == 0 else 0.002)


def late_shard() -> Iterator[int]:
    """Take 6 s to begin, and 5 ms for an item."""
    time.sleep(6)
    for number in ENDLESS:
        yield wait(0.005, number)


def do_nothing(number: int) -> None:
    """Only take the batch."""


def use_numpy(number: int) -> None:
    """Compute in numpy, as a training step on the CPU does."""
    for _ in range(4):
        spectrum(number)


@dataclasses.dataclass(frozen=True)
class Situation:
    """A program whose bottleneck is known, because it was built so.

    Attributes:
        about: What it does, and what limits it.
        right: Kinds of bottleneck that are right.
        source: Function of an element, for an `OrderedEnqueuer`; or a generator function.
        options: Options of the enqueuer, as code.
        others: Options, as code, each of which an advice could name instead.
        use: What the loop does with each batch, a function of its number.
        length: Number of elements of an epoch.
        is_generator: Whether `source` is a generator function, which may take a shard.
        cpus: Number of CPUs that the program may use; all if it is None.
        quota: Number of CPUs whose time its control group may use; None: it has none of its own.
        package: Package that it needs.
        code: Other changes of the program that an advice may ask for, by a pattern of its words,
            and the options, as code, that stand for them.
    """

    about: str
    right: tuple[str, ...]
    source: Callable[..., Any]
    options: str = ""
    others: tuple[str, ...] = ()
    use: Callable[[int], object] = do_nothing
    length: int = len(ENDLESS)
    is_generator: bool = False
    cpus: int | None = None
    quota: float | None = None
    package: str = ""
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)


def slow_shard(times: float) -> Situation:
    """Return the situation of two shards, one of which is `times` as slow."""
    return Situation(
        f"Two shards wait, one of them {times:g} times as long, and the loop wants both in turn.",
        ("slow shard",),
        functools.partial(uneven_shard, times),
        "workers=2, shards=2",
        ("ordered=False",),
        is_generator=True,
    )


FAST_LOOP = functools.partial(wait, 0.002)
SITUATIONS = {
    "file-tasks": Situation(
        "Tasks wait 20 ms each, and the loop takes 2 ms.",
        ("source",),
        functools.partial(wait, 0.02),
        "workers=2",
        ("workers=16", "concurrency=16"),
        use=FAST_LOOP,
    ),
    "file-shards": Situation(
        "Shards wait 20 ms an item, and the loop takes 2 ms.",
        ("source",),
        functools.partial(waiting_shard, 0.02),
        "workers=2",
        ("workers=16",),
        use=FAST_LOOP,
        is_generator=True,
    ),
    "http-thread": Situation(
        "One thread fetches objects, each of which takes 50 ms.",
        ("source",),
        fetch,
        "workers=1",
        ("workers=32", "concurrency=16", "concurrency=64"),
    ),
    "http-thread-16": Situation(
        "One thread fetches 16 objects at once.",
        ("source",),
        fetch,
        "workers=1, concurrency=16",
        ("workers=4", "concurrency=64", "concurrency=128"),
    ),
    "http-decoded-16": Situation(
        "One thread fetches and decodes 16 objects at once, and hardly computes.",
        ("source",),
        fetch_and_decode,
        "workers=1, concurrency=16",
        ("workers=4", "concurrency=64", "backend='process'"),
    ),
    "http-decoded-2x16": Situation(
        "Two threads fetch and decode batches of 16 objects, 16 at once each.",
        ("source",),
        fetch_and_decode,
        "workers=2, concurrency=16, batch_size=16",
        ("workers=8", "concurrency=64"),
    ),
    "http-batches-process": Situation(
        "Two processes fetch batches of 16 objects, one object at a time.",
        ("source",),
        fetch,
        "workers=2, batch_size=16, backend='process'",
        ("workers=16", "concurrency=16", "concurrency=64"),
    ),
    "http-process-16": Situation(
        "Two processes fetch 16 objects at once each.",
        ("source",),
        fetch,
        "workers=2, concurrency=16, backend='process'",
        ("workers=8", "concurrency=64"),
    ),
    "http-shards-process": Situation(
        "Two processes fetch the objects of a shard, one at a time.",
        ("source",),
        fetching_shard,
        "workers=2, backend='process'",
        ("workers=16", "workers=32"),
        is_generator=True,
    ),
    "python-thread": Situation(
        "Two threads compute in Python, so that they wait for the GIL.",
        ("source",),
        functools.partial(compute, 0.005),
        "workers=2",
        ("backend='process'", "workers=1"),
    ),
    "python-process": Situation(
        "One process computes in Python, and another CPU is free.",
        ("source",),
        functools.partial(compute, 0.005),
        "backend='process'",
        ("workers=2", "workers=4"),
    ),
    "numpy-thread": Situation(
        "One thread computes in numpy, without the GIL, and another CPU is free.",
        ("source",),
        spectrum,
        "workers=1",
        ("workers=2", "backend='process'"),
    ),
    "numpy-process": Situation(
        "Two processes compute in numpy and use both CPUs.",
        ("cpus", "source"),
        spectrum,
        "workers=2, backend='process'",
        ("workers=4", "backend='thread'"),
    ),
    "native-threads": Situation(
        "Four threads call BLAS, which has a thread for each CPU.",
        ("cpus", "source"),
        product,
        "workers=4",
        ("workers=1", "workers=2", "backend='process', workers=2"),
    ),
    "large": Situation(
        "Processes copy arrays of 10 MB, which takes longer than to fill them.",
        ("transport",),
        filled,
        "backend='process'",
        ("backend='thread'", "workers=2", "map=filled_in_place"),
        code={r"enqueuer\.empty": "map=filled_in_place"},
    ),
    "small-items": Situation(
        "A process sends numbers, one at a time.",
        ("transport",),
        small_items,
        "backend='process'",
        ("backend='thread'", "batch_size=64"),
        is_generator=True,
        code={r"[Yy]ield larger": "batch_size=64"},
    ),
    "collate": Situation(
        "A thread computes 10 ms in Python to stack 32 elements, and the loop 2 ms with them.",
        ("source",),
        functools.partial(wait, 0),
        "batch_size=32, collate=stack_slowly",
        ("backend='process'", "backend='process', workers=2"),
        use=functools.partial(compute, 0.002),
    ),
    "slow-1.3": slow_shard(1.3),
    "slow-1.6": slow_shard(1.6),
    "slow-2": slow_shard(2),
    "slow-4": slow_shard(4),
    "stragglers": Situation(
        "Four threads would keep up with the loop, but each 20th task takes 20 times as long.",
        ("queue",),
        straggling,
        "workers=4",
        ("max_queue_size=40", "ordered=False", "concurrency=16"),
        use=functools.partial(wait, 0.006),
    ),
    "short-epochs": Situation(
        "Four threads wait 20 ms for each of the 16 elements of an epoch.",
        ("source", "start-up"),
        functools.partial(wait, 0.02),
        "workers=4",
        ("workers=8", "workers=16", "concurrency=4"),
        use=FAST_LOOP,
        length=16,
    ),
    "bursts": Situation(
        "Worker and loop take as long on average, but one of nine batches takes much longer.",
        ("queue",),
        bursts,
        "max_queue_size=1",
        ("max_queue_size=4", "max_queue_size=16"),
        use=use_bursts,
        is_generator=True,
    ),
    "memory": Situation(
        "Two threads copy 40 MB, as fast as the memory allows.",
        ("cpus", "source"),
        copied,
        "workers=2",
        ("workers=1", "workers=4", "backend='process'"),
    ),
    "loop-python": Situation(
        "The loop computes 10 ms in Python, and the threads wait meanwhile.",
        ("loop",),
        functools.partial(wait, 0.005),
        "workers=2",
        ("workers=4", "backend='process'"),
        use=functools.partial(compute, 0.01),
    ),
    "loop-numpy": Situation(
        "The loop computes in numpy, and the worker process waits meanwhile.",
        ("loop",),
        functools.partial(wait, 0.002),
        "backend='process'",
        ("workers=2",),
        use=use_numpy,
    ),
    "loop-gpu": Situation(
        "The loop waits 10 ms, as for a GPU, and has more threads than it needs.",
        ("loop",),
        functools.partial(wait, 0.005),
        "workers=4",
        ("workers=2", "workers=8"),
        use=functools.partial(wait, 0.01),
    ),
    "loop-slowed-down": Situation(
        "Four processes compute in Python, and take the two CPUs from the loop's numpy.",
        ("cpus",),
        functools.partial(compute, 0.015),
        "workers=4, backend='process'",
        ("workers=1", "workers=2"),
        use=use_numpy,
    ),
    "loop-holds-gil": Situation(
        "The loop and two threads compute in Python, so that one waits for the other's GIL.",
        ("source",),
        functools.partial(compute, 0.005),
        "workers=2",
        ("backend='process'", "backend='process', workers=1", "workers=1"),
        use=functools.partial(compute, 0.01),
    ),
    "many-threads": Situation(
        "64 threads compute in Python, so that they wait for the GIL.",
        ("source",),
        functools.partial(compute, 0.005),
        "workers=64",
        ("backend='process'", "backend='process', workers=2", "workers=1"),
    ),
    "few-batches": Situation(
        "A batch takes 0.7 s, so that only a few were seen.",
        ("unknown", "source"),
        functools.partial(wait, 0.7),
    ),
    "late-start": Situation(
        "The generator takes 6 s to begin, longer than all the rest.",
        ("start-up",),
        late_shard,
        is_generator=True,
    ),
    "one-cpu": Situation(
        "The program may use one CPU only, for the loop and a process that computes.",
        ("cpus", "source"),
        functools.partial(compute, 0.005),
        "backend='process'",
        ("workers=2", "backend='thread'"),
        use=functools.partial(wait, 0.001),
        cpus=1,
    ),
    "one-cpu-numpy": Situation(
        "The program may use one CPU only, for two threads that compute in numpy.",
        ("cpus", "source"),
        spectrum,
        "workers=2",
        ("workers=1", "workers=4", "backend='process'"),
        cpus=1,
    ),
    "quota": Situation(
        "Two processes compute in Python, and their control group has the time of one CPU.",
        ("cpus", "source"),
        functools.partial(compute, 0.005),
        "workers=2, backend='process'",
        ("workers=1", "workers=4"),
        quota=1.0,
    ),
    "quota-file": Situation(
        "Two threads wait 20 ms each in a control group with the time of half a CPU.",
        ("source",),
        functools.partial(wait, 0.02),
        "workers=2",
        ("workers=16", "concurrency=16"),
        use=FAST_LOOP,
        quota=0.5,
    ),
    "ray-file": Situation(
        "Two Ray actors wait 20 ms each, and the loop takes 2 ms.",
        ("source",),
        functools.partial(wait, 0.02),
        "workers=2, backend='ray'",
        ("workers=8", "concurrency=16"),
        use=FAST_LOOP,
        package="ray",
    ),
    "ray-python": Situation(
        "One Ray actor computes in Python, and another CPU is free.",
        ("source",),
        functools.partial(compute, 0.005),
        "backend='ray'",
        ("workers=2", "workers=4"),
        package="ray",
    ),
}


def options_of(code: str) -> dict[str, Any]:
    """Evaluate options as they are written in a call."""
    import enqueuer

    names = {**vars(enqueuer), **globals()}
    return eval(f"dict({code})", names)


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Run the server of the objects in a process of its own, which ends with this one."""
    command = [sys.executable, os.path.abspath(__file__), "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        os.environ[PORT] = server.stdout.readline().decode().strip()
        try:
            yield
        finally:
            server.stdin.close()


async def serve() -> None:
    """Answer each connection with an object after 50 ms, until the standard input is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(OBJECT_S)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + bytes(1000))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextlib.contextmanager
def limited(cpus: float) -> Iterator[None]:
    """Make a control group with the time of so many CPUs, which the programs then enter."""
    is_new = (GROUPS / "cgroup.controllers").exists()
    group = (GROUPS if is_new else GROUPS / "cpu") / f"diagnosis-{os.getpid()}"
    group.mkdir()
    try:
        quota = str(int(cpus * 100_000))
        files = {"cpu.max": f"{quota} 100000"} if is_new else {"cpu.cfs_quota_us": quota}
        for name, text in files.items():
            (group / name).write_text(text)
        os.environ[ENTRANCE] = str(group / "cgroup.procs")
        yield
    finally:
        os.environ.pop(ENTRANCE, None)
        group.rmdir()


def missing(situation: Situation) -> str:
    """Return what a situation needs and this machine has not; empty if it has all."""
    if situation.package and importlib.util.find_spec(situation.package) is None:
        return f"{situation.package} is not installed"
    if situation.quota is not None:
        try:
            with limited(situation.quota):
                pass
        except OSError as error:
            return f"no control group can be made: {error}"
    return ""


def start(situation: Situation, change: str) -> Any:
    """Return an enqueuer with the options of the situation and the change, not yet started."""
    from enqueuer import GeneratorEnqueuer, OrderedEnqueuer

    options = options_of(situation.options) | options_of(change)
    if situation.is_generator:
        return GeneratorEnqueuer(situation.source, **options)
    options = {"map": situation.source, **options}
    return OrderedEnqueuer(range(situation.length), **options)


def measure(name: str, change: str, seconds: float) -> dict[str, Any]:
    """Run the loop, and return its elements a second after the warm-up, and the bottleneck."""
    situation = SITUATIONS[name]
    if situation.cpus is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: situation.cpus])
    if ENTRANCE in os.environ:
        Path(os.environ[ENTRANCE]).write_text(str(os.getpid()))
    options = options_of(situation.options) | options_of(change)
    count, first, counts_from = 0, 0.0, 0.0
    with start(situation, change) as enqueuer:
        # A loop that ends runs again.
        batches = itertools.chain.from_iterable(itertools.repeat(enqueuer))
        for number, _ in enumerate(batches):
            now = time.perf_counter()
            if number == 0:
                counts_from = now + WARM_UP_S
            if now >= counts_from:
                count += 1
                if count == 1:
                    first = now
                if now >= counts_from + seconds:
                    break
            situation.use(number)
        found = enqueuer.stats().bottleneck()
    rate = (count - 1) / (now - first) if count > 1 else count / (WARM_UP_S + seconds)
    return {
        "rate": rate * (options.get("batch_size") or 1),
        "kind": found.kind,
        "text": str(found),
        "advice": getattr(found, "advice", str(found)),
        "change": getattr(found, "change", None),
    }


def run(name: str, change: str, seconds: float) -> dict[str, Any]:
    """Measure a program with a change in a fresh process."""
    command = [sys.executable, os.path.abspath(__file__), "--one", name, change]
    command += ["--seconds", str(seconds)]
    situation = SITUATIONS[name]
    with contextlib.ExitStack() as stack:
        if situation.source in (fetch, fetch_and_decode, fetching_shard):
            stack.enter_context(serving())
        if situation.quota is not None:
            stack.enter_context(limited(situation.quota))
        try:
            done = subprocess.run(
                command, capture_output=True, check=True, text=True, timeout=LIMIT_S
            )
        except subprocess.SubprocessError as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            if not change:
                raise SystemExit(f"{name} failed:\n{said}") from None
            # An advice that cannot be followed.
            return {"rate": 0.0, "error": f"with {change}: {said.splitlines()[-1]}"}
    return json.loads(done.stdout.splitlines()[-1])


# What the sentences of a version without `change` ask for: the option, and its value by the
# number in the sentence and the value now.
SENTENCES: tuple[tuple[str, str, Callable[[int, Any], object]], ...] = (
    (r"About (\d+) workers? would keep up", "workers", lambda n, _: n),
    (r"no more than (\d+) workers? would help", "workers", lambda n, _: n),
    (r"(\d+) workers? would do as well", "workers", lambda n, _: n),
    (r"more workers than the (\d+) now would help", "workers", lambda n, _: 2 * n),
    (r"fewer (?:workers|threads)()", "workers", lambda _, now: max(1, now // 2)),
    (r"a larger `concurrency`()", "concurrency", lambda _, now: max(16, 4 * now)),
    (r"a larger max_queue_size than (\d+)", "max_queue_size", lambda n, _: 4 * n),
    (r"use backend='process'()", "backend", lambda *_: "process"),
    (r"use backend='thread'()", "backend", lambda *_: "thread"),
    (r"use ordered=False()", "ordered", lambda *_: False),
)


def as_code(options: Mapping[str, Any]) -> str:
    """Return options as they are written in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def is_set(situation: Situation, change: str) -> bool:
    """Return whether the situation has these options already."""
    try:
        return options_of(change).items() <= (DEFAULTS | options_of(situation.options)).items()
    except Exception:
        # Of options that cannot be evaluated, the run reports the error.
        return False


def advised(situation: Situation, found: Mapping[str, Any]) -> str:
    """Return what the advice changes, as code: the first change that it names, or nothing."""
    change, advice = found["change"], found["advice"]
    if not change:
        named = [
            (match.start(), code)
            for pattern, code in situation.code.items()
            if (match := re.search(pattern, advice))
        ]
        if change is None:
            named += named_options(DEFAULTS | options_of(situation.options), advice)
        change = min(named, default=(0, ""))[1]
    return "" if is_set(situation, change) else change


def named_options(now: Mapping[str, Any], advice: str) -> list[tuple[int, str]]:
    """Return each option that the sentence of an advice names, as code, and where."""
    return [
        (match.start(), as_code({option: value_of(int(match[1] or 0), now[option])}))
        for pattern, option, value_of in SENTENCES
        if (match := re.search(pattern, advice))
    ]


Runs = dict[str, list[dict[str, Any]]]


def rate_of(runs: Runs, change: str) -> float:
    """Return the median of the rates that were measured with a change."""
    return statistics.median(one["rate"] for one in runs[change])


def enough(best: float) -> float:
    """Return the least gain of a useful advice, by that of the best setting."""
    return HARMS if best < NOTABLE else 1 + USEFUL * (best - 1)


def judge(name: str, seconds: float, repeats: int, known: Mapping[str, float]) -> dict[str, Any]:
    """Measure a situation, what it is advised, and the others; return what came out.

    `known` has the gains of the others if they were measured before.
    """
    situation, runs = SITUATIONS[name], Runs()

    def again(change: str, times: int, seconds: float) -> float:
        """Measure a change again, and return its gain."""
        for _ in range(times):
            runs.setdefault(change, []).append(run(name, change, seconds))
        return rate_of(runs, change) / rate_of(runs, "")

    again("", repeats, seconds)
    wrong = [one for one in runs[""] if one["kind"] not in situation.right]
    found = (wrong or runs[""])[0]
    change = advised(situation, found)
    gain = again(change, repeats, seconds) if change else 1.0
    gains = dict(known)
    if not known:
        tried = [other for other in situation.others if other != change]
        gains = {other: again(other, 1, min(TRY_S, seconds)) for other in tried}
        best = max(gains, key=gains.__getitem__, default="")
        gains[""] = 1.0
        closest, farthest = enough(gains[best] / NOISE), enough(gains[best] * NOISE)
        if gains[best] >= NOTABLE and closest <= gain < farthest:
            again(best, repeats - 1, seconds)
    if change and gain < HARMS:
        for _ in range(CONFIRMATIONS):
            again("", 1, seconds)
            again(change, 1, seconds)
    gains |= {code: rate_of(runs, code) / rate_of(runs, "") for code in runs}
    gain = gains[change]
    best = max(gains, key=gains.__getitem__)
    return {
        **{"kinds": [one["kind"] for one in runs[""][:repeats]], "is_right": not wrong},
        "is_unknown": any(one["kind"] == "unknown" for one in runs[""][:repeats]),
        **{"text": found["text"], "change": change, "gain": gain},
        **{"best": best, "best_gain": gains[best]},
        **{"is_useful": gain >= enough(gains[best]), "harms": gain < HARMS},
        "errors": sorted({one["error"] for one in runs[change] if "error" in one}),
        "rates": {code: [one["rate"] for one in some] for code, some in runs.items()},
        "gains": gains,
    }


HEAD = (
    f"{'situation':22} {'kind':20} {'before':>9}  {'gain of the advice':34} "
    f"{'gain of the best known':34} outcome"
)


def line_of(name: str, row: Mapping[str, Any]) -> str:
    """Return the line of a situation in the table."""
    kinds = "/".join(dict.fromkeys(row["kinds"])) + ("" if row["is_right"] else " WRONG")
    outcome = "HARMS" if row["harms"] else "useful" if row["is_useful"] else "not useful"
    before = statistics.median(row["rates"][""])
    advice, best = (
        f"{gain:5.2f} {change or 'no change'}"
        for gain, change in ((row["gain"], row["change"]), (row["best_gain"], row["best"]))
    )
    return f"{name:22} {kinds:20} {before:9.1f}  {advice:34} {best:34} {outcome}"


def print_score(rows: Mapping[str, Mapping[str, Any]], burners: int) -> None:
    """Print how many situations came out well, and the sentences of the others."""
    least = GOAL_BUSY if burners else GOAL_IDLE
    for text, name, goal in (
        ("kind right", "is_right", f"at least {least} %"),
        ("useful", "is_useful", "none"),
        ("harms", "harms", "0"),
        ("unknown", "is_unknown", f"at most {GOAL_UNKNOWN} %"),
    ):
        count = sum(row[name] for row in rows.values())
        share = 100 * count / max(1, len(rows))
        print(f"{text}: {count} of {len(rows)} ({share:.0f} %, goal: {goal})")
    for name, row in rows.items():
        if row["harms"] or not (row["is_right"] and row["is_useful"]):
            right = " or ".join(SITUATIONS[name].right)
            print(f"\n{name}: {SITUATIONS[name].about}\n    right: {right}")
            print("\n".join(f"    {text}" for text in (row["text"], *row["errors"])))


def known_gains(path: Path | None) -> dict[str, dict[str, float]]:
    """Return the gains of the settings of each situation, from a file of an earlier run."""
    if path is None:
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {name: row["gains"] for name, row in rows.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge the situations that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SITUATIONS, default=list(SITUATIONS))
    parser.add_argument("--seconds", type=float, default=3.0, help="after the warm-up")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--burners", type=int, default=0, help="programs that compute meanwhile")
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument("--known", type=Path, help="such a file, for the gains of the others")
    parser.add_argument("--list", action="store_true", help="only print the situations")
    parser.add_argument("--sentence", choices=SITUATIONS, help="only print that of a situation")
    parser.add_argument("--one", nargs=2, metavar=("SITUATION", "CHANGE"))
    parser.add_argument("--serve", action="store_true", help="only run the server of objects")
    given = parser.parse_args(arguments)
    if given.serve:
        asyncio.run(serve())
    elif given.one:
        print(json.dumps(measure(*given.one, given.seconds)))
    elif given.sentence:
        print(run(given.sentence, "", given.seconds)["text"])
    elif given.list:
        for name, situation in SITUATIONS.items():
            print(f"{name:22} {' or '.join(situation.right):20} {situation.about}")
    else:
        known, rows = known_gains(given.known), {}
        settings = {name: getattr(given, name) for name in ("seconds", "repeats", "burners")}
        print(HEAD, flush=True)
        with burning(given.burners):
            for name in given.only:
                if needed := missing(SITUATIONS[name]):
                    print(f"{name:22} left out: {needed}", flush=True)
                    continue
                rows[name] = judge(name, given.seconds, given.repeats, known.get(name, {}))
                print(line_of(name, rows[name]), flush=True)
                if given.out:
                    given.out.write_text(json.dumps({**settings, "rows": rows}, indent=1))
        print_score(rows, given.burners)


if __name__ == "__main__":
    main()
