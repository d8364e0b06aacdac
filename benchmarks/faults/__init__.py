"""The two lists of the failure table: the faults of a worker, and the loaders.

This file, `verdict.py` and `table.py` import no framework; `sources.py` runs in the workers, and
each file of `loaders/` imports its own package.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Number of items.
COUNT = 6
# Index of the item that is never made, or cannot be sent.
STRIKES_AT = 2
# The control: all items must come, or the loader is not used as it should be.
NO_FAULT = "none"


@dataclass(frozen=True)
class Fault:
    """A column of the table.

    Attributes:
        name: As it is called on the command line.
        heading: The same for the head of the table: a line for each word.
        rule: Behaviour that the consumer must see; `verdict.py` explains each.
        original: Name of the class of the worker's exception, if it raises one.
        threads: Whether it can be done to a thread without ending the consumer.
    """

    name: str
    heading: str
    rule: str
    original: str = ""
    threads: bool = True


@dataclass(frozen=True)
class Loader:
    """A row of the table.

    Attributes:
        name: As it is called on the command line.
        heading: The same for the table.
        module: The file in `loaders/`.
        needs: The package that must be installed; None if there is none.
        options: What its `items` is called with beside the fault.
        threads: Whether its worker is a thread.
    """

    name: str
    heading: str
    module: str
    needs: str | None
    options: Mapping[str, str] = field(default_factory=dict)
    threads: bool = False

    @property
    def installed(self) -> bool:
        """Whether its package can be found."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def faces(self, fault: Fault) -> bool:
        """Return whether this fault can be done to its worker."""
        return fault.threads or not self.threads

    def load(self) -> Callable[..., Iterable[Any]]:
        """Import it and return what opens it."""
        return importlib.import_module(f"faults.loaders.{self.module}").items


_FAULTS = [
    Fault("ValueError", "Value- Error", "itself", "ValueError"),
    Fault("KeyError", "Key- Error", "itself", "KeyError"),
    Fault("two-arguments", "two argu- ments", "itself", "TwoArguments"),
    Fault("holds-lock", "holds a lock", "named", "HoldsLock"),
    Fault("unpicklable", "unpick- lable item", "pickling"),
    Fault("SIGKILL", "SIGKILL", "death", threads=False),
    Fault("os._exit", "os. _exit(0)", "death", threads=False),
    Fault("sys.exit", "sys. exit(3)", "exit", "SystemExit"),
]

_LOADERS = [
    Loader("enqueuer-thread", "enqueuer thread", "enqueuer_thread", "enqueuer", threads=True),
    *(
        Loader(
            f"enqueuer-{method}",
            f"enqueuer {method}",
            "enqueuer_process",
            "enqueuer",
            {"start_method": method},
        )
        for method in ("fork", "forkserver", "spawn")
    ),
    Loader("torch", "torch DataLoader", "torch_loader", "torch"),
    Loader("torchdata", "torchdata.nodes", "torchdata_nodes", "torchdata"),
    Loader("grain", "Grain", "grain_", "grain"),
    Loader("spdl", "SPDL", "spdl_", "spdl"),
    Loader("multiprocessing.Pool", "multiprocessing.Pool", "mp_pool", None),
    Loader("keras", "Keras", "keras_", "keras"),
]

FAULTS = {fault.name: fault for fault in _FAULTS}
LOADERS = {loader.name: loader for loader in _LOADERS}
