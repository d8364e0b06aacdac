"""Sources and bad objects that worker processes can import, and small tools for tests."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import gc
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np

from enqueuer import BatchTimeout
from enqueuer.backends.job import HAS_FORKSERVER
from enqueuer.enqueuers.options import Options

LIMIT = 60.0  # seconds; generous: only a hang reaches it, also beside six other programs
LARGE_ROWS = 3000  # of 8 bytes: so large a batch crosses in shared memory


def needs(package):
    """Import a package; skip where it is not installed, unless all are to be there."""
    if os.environ.get("ENQUEUER_NEEDS_ALL"):
        return importlib.import_module(package)
    import pytest  # not above: each worker that is not forked imports this file, for its source

    return pytest.importorskip(package)


def needs_installed(*packages):
    """Skip where one is not installed; import none of them, as another process is to do that."""
    import pytest  # as above

    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing and not os.environ.get("ENQUEUER_NEEDS_ALL"):
        pytest.skip(f"not installed: {', '.join(missing)}")


def backend_of(options):
    """Return the name of the backend that options choose."""
    return Options(backend=options.get("backend")).backend_name


def start_method_of(options):
    """Return the start method that options choose; None if they choose none."""
    return getattr(options.get("backend"), "start_method", None)


def with_backend(options, **changes):
    """Return the same options with changes of the backend's own."""
    return options | {"backend": dataclasses.replace(options["backend"], **changes)}


def counting(shard):
    """Yield (shard, number) for ever."""
    number = 0
    while True:
        yield shard.index, number
        number += 1


def twelve(shard):
    """Yield this shard's share of 0..11."""
    yield from shard.split(range(12))


def numbered(shard):
    """Yield 3 batches that are full of their own number; every other one has a large array."""
    for number in range(3):
        yield numbered_batch(shard.epoch, shard.index, number)


def numbered_task(element, task):
    """Return such a batch of an element."""
    return numbered_batch(task.epoch, 0, element)


def numbered_batch(epoch, index, number):
    """Return a batch that is full of its number, so that a change of it shows."""
    size = LARGE_ROWS if number % 2 == 0 else 4
    return {"where": (epoch, index, number), "x": np.full(size, 100 * epoch + 10 * index + number)}


def number_of(batch):
    """Return which one a numbered batch is; fail if it is not whole."""
    epoch, index, number = batch["where"]
    if not (batch["x"] == 100 * epoch + 10 * index + number).all():
        raise AssertionError(f"batch {batch['where']} has {set(batch['x'].tolist())}")
    return batch["where"]


def uneven(shard):
    """Yield (shard, number): 0, 3, 6 ... items of shard 0, 1, 2 ..."""
    for number in range(3 * shard.index):
        yield shard.index, number


def random_batches(shard):
    """Yield batches of this shard's random numbers: small and large arrays, nested."""
    for number in range(4 + shard.index):
        yield {
            "where": (shard.index, shard.epoch, number),
            "small": shard.rng.random(3),
            "large": [shard.rng.integers(0, 255, (40, 1000), np.uint8)],
        }


def ragged(shard):
    """Yield batches of 4, 4 and 2 rows: floats, names, an epoch."""
    for rows in (range(4), range(4, 8), range(8, 10)):
        yield {
            "x": np.array([[row, row] for row in rows], np.float32),
            "names": [f"row {row}" for row in rows],
            "epoch": shard.epoch,
        }


def points(shard):
    """Yield batches of points on the line y = 2x + 1."""
    for _ in shard.split(range(20)):
        x = shard.rng.random((8, 1)).astype(np.float32)
        yield x, 2 * x + 1


def augmented(x, task):
    """Draw from the task's generator; every fifth result is missing, every seventh is large."""
    if x % 5 == 4:
        return None
    large = task.rng.integers(0, 255, 200_000 if x % 7 == 0 else 3, np.uint8)
    return x, task.index, task.epoch, large.tobytes()


def column(number, rows=3):
    """Return a batch (x, y) of columns that hold a number."""
    return np.full((rows, 1), number, np.float32), np.full((rows, 1), number, np.float32)


