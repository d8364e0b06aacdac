"""A worker's records -> the parent's handlers. (With workers: contract/test_logs.py.)"""

import enum
import logging
import multiprocessing
import pickle
import sys
import threading

import pytest

from enqueuer import StartError
from enqueuer.workers.logs import (
    Forwarder,
    Levels,
    deliver,
    forward,
    multiprocessing_logging,
    portable,
)

NAME = "tests.unit.logs"
log = logging.getLogger(NAME)


class Ear(logging.Handler):
    """A handler that keeps the records it gets."""

    def __init__(self, level=logging.NOTSET):
        super().__init__(level)
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def texts(self):
        return [record.getMessage() for record in self.records]


class Broken(logging.Handler):
    def emit(self, record):
        raise ValueError("broken handler")


@pytest.fixture
def logger():
    """Yield a logger that reaches no other handlers, and restore it."""
    log.propagate = False
    log.setLevel(logging.DEBUG)
    yield log
    log.__dict__.update(propagate=True, disabled=False, handlers=[], filters=[])
    log.setLevel(logging.NOTSET)


@pytest.fixture
def root():
    """Return the root logger, and put back its handlers, every level and every logger's."""
    root = logging.getLogger()
    disabled, level, handlers = logging.root.manager.disable, root.level, root.handlers
    before = {
        logger: (logger.level, logger.handlers)
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger)
    }
    root.handlers = list(handlers)
    yield root
    root.handlers = handlers
    root.setLevel(level)
    logging.disable(disabled)
    for logger, (level, handlers) in before.items():
        logger.handlers = handlers
        logger.setLevel(level)


def record_of(message="%s", *args, level=logging.WARNING, exc_info=None, **extra):
    return log.makeRecord(
        NAME, level, __file__, 1, message, args, exc_info, "function", extra or None
    )


def an_exc_info():
    try:
        raise KeyError("why")
    except KeyError:
        return sys.exc_info()


# --- portable ---


def test_a_portable_record_has_the_same_text():
    record = record_of("%d items of %s", 3, "a.h5", where="here")
    copy = portable(record)
    assert copy.getMessage() == record.getMessage() == "3 items of a.h5"
    same = ("name", "levelno", "levelname", "pathname", "lineno", "created", "process", "where")
    assert [getattr(copy, name) for name in same] == [getattr(record, name) for name in same]


@pytest.mark.parametrize(
    "args", [(), ("a", 1), ({"a": 1},), (threading.Lock(),)], ids=["none", "two", "dict", "lock"]
)
def test_the_original_is_not_changed(args):
    record = record_of("%s" * len(args), *args, exc_info=an_exc_info(), odd=threading.Lock())
    before = dict(vars(record))
    portable(record)
    assert vars(record) == before


def test_a_percent_sign_is_formatted_once():
    assert portable(portable(record_of("%s", "100 %d"))).getMessage() == "100 %d"


def test_a_traceback_goes_as_text():
    copy = portable(record_of("failed", exc_info=an_exc_info()))
    assert copy.exc_info is None
    assert copy.exc_text.startswith("Traceback")
    assert copy.exc_text.endswith("KeyError: 'why'")
    assert "KeyError: 'why'" in logging.Formatter().format(copy)


def test_a_traceback_that_was_formatted_already_is_kept():
    record = record_of("failed", exc_info=an_exc_info())
    record.exc_text = "formatted already"
    assert portable(record).exc_text == "formatted already"


class Colour(str, enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOUD = 35


class Length(float):
    pass


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (None, None),
        (True, True),
        (5, 5),
        ("text", "text"),
        (Colour.RED, "red"),
        (Level.LOUD, 35),
        (Length(1.5), 1.5),
        ([1, "a"], "[1, 'a']"),
        (KeyError("x"), "KeyError('x')"),
    ],
    ids=repr,
)
def test_an_extra_arrives_as_plain_data(value, arrives):
    copy = portable(record_of("text", extra_of_ours=value))
    assert copy.extra_of_ours == arrives
    assert type(copy.extra_of_ours) is type(arrives)


def test_everything_can_be_pickled_without_a_class():
    class Local(str):
        pass

    class LocalLevel(enum.IntEnum):
        LOUD = 35

    record = record_of(
        Local("%s"), threading.Lock(), level=LocalLevel.LOUD, exc_info=an_exc_info(), odd=Local()
    )
    copy = logging.makeLogRecord(pickle.loads(pickle.dumps(portable(record).__dict__)))
    assert copy.levelno == 35
    assert copy.getMessage().startswith("<unlocked")


# --- Forwarder ---


def test_a_forwarder_leaves_the_record_alone_for_the_next_handler(logger):
    ear = Ear()
    logger.addHandler(Forwarder(lambda record: None))
    logger.addHandler(ear)
    logger.info("%d of %d", 1, 2)
    assert ear.records[0].args == (1, 2)


def test_a_record_that_cannot_be_formatted_does_not_stop_the_generator(capsys):
    sent = []
    forwarder = Forwarder(sent.append)
    forwarder.handle(record_of("%d", "no number"))
    forwarder.handle(record_of("next"))
    assert [record.msg for record in sent] == ["next"]
    assert "Logging error" in capsys.readouterr().err


