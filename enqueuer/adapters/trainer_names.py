"""What trainers ask a loader for: attributes that exist where they have a meaning.

Libraries ask with `hasattr`, so an attribute without a meaning raises AttributeError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from enqueuer.adapters.loading import Loader, inside_of, restarted_by
from enqueuer.common import checks
from enqueuer.enqueuers.enqueuer import BaseEnqueuer, core_of
from enqueuer.enqueuers.ordered import OrderedEnqueuer
from enqueuer.enqueuers.parts import begin_at, comes_next, epoch_after
from enqueuer.errors import InvalidState


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
        source, has_steps = _source_of(loader)
        if not isinstance(source, BaseEnqueuer):
            of_source: Callable[[int], None] = source.set_epoch
            return of_source
        if has_steps:
            raise AttributeError("with steps_per_epoch there is no set_epoch")
        return functools.partial(_set_epoch, loader, source)


def _source_of(loader: Any) -> tuple[Any, bool]:
    """Return the source of a loader, within other loaders, and whether one counts its steps."""
    has_steps = False
    while isinstance(loader, Loader):
        epochs, _ = inside_of(loader)
        loader, has_steps = epochs.loader, has_steps or epochs.steps is not None
    return loader, has_steps


def _asked(loader: Any, name: str) -> Any:
    source, _ = _source_of(loader)
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
    epochs, _ = inside_of(loader)
    if core.is_idle:
        if not comes_next(core, epoch):
            begin_at(core, epoch)
        return
    state = loader.state_dict()
    is_loaded = not epochs.iterations.is_entered and state["epoch"] == epoch
    if is_loaded or epoch_after(core, state) == epoch:
        return

    def change() -> None:
        if not core.is_idle:
            raise InvalidState(
                f"set_epoch({epoch}) was called, but the enqueuer was started by its owner and is "
                "at another epoch; call its stop() first, or let the loader start it"
            )
        begin_at(core, epoch)
        epochs.given = None

    restarted_by(loader, change)