def columns(shard):
    """Yield 0, 1, 2 ... as such batches, for ever."""
    number = shard.index
    while True:
        yield column(number)
        number += shard.count


def column_of(element, task):
    """Return such a batch, of 100 times the epoch plus the element."""
    return column(100 * task.epoch + element)


def sums(shard):
    """Yield batches to learn the sum of eight numbers from, for ever."""
    while True:
        x = shard.rng.random((32, 8), np.float32)
        yield x, x.sum(axis=1, keepdims=True)


def columns_then(act, count, element):
    """Return a batch of a number; call `act` instead after `count` of them."""
    if element == count:
        act()
    return column(element)


def five_columns_then_fail():
    yield from map(column, range(5))
    raise KeyError("no such image")


def bytes_of(batch):
    """Return a batch as plain data that can be compared."""
    return batch["where"], batch["small"].tobytes(), batch["large"][0].tobytes()


def packed(state):
    """Return a state as it comes out of a checkpoint."""
    return json.loads(json.dumps(state))


def taken(enqueuer, count):
    """Return so many batches of a new run, and the state behind them."""
    with enqueuer:
        return list(itertools.islice(enqueuer, count)), packed(enqueuer.state_dict())


def rest_of(enqueuer, state):
    """Return what an enqueuer gives from a state to the end of the epoch."""
    enqueuer.load_state_dict(state)
    with enqueuer:
        return list(enqueuer)


@dataclasses.dataclass(frozen=True)
class Elements:
    """An iterable of numbers, of unknown length, that can be iterated again."""

    count: int

    def __iter__(self):
        return iter(range(self.count))


class Counting:
    """An iterable that counts how often it was begun."""

    def __init__(self):
        self.begun = 0

    def __iter__(self):
        self.begun += 1
        return iter(range(6))


class Reversed:
    """A sequence that reverses itself after each epoch."""

    def __init__(self):
        self.elements = list(range(6))

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.elements[index]

    def on_epoch_end(self):
        self.elements.reverse()


