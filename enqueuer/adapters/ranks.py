"""What distributed training and trainers ask a torch loader for.

The rank of this process decides its part of the batches; every torch loader and dataset asks here.

`gather_stats` collects the statistics of all ranks, and `gather_state` their positions, which a
training calls when it likes:

    Stats of each rank --all_gather--> RankStats --> the rank that waits most, and its bottleneck
    state_dict() of each rank --all_gather--> merge_states() --> one state for any number of ranks

`TrainerNames` are attributes that exist where they have a meaning. Libraries ask with `hasattr`, so
an attribute without a meaning raises AttributeError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from enqueuer.adapters.loading import Loader, reader_of
from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.common.text import duration, percent, table
from enqueuer.enqueuers.enqueuer import (
    BaseEnqueuer,
    begin_at,
    comes_next,
    core_of,
    epoch_after,
    of_rank,
)
from enqueuer.enqueuers.ordered import OrderedEnqueuer
from enqueuer.errors import InvalidState
from enqueuer.monitoring.stats import Bottleneck, Stats
from enqueuer.order.ranks import merge_states

torch = framework("torch", "torch", "2.1")

T = TypeVar("T")


class Ranks:
    """The rank and world size of this process, given by the caller or by `torch.distributed`.

    Each loader and dataset makes one, and `torch.distributed` is asked at that moment.

    Args:
        rank: Rank of this process, if the caller gave one.
        world_size: Number of ranks; given with `rank`.

    Raises:
        ValueError: Only one of the two was given, or `rank` is out of range.
    """

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError("rank and world_size go together; give both, or neither")
        self.is_explicit = rank is not None
        self._place: tuple[int, int] | None = None
        if rank is not None:
            self._place = checks.rank(rank, world_size)
        elif _is_distributed():
            self._place = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def part_of(self, enqueuer: BaseEnqueuer[Any]) -> BaseEnqueuer[Any]:
        """Return the enqueuer of this rank: the given one, or a new one like it.

        Raises:
            TypeError: It is not an enqueuer.
            ValueError: There are several ranks, and the enqueuer has no `random_seed`.
            InvalidState: The enqueuer was started, so that it cannot become one rank's.
        """
        if not isinstance(enqueuer, BaseEnqueuer):
            raise TypeError(
                f"expected a GeneratorEnqueuer or an OrderedEnqueuer, got {enqueuer!r}; "
                "wrap a generator in GeneratorEnqueuer(...)"
            )
        place = self._place
        core = core_of(enqueuer)
        if place is None or (core.options.world_size > 1 and not self.is_explicit):
            return enqueuer
        if place[1] > 1 and not self.is_explicit and not core.workload.seed.is_explicit:
            raise ValueError(
                f"torch.distributed has {place[1]} ranks, which must draw from the same seed: give "
                "the enqueuer random_seed="
            )
        if place in ((0, 1), (core.options.rank, core.options.world_size)):
            return enqueuer
        if not core.is_idle:
            raise InvalidState(
                f"the enqueuer was started, so it cannot become that of rank {place[0]} of "
                f"{place[1]}; pass one that was not started, or give rank and world_size to it"
            )
        return of_rank(enqueuer, *place)

    def check(self, loader: object) -> None:
        """Raise InvalidState if an enqueuer has no rank, but `torch.distributed` has several now.

        Each rank would make all of the batches.
        """
        if self._place is not None or not isinstance(loader, BaseEnqueuer):
            return
        if core_of(loader).options.world_size > 1 or not _is_distributed():
            return
        ranks = torch.distributed.get_world_size()
        if ranks > 1:
            raise InvalidState(
                "torch.distributed was initialised after this loader was made, so each of the "
                f"{ranks} ranks would get all batches; make the loader after "
                "init_process_group(), or give it rank= and world_size= (rank=0, world_size=1 "
                "gives all batches to each rank)"
            )


def _is_distributed() -> bool:
    distributed = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized())


@dataclass(frozen=True)
class RankStats:
    """The statistics of all ranks; `print()` shows a table and the rank that waits most.

    Attributes:
        stats: Statistics of each rank, by its rank.
    """

    stats: Mapping[int, Stats]

    @property
    def slowest(self) -> int:
        """Rank with the largest `waiting_share`, which waits most for its batches.

        The other ranks wait for it when they exchange gradients, which counts as their work.
        """
        return max(self.stats, key=lambda rank: self.stats[rank].waiting_share)

    def bottleneck(self) -> Bottleneck:
        """Find the cause for which the slowest rank waits, and a change that would help."""
        return self.stats[self.slowest].bottleneck()

    def __str__(self) -> str:
        """Return a table, and a sentence on the slowest rank with its bottleneck."""
        slowest, rows = self.slowest, [_row(rank, stats) for rank, stats in self.stats.items()]
        others = [stats.waiting_share for rank, stats in self.stats.items() if rank != slowest]
        waited = f"Rank {slowest} waited {percent(self.stats[slowest].waiting_share)} of its time"
        at_most = f", the others at most {percent(max(others))}" if others else ""
        return "\n".join([*table([_HEAD, *rows]), f"{waited}{at_most}. {self.bottleneck()}"])


_HEAD = ("rank", "batches", "waited", "share", "p99", "first batch", "bottleneck")


def _row(rank: int, stats: Stats) -> tuple[str, ...]:
    first = stats.first_batch_s
    return (
        str(rank),
        f"{stats.items:,}",
        duration(stats.waiting_s),
        percent(stats.waiting_share),
        duration(stats.wait_p99_s),
        "-" if first is None else duration(first),
        stats.bottleneck().kind,
    )


def gather_stats(stats: Stats, group: Any = None) -> RankStats:
    """Return the statistics of all ranks, to find the rank that the others wait for.

    All ranks call it at the same step, as it is an `all_gather_object` of `torch.distributed`; it
    waits for the last one. Each rank gets the same result.

    Args:
        stats: Statistics of this rank, `stats()` of its enqueuer or loader; for an epoch alone,
            `stats().since(earlier)`.
        group: Process group of torch. None, the default: all ranks; only this one if
            `torch.distributed` is not initialised.

    Raises:
        TypeError: `stats` is something else.
        ValueError: This process does not belong to `group`.

    Example:
        >>> from enqueuer import OrderedEnqueuer
        >>> from enqueuer.adapters.torch import gather_stats
        >>> with OrderedEnqueuer(range(3)) as enqueuer:
        ...     _ = list(enqueuer)
        ...     ranks = gather_stats(enqueuer.stats())
        >>> ranks.slowest, ranks.stats[0].items, ranks.bottleneck().kind
        (0, 3, 'unknown')
    """
    if not isinstance(stats, Stats):
        raise TypeError(f"gather_stats() takes the result of stats(), got {stats!r}")
    return RankStats(_gathered("gather_stats", stats, group))


def gather_state(loader: Any, group: Any = None) -> dict[str, Any]:
    """Return one state of the positions of all ranks, from which any number of ranks can go on.

    It is the result of `merge_states()`. All ranks call it at the same step, as it is an
    `all_gather_object` of `torch.distributed`; it waits for the last one. Each rank gets the same
    result, which `load_state_dict()` of a loader or an enqueuer of any rank takes.

    Args:
        loader: Loader or enqueuer of this rank, which has `state_dict()`.
        group: Process group of torch. None, the default: all ranks; only this one if
            `torch.distributed` is not initialised.

    Raises:
        StateMismatch: The states do not make one; see `merge_states()`.
        ValueError: This process does not belong to `group`.

    Example:
        >>> from enqueuer import OrderedEnqueuer
        >>> from enqueuer.adapters.torch import TorchLoader, gather_state
        >>> with TorchLoader(OrderedEnqueuer(range(5), random_seed=7)) as loader:
        ...     first = next(iter(loader))
        ...     state = gather_state(loader)
        >>> later = TorchLoader(OrderedEnqueuer(range(5), random_seed=7), rank=1, world_size=2)
        >>> later.load_state_dict(state)
        >>> with later:
        ...     [int(batch) for batch in later]
        [2, 4]
    """
    return merge_states(_gathered("gather_state", loader.state_dict(), group).values())


def _gathered(name: str, value: T, group: Any) -> dict[int, T]:
    """Return the values of all ranks of a group, by their ranks, for a function of this name."""
    if not _is_distributed():
        return {0: value}
    distributed = torch.distributed
    group = distributed.group.WORLD if group is None else group
    if distributed.get_rank(group) < 0:
        raise ValueError(f"this rank is not in the group; call {name}() on its ranks only")
    ranks = distributed.get_process_group_ranks(group)
    found: list[Any] = [None] * len(ranks)
    distributed.all_gather_object(found, value, group=group)
    return dict(zip(ranks, found, strict=True))


class TrainerNames:
    """The names that a loader of torch tensors has for trainers."""

    @property
    def dataset(self) -> Any:
        """The sequence of samples of an `OrderedEnqueuer` with `batch_size`, or a DataLoader's."""
        return _asked(self, "dataset")

    @property
    def batch_size(self) -> Any:
        """The `batch_size` of an `OrderedEnqueuer`, or that of a DataLoader."""
        return _asked(self, "batch_size")

    @property
    def sampler(self) -> Any:
        """The sampler of a DataLoader; an enqueuer has none."""
        return _asked(self, "sampler")

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of a DataLoader; an enqueuer has none."""
        return _asked(self, "batch_sampler")

    @property
    def set_epoch(self) -> Callable[[int], None]:
        """Function that sets the epoch of the next iteration, counted from 0.

        After an epoch that was read to its end, the next one costs nothing. Any other epoch, and
        the same one after a `break`, restart the enqueuer. A loaded position within the epoch is
        kept. It raises InvalidState if the caller has started the enqueuer, which is at another
        epoch. With `steps_per_epoch`, an enqueuer has other epochs than the loop, and this does
        not exist.
        """
        loader: Any = self
        epochs = reader_of(loader).epochs
        if not isinstance(epochs.source, BaseEnqueuer):
            of_source: Callable[[int], None] = epochs.source.set_epoch
            return of_source
        if epochs.has_steps:
            raise AttributeError("with steps_per_epoch there is no set_epoch")
        return functools.partial(_set_epoch, loader, epochs.source)


def _asked(loader: Any, name: str) -> Any:
    source = reader_of(loader).epochs.source
    if not isinstance(source, BaseEnqueuer):
        return getattr(source, name)
    # The elements of an enqueuer without a batch size are batches.
    size = getattr(core_of(source).workload.source, "batch_size", None)
    if size is not None and name == "batch_size":
        return size
    if size is not None and name == "dataset" and isinstance(source, OrderedEnqueuer):
        return source.sequence
    raise AttributeError(f"{type(source).__name__} has no {name}")


def _set_epoch(loader: Loader[Any], enqueuer: BaseEnqueuer[Any], epoch: int) -> None:
    epoch, core = checks.count("epoch", epoch), core_of(enqueuer)
    reader = reader_of(loader)
    if core.is_idle:
        if not comes_next(core, epoch):
            begin_at(core, epoch)
        return
    state = loader.state_dict()
    is_loaded = not reader.is_entered and state["epoch"] == epoch
    if is_loaded or epoch_after(core, state) == epoch:
        return

    def change() -> None:
        if not core.is_idle:
            raise InvalidState(
                f"set_epoch({epoch}) was called, but the enqueuer was started by its owner and is "
                "at another epoch; call its stop() first, or let the loader start it"
            )
        begin_at(core, epoch)
        reader.epochs.delivered = None

    reader.restart(change)
