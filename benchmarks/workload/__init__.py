"""A workload: real work on some items, and how each loader is used for it.

To add one, write a module beside this one: a `Workload` named WORKLOAD, and for each contestant a
generator function that yields an iterable of batches for each epoch, with the decorator
`@WORKLOAD.contestant(name)`. The first contestant is the plain loop. The lines of such a function,
and of what it `uses` alone, are counted as the user's. Then name the module in MODULES.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MODULES = (
    *("log_mel", "resize", "jpeg_folder", "jpeg_bytes", "random_rows", "random_rows_hdf5"),
    *("hugging_face", "text_tokens", "table_rows", "remote_files", "stragglers"),
    *("training_step", "rl_loop"),
)

Epochs = Iterator[Iterable[Any]]
"""An iterable of batches for each epoch, without an end."""

Open = Callable[[Any, int], Epochs]
"""A generator function of the data and the number of items."""


@dataclass(frozen=True)
class Contestant:
    """One way to run a workload.

    Attributes:
        name: Name of the contestant.
        open: Generator function of epochs.
        needs: Module that it needs; None if all have it.
        uses: Functions and classes that it alone needs.
        is_compared: Whether its batches are those of the plain loop.
        is_other: Whether it does other work, such as a decoder of its own.
    """

    name: str
    open: Open
    needs: str | None
    uses: tuple[Any, ...]
    is_compared: bool
    is_other: bool

    @property
    def is_installed(self) -> bool:
        return is_installed(self.needs)

    @property
    def lines(self) -> int:
        """Number of lines of the user's code, without its head, comments and blank lines."""
        return sum(_lines_of(one) for one in (self.open, *self.uses))


@dataclass(frozen=True)
class Workload:
    """Real work on some items.

    Attributes:
        name: Name of the workload.
        about: Description of an item and its work.
        why: What limits the rates: a sentence for the page.
        unit: Word for the items, as in items/s.
        items: Number of items of an epoch.
        batch_size: Number of items in a batch.
        prepare: Function of a folder and the number of items, which makes the data.
        size_of: Function of a batch, which returns the number of its items.
        use: Function of a batch that the loop calls; None if it drops the batches.
        needs: Module that the data need; None if there is none.
        has_order: Whether the order of the rows is the same for all contestants.
        timed_s: Seconds of timed epochs, at least: of shorter ones, the rate depends on when
            their first batch was begun.
    """

    name: str
    about: str
    items: int
    batch_size: int
    prepare: Callable[[Path, int], Any]
    size_of: Callable[[Any], int]
    why: str
    unit: str = "items"
    use: Callable[[Any], None] | None = None
    needs: str | None = None
    has_order: bool = True
    timed_s: float = 1.0
    contestants: dict[str, Contestant] = field(default_factory=dict)

    def contestant(
        self,
        name: str,
        needs: str | None = None,
        uses: tuple[Any, ...] = (),
        compare: bool = True,
        is_other: bool = False,
    ) -> Callable[[Open], Open]:
        """Return a decorator that adds a generator function as a contestant.

        Args:
            name: Name of the contestant.
            needs: Module that it needs.
            uses: Functions and classes that it alone needs.
            compare: Whether its batches must be those of the plain loop.
            is_other: Whether it does other work, whose results are not compared.
        """

        def add(open: Open) -> Open:
            self.contestants[name] = Contestant(
                name, open, needs, uses, compare and not is_other, is_other
            )
            return open

        return add


def load(module: str) -> Workload:
    """Return the workload of a module; it imports frameworks only in its functions."""
    found = importlib.import_module(f"workload.{module}").WORKLOAD
    assert isinstance(found, Workload)
    return found


def parse_flags() -> None:
    """Parse the flags of absl as Grain needs it, which a program does."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def is_installed(module: str | None) -> bool:
    """Return whether a module can be imported; True for None."""
    return module is None or importlib.util.find_spec(module) is not None


class Digest:
    """A hash of batches, by their values: tensors, arrays and lists of numbers are alike.

    Of a dict, `made_at` does not count.

    Args:
        has_order: Whether the order counts. If not, a batch is an array of rows, and the sum of
            the hashes of all rows counts.
    """

    def __init__(self, has_order: bool = True) -> None:
        self._hash = hashlib.sha256()
        self._sum = None if has_order else 0

    def add(self, batch: Any) -> None:
        """Add a batch."""
        if self._sum is not None:
            for row in batch:
                self._sum += int(hashlib.sha256(_bytes_of(row)).hexdigest(), 16)
        elif isinstance(batch, Mapping):
            for key in sorted(set(batch) - {"made_at"}):
                self.add(batch[key])
        elif isinstance(batch, tuple) or (
            isinstance(batch, list) and batch and not isinstance(batch[0], (int, float, str))
        ):
            for part in batch:
                self.add(part)
        else:
            self._hash.update(_bytes_of(batch))

    def text(self) -> str:
        """Return the hash."""
        if self._sum is not None:
            return f"{self._sum:064x}"[-16:]
        return self._hash.hexdigest()[:16]


def _bytes_of(part: Any) -> bytes:
    array = np.asarray(part)
    if array.dtype.kind in "iub" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return str(array.shape).encode() + np.ascontiguousarray(array).tobytes()


def _lines_of(part: Any) -> int:
    if isinstance(part, functools.partial):
        part = part.func
    lines = [line.strip() for line in inspect.getsource(part).splitlines()]
    code = [line for line in lines if line and not line.startswith(("#", '"""', "@"))]
    # The head of a contestant's function is the benchmark's.
    return len(code) - (not inspect.isclass(part) and code[0].endswith("Epochs:"))
