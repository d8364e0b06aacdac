"""The options of an enqueuer whose generator yields samples: shuffle buffer and batches.

    FunctionSource.open(shard) -> samples --shuffled()--> --batched()--> batches

A worker calls `open` for each shard and epoch. Only samples of one shard are in a buffer or a
batch, so the batches depend on shards and not on workers.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from enqueuer.common import checks
from enqueuer.generators.batches import batched
from enqueuer.generators.shuffling import shuffled
from enqueuer.workers.collate import stack
from enqueuer.workers.shards import Shard, seed_of_shuffle
from enqueuer.workers.sources import is_stateful, iterate


@dataclass(frozen=True)
class Samples:
    """Options for the samples of a generator, checked.

    Attributes:
        batch_size: Number of samples in a batch; None if the generator yields batches.
        collate: Function that makes a batch of a list of samples.
        drop_last: Whether an incomplete last batch of a shard is left out.
        shuffle_buffer: Number of samples of a shard that are shuffled among each other, or None.
    """

    batch_size: int | None
    collate: Callable[[list[Any]], Any]
    drop_last: bool
    shuffle_buffer: int | None

    @classmethod
    def of(
        cls, batch_size: object, collate: object, drop_last: bool, shuffle_buffer: object
    ) -> Samples | None:
        """Return the options that the user gave; None if the items are to stay as they are.

        Raises:
            TypeError: An option has the wrong type.
            ValueError: An option is out of its range, or needs another one.
        """
        checks.function("collate", collate, "of a list of samples")
        if collate is not None and batch_size is None:
            raise ValueError("collate makes a batch of samples; give batch_size with it")
        if batch_size is None and shuffle_buffer is None:
            return None
        size = None if batch_size is None else checks.positive("batch_size", batch_size)
        buffer = (
            None if shuffle_buffer is None else checks.positive("shuffle_buffer", shuffle_buffer)
        )
        if buffer == 1:
            raise ValueError(
                "shuffle_buffer must be >= 2, got 1: a single sample cannot be shuffled; give "
                "the number of samples that a shard can keep in memory, such as 1000"
            )
        return cls(size, stack if collate is None else collate, drop_last, buffer)  # type: ignore[arg-type]

    def open(self, items: Iterable[Any], shard: Shard, is_own: bool) -> Iterable[Any]:
        """Return an iterable over the batches of a shard.

        If the source has a state, so has the iterable, unless there is a shuffle buffer: its
        samples are part of the position, so the shard is run again.

        Args:
            items: Samples of the shard.
            shard: Shard that seeds the shuffling.
            is_own: Whether nothing else reads these samples, also after an error.
        """
        run = functools.partial(self._run, shard, is_own)
        if self.shuffle_buffer is not None:
            return run(iter(items))
        held: Any = items if is_stateful(items) else iter(items)
        return _Resumable(held, run) if is_stateful(held) else run(held)

    def identity(self) -> dict[str, int | None]:
        """Return the options that a saved position depends on."""
        return {"batch_size": self.batch_size, "shuffle_buffer": self.shuffle_buffer}

    def _run(self, shard: Shard, is_own: bool, samples: Iterator[Any]) -> Iterator[Any]:
        made = samples
        if self.shuffle_buffer is not None:
            draw = random.Random(seed_of_shuffle(shard)).random
            made = shuffled(made, self.shuffle_buffer, draw)
        if self.batch_size is not None:
            made = batched(made, self.batch_size, self.collate, self.drop_last)
        try:
            yield from made
        except BaseException as error:
            # Only now, as the user's iterator may be read again after the end of an epoch, and a
            # running iterator after an error of `collate`.
            close = getattr(samples, "close", None)
            if close is not None and (is_own or isinstance(error, GeneratorExit)):
                close()
            raise


class _Resumable:
    """The batches of samples that have a state: a batch ends with a sample.

    An incomplete last batch comes after the end of the samples. Their state is then that of their
    end, from which some iterables begin anew, so the state says that nothing is left.
    """

    def __init__(self, samples: Any, run: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        self._samples = samples
        self._run = run
        self._state: Any = None
        # Whether the samples have ended, and their last batch has not been followed by the end.
        self._is_last = False

    def __iter__(self) -> Iterator[Any]:
        if not self._is_last:
            samples, _ = iterate(self._samples, self._state)
            yield from self._run(self._until_end(samples))
        elif self._state is not None:
            self._samples.load_state_dict(self._state)
        # What a running iterator has at the end of an epoch is its next epoch.
        self._is_last = False

    def _until_end(self, samples: Iterator[Any]) -> Iterator[Any]:
        yield from samples
        self._is_last = True

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self._samples.state_dict(), "is_last": self._is_last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state, self._is_last = state["samples"], state["is_last"]
