"""The rank of this process in distributed training, which decides its part of the batches.

Every torch loader and dataset asks here and nowhere else.
"""

from __future__ import annotations

from typing import Any

from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.enqueuers.enqueuer import BaseEnqueuer, core_of, part_of
from enqueuer.enqueuers.workload import Portion
from enqueuer.errors import InvalidState

torch = framework("torch", "torch", "2.1")


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
        self.is_given = rank is not None
        self._own: tuple[int, int] | None = None
        if rank is not None:
            self._own = checks.rank(rank, world_size)
        elif _is_distributed():
            self._own = torch.distributed.get_rank(), torch.distributed.get_world_size()

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
        own = self._own
        core = core_of(enqueuer)
        if own is None or (core.options.world_size > 1 and not self.is_given):
            return enqueuer
        if own[1] > 1 and not self.is_given and not core.workload.seed.is_given:
            raise ValueError(
                f"torch.distributed has {own[1]} ranks, which must draw from the same seed: give "
                "the enqueuer random_seed="
            )
        if own in ((0, 1), (core.options.rank, core.options.world_size)):
            return enqueuer
        if not core.is_idle:
            raise InvalidState(
                f"the enqueuer was started, so it cannot become that of rank {own[0]} of "
                f"{own[1]}; pass one that was not started, or give it rank and world_size yourself"
            )
        return part_of(enqueuer, Portion(*own))

    def check(self, loader: object) -> None:
        """Raise InvalidState if an enqueuer has no rank, but `torch.distributed` has several now.

        Each rank would make all of the batches.
        """
        if self._own is not None or not isinstance(loader, BaseEnqueuer):
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
