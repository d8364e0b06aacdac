"""Every exception and warning of the package; imports nothing.

One root, `EnqueuerError`, and beside it the built-in that fits, so that both
`except EnqueuerError` and `except RuntimeError` do what one expects. An exception that the
generator itself raises is none of these: it arrives as itself.
"""


class EnqueuerError(Exception):
    """The root of all errors that this package raises itself."""


class InvalidState(EnqueuerError, RuntimeError):
    """The enqueuer cannot do this now: it is new, running, stopped, or another process's."""


class Closed(EnqueuerError):
    """The buffer or the enqueuer was closed: nothing more can be put, nothing more will come."""


class StartError(EnqueuerError, RuntimeError):
    """The workers could not be started; none of them is left running."""


class StateMismatch(EnqueuerError, ValueError):
    """A state cannot be loaded: it belongs to another source, seed or number of shards."""


class BatchTimeout(EnqueuerError, TimeoutError):
    """No batch came within `timeout`; the message tells what each worker does.

    Nothing is lost: the workers go on, and so does iterating again, with the very next batch.
    """


class WorkerError(EnqueuerError, RuntimeError):
    """The generator failed with an exception that cannot, or must not, be raised here as itself.

    It could not be pickled (`traceback_text` then holds what is known of it), or it is a
    `SystemExit`, `KeyboardInterrupt`, `GeneratorExit` or `StopIteration`, which would end the
    training loop instead of telling it (`__cause__` is then the original).

    If the generator raised an ordinary exception you get that one, not this.

    Attributes:
        traceback_text: The worker's traceback as text.
    """

    def __init__(self, message: str, traceback_text: str = "") -> None:
        super().__init__(message, traceback_text)
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        message = str(self.args[0])
        return f"{message}\n\n{self.traceback_text}" if self.traceback_text else message


class WorkerDied(EnqueuerError, ChildProcessError):
    """A worker process, or a Ray actor, ended without having reported an end or an error.

    It was killed (by the system for want of memory, by a signal, by a crash in C code), it
    called `os._exit`, or its node is gone. If the generator raised you get its exception, not
    this one.

    Attributes:
        worker: Index of the worker, 0-based.
        exitcode: Of the process; negative for a signal, None if nobody knows, as of an actor.
    """

    def __init__(self, message: str, worker: int = -1, exitcode: int | None = None) -> None:
        super().__init__(message, worker, exitcode)
        self.worker = worker
        self.exitcode = exitcode

    def __str__(self) -> str:
        return str(self.args[0])


class SourceNotPicklable(EnqueuerError, TypeError):
    """The generator cannot be sent to an unforked process or an actor; the message says why."""


class ItemNotPicklable(EnqueuerError, TypeError):
    """The generator yielded something that cannot be sent to the training process."""


class ItemNotLoadable(EnqueuerError, RuntimeError):
    """An item arrived, but loading it failed here; `__cause__` tells why."""


class TransportError(EnqueuerError, RuntimeError):
    """What came over a worker's channel makes no sense: a packet is missing or malformed."""


class FrameworkUnavailable(EnqueuerError, ImportError):
    """What an adapter, or a backend, needs is not installed, or too old; the message says what."""


class DataFileError(EnqueuerError, OSError):
    """A data file is missing, broken, still being written, or not what was expected of it.

    Attributes:
        path: Of the file.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class BlockMemoryError(EnqueuerError, MemoryError):
    """No shared memory of the size of this item could be had."""


class EnqueuerWarning(UserWarning):
    """The root of all warnings of this package."""


class DuplicateDataWarning(EnqueuerWarning):
    """Several workers, or shards, make the same batches: every batch comes several times."""


class EmptyEpochWarning(EnqueuerWarning):
    """An epoch had no batches, although its source seems to be meant to give some."""


class OverwrittenDataWarning(EnqueuerWarning):
    """A batch was changed after it was yielded, before the loop had it."""


class StallWarning(EnqueuerWarning):
    """The loop has waited long for one batch; the message tells what each worker does."""


class StopWarning(EnqueuerWarning):
    """A worker could not be ended in time."""


for _class in list(globals().values()):
    if isinstance(_class, type) and issubclass(_class, (EnqueuerError, EnqueuerWarning)):
        # so that a traceback ends in the name that one imports
        _class.__module__ = "enqueuer"
