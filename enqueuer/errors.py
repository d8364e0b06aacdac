"""Every exception and warning of the package; imports nothing.

All errors have one root, `EnqueuerError`, and beside it the built-in exception that fits, so that
both `except EnqueuerError` and `except RuntimeError` catch them. An exception of the generator is
none of these: the loop gets the original.
"""


class EnqueuerError(Exception):
    """The root of all errors that this package raises itself."""


class InvalidState(EnqueuerError, RuntimeError):
    """The call is not possible now: the enqueuer is new, running, stopped, or was forked."""


class Closed(EnqueuerError):
    """The buffer or the enqueuer is closed: it accepts no items and returns no more."""


class StartError(EnqueuerError, RuntimeError):
    """The workers could not be started; none of them is left running."""


class StateMismatch(EnqueuerError, ValueError):
    """A state cannot be loaded: it belongs to another source, seed or number of shards."""


class BatchTimeout(EnqueuerError, TimeoutError):
    """No batch came within `timeout`; the message shows what each worker does.

    Nothing is lost: the workers go on, and iterating again continues with the very next batch.
    """


class ElementTimeout(EnqueuerError, TimeoutError):
    """An element, or an item of a shard, took longer than `element_timeout`.

    Its worker process was killed and replaced. `on_error` decides as for an exception of the
    generator. `BatchTimeout` is the limit of the loop's own wait, which ends no worker.
    """


class WorkerError(EnqueuerError, RuntimeError):
    """The generator failed with an exception that cannot, or must not, be raised here.

    Either the exception could not be pickled; `traceback_text` then has its traceback. Or it is a
    `SystemExit`, `KeyboardInterrupt`, `GeneratorExit` or `StopIteration`, which would end the
    training loop silently; `__cause__` is then the original.

    If the generator raised any other exception, the loop gets that one.

    Attributes:
        traceback_text: Traceback of the worker as text.
    """

    def __init__(self, message: str, traceback_text: str = "") -> None:
        super().__init__(message, traceback_text)
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        message = str(self.args[0])
        return f"{message}\n\n{self.traceback_text}" if self.traceback_text else message


class WorkerDied(EnqueuerError, ChildProcessError):
    """A worker process, or a Ray actor, ended without having reported an end or an error.

    It was killed (by the system because memory ran out, by a signal, by a crash in C code), it
    called `os._exit`, or its node was lost. If the generator raised an exception, the loop gets
    that one. A worker thread ends in this way if an exception strikes outside the generator, such
    as MemoryError while an item is sent; that exception is the cause.

    Attributes:
        worker: Index of the worker, from 0.
        exitcode: Exit code of the process; negative for a signal, None if it is not known, as for
            an actor.
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
    """The generator yielded an object that cannot be sent to the training process."""


class ItemNotLoadable(EnqueuerError, RuntimeError):
    """An item arrived, but could not be loaded in this process; `__cause__` is the reason."""


class TransportError(EnqueuerError, RuntimeError):
    """The data on a worker's channel are damaged: a packet is missing or malformed."""


class FrameworkUnavailable(EnqueuerError, ImportError):
    """A package that an adapter or a backend needs is not installed, or too old."""


class DataFileError(EnqueuerError, OSError):
    """A data file is missing, broken, still being written, or has unexpected contents.

    Attributes:
        path: Path of the file.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class BlockMemoryError(MemoryError, EnqueuerError):
    """Shared memory for an item could not be allocated."""


class EnqueuerWarning(UserWarning):
    """The root of all warnings of this package."""


class DuplicateDataWarning(EnqueuerWarning):
    """Several workers, or shards, seem to make the same batches: each would come several times."""


class EmptyEpochWarning(EnqueuerWarning):
    """An epoch had no batches; the message says why, as far as that is known."""


class OverwrittenDataWarning(EnqueuerWarning):
    """A batch, or a sample of one, was changed after it was yielded and before it was needed."""


class StallWarning(EnqueuerWarning):
    """The loop has waited long for one batch; the message shows what each worker does."""


class StopWarning(EnqueuerWarning):
    """A worker did not end in time."""


for _class in list(globals().values()):
    if isinstance(_class, type) and issubclass(_class, (EnqueuerError, EnqueuerWarning)):
        # So that a traceback ends in the name that users import.
        _class.__module__ = "enqueuer"