def test_a_sender_that_fails_does_not_stop_the_generator(logger, capsys):
    def send(record):
        raise OSError("the channel is closed")

    logger.addHandler(Forwarder(send))
    logger.info("text")
    assert "the channel is closed" in capsys.readouterr().err


# --- forward: what happens in a worker process ---


def test_the_forwarder_becomes_the_only_handler(root, logger):
    sent, inherited, other = [], Ear(), Ear()
    root.addHandler(inherited)
    logger.addHandler(other)
    logger.propagate = True
    forward(sent.append, Levels(0, {"": logging.INFO, NAME: logging.DEBUG}))
    logger.debug("once")
    assert [record.msg for record in sent] == ["once"]
    assert (inherited.records, other.records) == ([], [])


def test_a_logger_that_does_not_propagate_is_forwarded_too(root, logger):
    sent, other = [], Ear()
    logger.addHandler(other)
    forward(sent.append, Levels(0, {NAME: logging.DEBUG}))
    logger.debug("once")
    assert [record.msg for record in sent] == ["once"]
    assert other.records == []


def test_levels_travel(root, logger):
    logging.disable(logging.INFO)
    root.setLevel(logging.ERROR)
    levels = pickle.loads(pickle.dumps(Levels.of_this_process()))
    logging.disable(logging.NOTSET)
    root.setLevel(logging.NOTSET)
    logger.setLevel(logging.NOTSET)
    levels.apply()
    assert (root.level, logger.level) == (logging.ERROR, logging.DEBUG)
    assert logging.root.manager.disable == logging.INFO


# --- deliver: what happens in the parent ---


def level_of_the_logger(ear):
    log.setLevel(logging.ERROR)


def level_of_the_handler(ear):
    ear.setLevel(logging.ERROR)


def disabled_level(ear):
    logging.disable(logging.WARNING)


def disabled_logger(ear):
    log.disabled = True


def filter_of_the_logger(ear):
    log.addFilter(lambda record: record.levelno > logging.WARNING)


def filter_of_the_handler(ear):
    ear.addFilter(lambda record: record.levelno > logging.WARNING)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    "keep_out",
    [
        level_of_the_logger,
        level_of_the_handler,
        disabled_level,
        disabled_logger,
        filter_of_the_logger,
        filter_of_the_handler,
    ],
    ids=lambda keep_out: keep_out.__name__,
)
def test_logging_decides_what_is_delivered(logger, keep_out):
    ear = Ear()
    logger.addHandler(ear)
    keep_out(ear)
    deliver(record_of("kept out"))
    deliver(record_of("let in", level=logging.ERROR))
    assert ear.texts == ([] if keep_out is disabled_logger else ["let in"])


def test_a_handler_that_raises_does_no_harm(logger, capsys):
    ear = Ear()
    logger.addHandler(ear)
    logger.addHandler(Broken())
    deliver(record_of("first"))
    deliver(record_of("second"))
    assert ear.texts == ["first", "second"]
    assert capsys.readouterr().err.count("ValueError: broken handler") == 2


def test_a_handler_that_raises_is_not_reported_if_logging_must_not(logger, capsys, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger.addHandler(Broken())
    deliver(record_of("text"))
    assert capsys.readouterr().err == ""


def test_ctrl_c_in_a_handler_is_not_swallowed(logger):
    class Interrupted(logging.Handler):
        def emit(self, record):
            raise KeyboardInterrupt

    logger.addHandler(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        deliver(record_of("text"))


# --- multiprocessing-logging ---


@pytest.fixture
def start_method(request):
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)


def with_start_method(name):
    return pytest.mark.parametrize("start_method", [name], indirect=True)


@with_start_method("fork")
@pytest.mark.usefixtures("start_method")
class TestUnderFork:
    @pytest.mark.parametrize("count", [0, 2])
    def test_the_handlers_are_wrapped_and_unwrapped(self, root, count):
        before, added = [Ear() for _ in range(count)], Ear()
        root.handlers = list(before)
        with multiprocessing_logging():
            assert [type(h).__name__ for h in root.handlers] == ["MultiProcessingHandler"] * count
            root.addHandler(added)
        assert root.handlers == [*before, added]

    def test_what_was_logged_meanwhile_has_come_when_it_ends(self, root):
        ear = Ear()
        root.handlers = [ear]
        with multiprocessing_logging():
            for number in range(20):
                root.error("%d", number)
        assert ear.texts == [str(number) for number in range(20)]

    def test_an_error_inside_unwraps_too_and_closes_none_of_the_users_handlers(self, root):
        closed = []
        ear = Ear()
        ear.close = lambda: closed.append(ear)
        root.handlers = [ear]
        with pytest.raises(KeyError), multiprocessing_logging():
            raise KeyError
        assert (root.handlers, closed) == ([ear], [])
        del ear.close


@with_start_method("spawn")
@pytest.mark.usefixtures("start_method")
def test_it_is_refused_where_it_cannot_work(root):
    before = [Ear()]
    root.handlers = list(before)
    with pytest.raises(StartError, match="leave forward_logs=True"), multiprocessing_logging():
        raise AssertionError
    assert root.handlers == before