class Reiterable:
    """An iterable that is resumed itself, as torchdata's loaders are."""

    def __init__(self, stop=20):
        self.at, self.stop = 0, stop

    def __iter__(self):
        while self.at < self.stop:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Resumable:
    """An iterator over rows that is resumed itself."""

    def __init__(self, rows):
        self.rows, self.at = list(rows), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.rows):
            raise StopIteration
        self.at += 1
        return self.rows[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Failing:
    """A generator function that yields `count` items in each shard, then calls `act`."""

    def __init__(self, count, act, shard=0):
        self.count = count
        self.act = act
        self.shard = shard

    def __call__(self, shard):
        for number in range(self.count):
            yield shard.index, number
        if shard.index == self.shard:
            self.act()
        yield shard.index, self.count


class Gated:
    """A source of (shard, number) that waits before some of its items until it is let on.

    Args:
        folder: For the gates, pipes with names, which work in any process; one for each stop, as
            one that has not been closed yet would let the next one through.
        stops: Before which items.
        act: What to do instead of waiting at the gate.
        count: How many items a shard has.
    """

    def __init__(self, folder, stops=((1, 1),), act=None, count=3):
        self.count = count
        self.act = act
        self.opened = 0
        self.gates = {stop: str(Path(folder, "gate {} {}".format(*stop))) for stop in stops}
        for gate in self.gates.values():
            os.mkfifo(gate)

    def __call__(self, shard):
        for number in range(self.count):
            yield self.item(shard.index, number)

    def item(self, shard, number):
        if (shard, number) in self.gates:
            self.wait_at_the_gate((shard, number)) if self.act is None else self.act()
        return shard, number

    def wait_at_the_gate(self, stop):
        with open(self.gates[stop]):
            pass

    def let_on(self):
        """Release a waiting thread, or wait until one comes: each time at the next gate."""
        gate = list(self.gates.values())[self.opened]
        self.opened += 1
        with open(gate, "w"):
            pass


class TwoArguments(Exception):
    """An exception that plain pickle cannot rebuild."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.a = a
        self.b = b


class HoldsLock(Exception):
    """An exception that nothing can pickle."""

    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def raise_value_error():
    raise ValueError("bad value", 7)


def raise_two_arguments():
    raise TwoArguments(1, "two")


def raise_holds_lock():
    raise HoldsLock


def raise_key_error():
    raise KeyError("missing")


def raise_unicode_error():
    b"\xff".decode()


def raise_stop_iteration():
    raise StopIteration(5)


def raise_chained():
    try:
        raise KeyError("cause")
    except KeyError as error:
        raise RuntimeError("effect") from error


def recurse():
    recurse()


def exit_zero():
    raise SystemExit(0)


def interrupt():
    raise KeyboardInterrupt


def kill_self():
    if os.environ.get("ENQUEUER_RAY"):
        time.sleep(0.2)  # what was given to Ray leaves a moment later
    os.kill(os.getpid(), signal.SIGKILL)


def kill_once(mark):
    """Kill the worker that comes here first; a file is the mark that one did."""
    if not mark.exists():
        mark.touch()
        kill_self()


def exit_hard():
    os._exit(0)


def exit_hard_three():
    os._exit(3)


def abort():
    os.abort()


def hang():
    time.sleep(1000)


def hang_in_a_regex():
    """Hang in C with the GIL held, and in no system call."""
    re.match("(a+)+$", 60 * "a" + "b")


def hang_in_a_lock():
    """Hang in C without the GIL."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang_deep(depth=150):
    """Hang below more frames than are shown."""
    if depth:
        hang_deep(depth - 1)
    else:
        hang()


def stop_self():
    os.kill(os.getpid(), signal.SIGSTOP)


def alive(pid):
    """Tell whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pid_of(enqueuer, worker=0):
    """Return the process of a worker, once that is known; fail if it is not known in time."""

    def find():
        return re.search(r"process (\d+)", enqueuer.stats().workers[worker].name)

    wait_until(find)
    return int(find()[1])


def wait_until(condition, limit=LIMIT):
    """Wait for a change in another process, which sends no event; fail at `limit`."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def timeout_of(enqueuer):
    """Return the text of the BatchTimeout of a loop that waits for ever."""
    import pytest  # as above

    with pytest.raises(BatchTimeout) as caught:
        next(iter(enqueuer))
    assert caught.value.__context__ is None  # how the wait was cut is nobody's business
    return str(caught.value)


def text_when(enqueuer, words):
    """Return the text of a BatchTimeout that has some words: a worker needs time to get there."""
    texts = []

    def has_come():
        texts.append(timeout_of(enqueuer))
        return words in texts[-1]

    wait_until(has_come)
    return texts[-1]


def run_in_threads(functions):
    """Call functions, each in a thread of its own; fail unless all return in time."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


@contextlib.contextmanager
def handling(number, handler):
    """Have a handler of a signal, and afterwards the one of before."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class Bar:
    """Stands for a bar of tqdm, and records its calls; `made` has all of them."""

    made: list[Bar]

    def __init__(self, **options):
        self.options = options
        self.done = options.get("initial", 0)
        self.closed = 0
        self.texts = []
        Bar.made.append(self)

    def update(self, more):
        self.done += more

    def set_postfix_str(self, text, refresh=True):
        self.texts.append(text)

    def close(self):
        self.closed += 1


class Disturbed(AssertionError):
    """What was measured is not right, which other programs on the machine may have caused."""


def check_prompt(seconds, limit):
    """Raise Disturbed if something took too long, by `time.monotonic()`."""
    if seconds >= limit:
        raise Disturbed(f"it took {seconds:.2f} s, and must take less than {limit:.2f} s")


def retry_if_disturbed(test):
    """Run a test up to five times while it is disturbed; what is wrong is so each time.

    Where more programs want to run than there are CPUs, the test is skipped then.
    """

    import pytest  # as above

    @functools.wraps(test)
    def run(*args, **kwargs):
        for _ in range(4):
            with contextlib.suppress(Disturbed):
                return test(*args, **kwargs)
        try:
            return test(*args, **kwargs)
        except Disturbed as error:
            if os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1):
                pytest.skip(f"other programs disturb it: {error}")
            raise

    return run


