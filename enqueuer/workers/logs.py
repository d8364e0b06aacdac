"""A worker's log records -> the parent's handlers.

    worker: logger -> Forwarder (the only handler) -> the worker's channel
    parent: records of the channel -> deliver() -> the logger of that name, its level, filters
            and handlers

Nothing is installed in the parent, so its handlers stay as they are. In the worker, every handler
that a fork has inherited is set aside. Its lock may be held by a thread that does not exist
there, and it would write a second copy.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

from enqueuer.errors import OverwrittenDataWarning, StartError

# Attribute of a record that becomes an OverwrittenDataWarning where it arrives.
IS_REUSE = "enqueuer_is_reuse"
MULTIPROCESSING_LOGGING = "multiprocessing-logging"

_SIMPLE = (str, int, float, bool, type(None))
# Handlers that were inherited by fork; kept, so that none is finalized here.
_set_aside: list[logging.Handler] = []


class Levels(NamedTuple):
    """The levels of the parent's loggers, so that a worker sends no record below them."""

    disabled: int
    by_name: dict[str, int]
    # Whether warnings become log records.
    captures: bool = False

    @classmethod
    def of_this_process(cls) -> Levels:
        """Read the levels that were set in this process."""
        by_name = {"": logging.getLogger().level}
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if isinstance(logger, logging.Logger) and logger.level:
                by_name[name] = logger.level
        captures = getattr(warnings.showwarning, "__module__", "") == logging.__name__
        return cls(logging.root.manager.disable, by_name, captures)

    def apply(self) -> None:
        """Set these levels in this process."""
        logging.disable(self.disabled)
        logging.captureWarnings(self.captures)
        for name, level in self.by_name.items():
            logging.getLogger(name).setLevel(level)


class Forwarder(logging.Handler):
    """Pass every record to `send`, in a form that can be pickled."""

    def __init__(self, send: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(portable(record))
        except Exception:
            self.handleError(record)


def portable(record: logging.LogRecord) -> logging.LogRecord:
    """Return a copy that can be pickled: the message formatted, the traceback as text."""
    result = copy.copy(record)
    result.msg, result.args = record.getMessage(), None
    if record.exc_info and not record.exc_text:
        result.exc_text = logging.Formatter().formatException(record.exc_info)
    result.exc_info = None
    for name, value in list(result.__dict__.items()):
        result.__dict__[name] = _simple(value)
    return result


def _simple(value: object) -> object:
    """Return a value that the parent can load without imports: no enum, no subclass."""
    if type(value) in _SIMPLE:
        return value
    match value:
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
    return repr(value)


def forward(send: Callable[[logging.LogRecord], None], levels: Levels) -> None:
    """Make `send` the only handler of the records of this worker process."""
    forwarder = Forwarder(send)
    root = logging.getLogger()
    _set_aside.extend(root.handlers)
    root.handlers = [forwarder]
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            _set_aside.extend(logger.handlers)
            logger.handlers = [] if logger.propagate else [forwarder]
    levels.apply()


def log_error(error: BaseException, text: str) -> None:
    """Log an error with its traceback as text, since frames would keep much alive."""
    record = logging.LogRecord("enqueuer", logging.ERROR, __file__, 0, text, None, None)
    record.exc_text = "".join(traceback.format_exception(error)).rstrip()
    deliver(record)


def warn_of_reuse(what: str) -> None:
    """Warn, in the process of the loop, of a sample that was changed while it waited.

    Args:
        what: The sample, in words.
    """
    if any(isinstance(handler, Forwarder) for handler in logging.getLogger().handlers):
        logging.getLogger("enqueuer").warning(what, extra={IS_REUSE: True})
        return
    warnings.warn(
        f"{what} was changed while it waited for the others of its batch, so several samples may "
        "be the same. The code seems to reuse one buffer: yield or return a copy (sample.copy())",
        OverwrittenDataWarning,
        stacklevel=2,
    )


def deliver(record: logging.LogRecord) -> None:
    """Pass a worker's record to the logger of its name in this process."""
    try:
        if hasattr(record, IS_REUSE):
            warn_of_reuse(record.getMessage())
            return
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
    except Exception:
        # A filter or a handler of the user must not stop the data.
        if logging.raiseExceptions:
            traceback.print_exc(file=sys.stderr)


@contextlib.contextmanager
def multiprocessing_logging() -> Iterator[None]:
    """Install multiprocessing-logging during a run, unless the user has installed it.

    Afterwards the root logger has the same list of handlers as before.

    Raises:
        StartError: It cannot be installed, since the default start method is not fork.
    """
    # Its import takes a while, and few programs need it.
    handlers = importlib.import_module("logging.handlers")
    module = importlib.import_module("multiprocessing_logging")
    root = logging.getLogger()
    before = list(root.handlers)
    if any(isinstance(handler, module.MultiProcessingHandler) for handler in before):
        yield
        return
    try:
        module.install_mp_handler()
    except AssertionError as error:
        raise StartError(
            f"forward_logs='{MULTIPROCESSING_LOGGING}' works only where fork is the default "
            "start method; leave forward_logs=True, which works with every start method"
        ) from error
    wrappers = [h for h in root.handlers if isinstance(h, module.MultiProcessingHandler)]
    try:
        yield
    finally:
        for wrapper in wrappers:
            # Closing a wrapper closes its handler, too, which is the user's. So another one takes
            # its place, which passes on the last records and leaves it open.
            wrapper.sub_handler = handlers.MemoryHandler(1, target=wrapper.sub_handler)
            wrapper.close()
        added = [h for h in root.handlers if h not in wrappers and h not in before]
        root.handlers = [*before, *added]