def collect_until(condition, limit=LIMIT):
    """Collect garbage until `condition`; it does nothing while another thread collects."""
    wait_until(lambda: gc.collect() >= 0 and condition(), limit)


# --- sources that crash ------------------------------------------------------------------------


class Crashing:
    """A source of 0, 1, 2 that notes the time in a file and calls `act` at one place of its life.

    Places: "load" (unpickling the source), "open", "first", "third", "pickling" the third item,
    "finally".
    """

    def __init__(self, where, act, mark):
        self.where = where
        self.act = act
        self.mark = mark

    def at(self, where):
        if where == self.where:
            with open(self.mark, "w") as file:
                file.write(repr(time.monotonic()))
            self.act()

    def __call__(self, shard):
        self.at("open")
        return self.items()

    def items(self):
        self.at("first")
        try:
            yield 0
            yield 1
            self.at("third")
            yield CrashesWhenPickled(self) if self.where == "pickling" else 2
        finally:
            self.at("finally")

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.at("load")


class CrashesWhenPickled:
    def __init__(self, source):
        self.source = source

    def __reduce__(self):
        self.source.at("pickling")
        return int, (2,)


class CrashesWhenLoaded:
    """An item that calls `act` in the process that unpickles it."""

    def __init__(self, act):
        self.act = act

    def __reduce__(self):
        return _call, (self.act,)


def _call(act):
    act()


def segfault():
    faulthandler._sigsegv()


def hang_deaf():
    """Hang, and ignore every request to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1000)


def hang_in_c():
    """Hang in C with the GIL held."""
    ctypes.PyDLL(None).sleep(1000)


def kill_one(enqueuer, rng, starting=False):
    """Kill a process of an enqueuer's workers, if one lives; return how many were killed.

    Args:
        enqueuer: The enqueuer.
        rng: Draws the victim.
        starting: Whether to kill only one that has not said a word yet.
    """
    # Not above: each worker that is not forked imports this file, for its source.
    from enqueuer.backends.pool import WorkerState
    from enqueuer.enqueuers.enqueuer import core_of

    states = {WorkerState.STARTING} if starting else {WorkerState.STARTING, WorkerState.RUNNING}
    run = core_of(enqueuer).run
    workers = [] if run is None else run.backend.workers()
    living = [one for one in workers if hasattr(one, "send_signal") and one.state in states]
    if not living:
        return 0
    try:
        rng.choice(living).send_signal(signal.SIGKILL)
    except (OSError, ValueError):  # it has been buried just now
        return 0
    return 1


# --- programs ----------------------------------------------------------------------------------


class Program:
    """A Python program in a session of its own: signals and a census can reach all of it.

    Attributes:
        temporary: Its directory for temporary files.
    """

    def __init__(self, folder, text, how="file", options=(), before=None, wrapper=()):
        folder = Path(folder)
        self.temporary = folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        text = textwrap.dedent(text)
        script = folder / "script.py"
        script.write_text(text)
        program = {"file": [str(script)], "-c": ["-c", text], "stdin": ["-"]}[how]
        with open(script) as source:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, *options, *program],
                cwd=folder,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "TMPDIR": str(self.temporary),
                },
                stdin=source if how == "stdin" else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                preexec_fn=before,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def line(self):
        """Wait for a line of its output."""
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return line.strip()

    def wait(self, limit=100.0):
        """Return its exit code and the rest of what it wrote to stdout and stderr."""
        out, err = self.process.communicate(timeout=limit)
        return self.process.returncode, out, err

    def members(self):
        """Return the pids of its session that run."""
        found = set()
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.getsid(int(name)) == self.process.pid:
                    found.add(int(name))
        return {pid for pid in found if alive(pid)}

    def check_nothing_left(self, limit=LIMIT):
        """Fail unless all its processes are gone within `limit`, and its temporary files."""
        wait_until(lambda: not self.members(), limit)
        assert list(self.temporary.iterdir()) == []


def run_script(script, folder, limit, **environment):
    """Run a script in a folder; return its exit code and what it wrote to stdout and stderr."""
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
    )
    return done.returncode, done.stdout, done.stderr


def run_program(folder, text, **options):
    """Run a program; return its exit code and what it wrote; fail if it leaves anything."""
    with Program(folder, text, **options) as program:
        result = program.wait()
        program.check_nothing_left()
        return result


METHODS = multiprocessing.get_all_start_methods()
if not HAS_FORKSERVER:
    METHODS.remove("forkserver")


def packable(shard):
    """Yield 100 rows in all: their numbers, random numbers, strings, arrays of any length."""
    for number in shard.split(range(0, 100, 5)):
        rows = np.arange(number, number + 5)
        yield {
            "row": rows,
            "x": shard.rng.random((5, 3), np.float32),
            "name": [f"ä{row}" for row in rows],
            "tail": [np.arange(row % 4, dtype="int16") for row in rows],
            "global": np.random.random(5),  # workers that are processes are seeded, too
        }


def announced(shard):
    """Yield the same, and write a dot to standard output before each of the 20 batches."""
    for batch in packable(shard):
        os.write(1, b".")
        yield batch


class Hanging:
    """Hangs at certain elements, or items of shards.

    Args:
        places: Elements, or pairs of a shard and an item.
        act: How it hangs.
        count: Number of items of a shard.
    """

    def __init__(self, *places, act=hang, count=4):
        self.places, self.act, self.count = places, act, count

    def __call__(self, element):
        if element in self.places:
            self.act()
        return element

    async def awaited(self, element):
        if element in self.places:
            await asyncio.sleep(1000)
        return element

    def items(self, shard):
        for number in range(self.count):
            yield self((shard.index, number))

    def items_from(self, shard, first_item=0):
        for number in range(first_item, self.count):
            yield self((shard.index, number))

    def some_items(self, shard):
        for item in self.items(shard):
            yield None if item[1] % 2 else item

    async def awaited_items(self, shard):
        for number in range(self.count):
            yield await self.awaited((shard.index, number))

    def collate(self, results):
        if set(results) & set(self.places):
            self.act()
        return results


class HangingSequence:
    """A sequence whose `__getitems__` hangs if it is to fetch one of these elements, or more."""

    def __init__(self, *places, alone=True):
        self.places, self.alone = places, alone

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.alone and index in self.places:
            hang()
        return index

    def __getitems__(self, indices):
        if set(indices) & set(self.places):
            hang()
        return indices


class SlowToLoad(Hanging):
    """One that takes a second to be loaded in a worker."""

    def __setstate__(self, state):
        time.sleep(1)
        self.__dict__.update(state)


class Once:
    """A source of a shard that makes a file for each shard that it runs, and fails in one."""

    def __init__(self, folder, fails_in):
        self.folder, self.fails_in = str(folder), fails_in

    def __call__(self, shard):
        path = Path(self.folder, f"{shard.index}.{time.monotonic_ns()}")
        path.touch()
        yield np.arange(3) + 10 * shard.index
        if shard.index == self.fails_in and not Path(self.folder, "fixed").exists():
            raise KeyError("no such file")
        yield np.arange(3, 5) + 10 * shard.index


class DiesOnce:
    """A source of a shard whose worker is killed in the middle of one, the first time."""

    def __init__(self, folder):
        self.mark = Path(folder, "died")

    def __call__(self, shard):
        yield np.full(3, shard.index)
        if shard.index == 2:
            kill_once(self.mark)
        yield np.full(2, shard.index)


class Screen:
    """What was written to a terminal; stands for its descriptor."""

    def __init__(self, master, slave):
        self.master, self.slave = master, slave
        self.written = b""
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        with contextlib.suppress(OSError):  # of its end
            while data := os.read(self.master, 4096):
                self.written += data

    def fileno(self):
        return self.slave

    def text(self):
        return self.written.decode()

    def wait_for(self, pattern):
        """Wait until something was written; fail with what is there if that does not come."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: re.search(pattern, self.text()))
        assert re.search(pattern, self.text()), self.text()


@contextlib.contextmanager
def terminal():
    """Give a terminal for a process to write to."""
    import fcntl  # not above: each worker that is not forked imports this file, for its source
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))  # or it is 0 wide
    screen = Screen(master, slave)
    try:
        yield screen
    finally:
        os.close(slave)
        screen.reader.join(LIMIT)
        os.close(master)
