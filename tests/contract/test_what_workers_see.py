"""Processes: workers have what the program has set, or the program is told."""

import csv
import decimal
import functools
import importlib
import locale
import logging
import multiprocessing
import os
import resource
import socket
import sys
import time
import types
import warnings
from multiprocessing import resource_tracker

import numpy as np
import pytest
from helpers import METHODS, kill_once, needs

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes, StartError

UNFORKED = [method for method in METHODS if method != "fork"]


@pytest.fixture(scope="module", autouse=True)
def tracker():
    """multiprocessing's resource tracker, which a program keeps until its end."""
    resource_tracker.ensure_running()


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


def first(source, method, **options):
    with GeneratorEnqueuer(source, backend=Processes(method, **options)) as enqueuer:
        return next(iter(enqueuer))


class Odd(UserWarning):
    """A category of a module that the worker has to import."""


def settings():
    with np.printoptions():
        printed = str(np.array([1 / 3]))
    yield {
        "filters": [one[:1] + one[2:3] for one in warnings.filters[:2]],
        "divide": np.geterr()["divide"],
        "printed": printed,
        "decimal": str(decimal.Decimal(1) / 3),
        "recursion": sys.getrecursionlimit(),
        "socket": socket.getdefaulttimeout(),
        "csv": csv.field_size_limit(),
        "locale": locale.setlocale(locale.LC_ALL),
        "authkey": bytes(multiprocessing.current_process().authkey),
        "start_method": multiprocessing.get_start_method(allow_none=True),
    }


def test_settings_of_the_program_hold_in_workers(method):
    before = sys.getrecursionlimit(), csv.field_size_limit(1 << 20), socket.getdefaulttimeout()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        with (
            warnings.catch_warnings(),
            np.errstate(divide="raise"),
            np.printoptions(precision=2),
            decimal.localcontext() as context,
        ):
            warnings.filterwarnings("ignore", message="of ours")
            warnings.filterwarnings("error", category=Odd)
            context.prec = 5
            sys.setrecursionlimit(before[0] + 321)
            socket.setdefaulttimeout(77)
            expected = next(settings())
            found = first(settings, method)
    finally:
        sys.setrecursionlimit(before[0])
        csv.field_size_limit(before[1])
        socket.setdefaulttimeout(before[2])
        multiprocessing.set_start_method(None, force=True)
    if method == "fork":
        # multiprocessing sets it in a forked process.
        expected["start_method"] = "fork"
    assert found == expected


def process_state():
    mask = os.umask(0)
    os.umask(mask)
    yield (
        mask,
        os.sched_getaffinity(0),
        resource.getrlimit(resource.RLIMIT_CORE),
        time.localtime(0).tm_hour,
    )


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="of Linux")
def test_a_fork_server_that_runs_has_the_state_of_the_program(method, monkeypatch):
    first(process_state, method)
    cpus, limit, mask = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_CORE), None
    try:
        mask = os.umask(0o027)
        os.sched_setaffinity(0, {min(cpus)})
        resource.setrlimit(resource.RLIMIT_CORE, (0, limit[1]))
        monkeypatch.setenv("TZ", "UTC-5")
        time.tzset()
        assert first(process_state, method) == next(process_state())
    finally:
        os.umask(mask)
        os.sched_setaffinity(0, cpus)
        resource.setrlimit(resource.RLIMIT_CORE, limit)
        monkeypatch.undo()
        time.tzset()


def pillow_flags():
    from PIL import Image, ImageFile, PngImagePlugin

    yield (
        ImageFile.LOAD_TRUNCATED_IMAGES,
        Image.MAX_IMAGE_PIXELS,
        PngImagePlugin.MAX_TEXT_CHUNK,
    )


def test_flags_of_pillow_hold_in_workers(method, monkeypatch):
    needs("PIL")
    from PIL import Image, ImageFile, PngImagePlugin

    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_CHUNK", 123456)
    assert first(pillow_flags, method) == (True, None, 123456)


def plugins():
    import h5py  # noqa: F401

    yield "hdf5plugin" in sys.modules


@pytest.mark.parametrize("method", UNFORKED)
def test_a_plugin_that_the_program_has_imported_is_imported_in_workers(
    method, tmp_path, monkeypatch
):
    needs("h5py")
    (tmp_path / "hdf5plugin.py").write_text("import h5py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hdf5plugin", raising=False)
    assert not first(plugins, method)
    monkeypatch.setitem(sys.modules, "hdf5plugin", types.ModuleType("hdf5plugin"))
    assert first(plugins, method)


def warned():
    warnings.warn("of a worker", stacklevel=1)
    yield 1


def test_warnings_that_the_program_logs_are_logged_by_workers(method, caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        try:
            first(warned, method)
        finally:
            logging.captureWarnings(False)
    assert any("of a worker" in record.getMessage() for record in caplog.records)


def imported():
    yield {"PIL", "torch", "decimal"} & set(sys.modules)


@pytest.mark.parametrize("method", UNFORKED)
def test_a_worker_imports_no_library_for_its_settings(method):
    needs("PIL.Image")
    assert "PIL" not in first(imported, method)


# --- values of the user's modules ---------------------------------------------------------------

CONFIG = """
RATE = 1
TABLE = {"rate": 1}
UNUSED = 1
COUNT = 0
class Options:
    depth = 1
class Values:
    def __init__(self):
        self.size = 1
values = Values()
def rows():
    global COUNT
    COUNT += 1
    yield RATE, TABLE["rate"], Options.depth, values.size
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A module of the user, in which the program has changed values."""
    (tmp_path / "config_of_a_test.py").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    import config_of_a_test as module

    module.RATE = module.TABLE["rate"] = module.Options.depth = module.values.size = 5
    module.UNUSED, module.COUNT = 5, 5
    yield module
    del sys.modules["config_of_a_test"]


@pytest.mark.parametrize("method", UNFORKED)
@pytest.mark.parametrize("by_reference", [True, False])
def test_a_value_of_a_module_that_differs_in_workers_is_told(config, by_reference, method, caplog):
    def rows():
        yield config.RATE, config.TABLE["rate"], config.Options.depth, config.values.size

    first(config.rows if by_reference else rows, method)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "initializer" in record.getMessage()
    for name in ("RATE", "TABLE.rate", "Options.depth", "values.size"):
        assert f"config_of_a_test.{name} is 5 in the program and 1 here" in record.getMessage()
    assert "UNUSED" not in record.getMessage() and "COUNT" not in record.getMessage()


class Compose:
    def __init__(self, *parts):
        self.parts = list(parts)

    def __call__(self, element):
        return [part(element) for part in self.parts]


class Rows:
    def __init__(self, transform):
        self.transforms = {"train": transform}

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.transforms["train"](index)


def test_a_value_is_told_that_a_part_of_a_source_uses(config, caplog):
    def scale(element):
        return element * config.RATE

    backend = Processes(start_method="forkserver")
    maps = {
        "an attribute": None,
        "members": Compose(scale, Compose(scale)),
        "arguments": functools.partial(Compose(scale)),
        "a method": Rows(scale).__getitem__,
    }
    for name, function in maps.items():
        caplog.clear()
        elements = range(1) if function else Rows(scale)
        with OrderedEnqueuer(elements, function, backend=backend) as enqueuer:
            list(enqueuer)
        assert "config_of_a_test.RATE is 5 in the program and 1 here" in caplog.text, name


@pytest.mark.parametrize("method", UNFORKED)
def test_values_that_the_initializer_assigns_are_not_told(config, method, caplog):
    def assign(value):
        config.RATE = config.TABLE["rate"] = config.Options.depth = config.values.size = value

    found = first(config.rows, method, initializer=assign, initargs=(5,))
    assert found == (5, 5, 5, 5) and not caplog.records


# --- the initializer ----------------------------------------------------------------------------

OPENED = None


def open_it(what):
    global OPENED
    OPENED = what


def what_is_open(_):
    return OPENED


def opened():
    yield OPENED


def test_the_initializer_is_called_in_each_worker(method):
    backend = Processes(method, initializer=open_it, initargs=["file"])
    with OrderedEnqueuer(range(4), what_is_open, workers=2, backend=backend) as enqueuer:
        assert list(enqueuer) == ["file"] * 4
    assert OPENED is None and first(opened, method, initializer=open_it, initargs=["a"]) == "a"


def die_once(mark, number):
    if number == 1:
        kill_once(mark)
    return OPENED


def test_a_worker_that_replaces_a_dead_one_is_initialized(method, tmp_path):
    backend = Processes(method, initializer=open_it, initargs=["file"])
    dies = functools.partial(die_once, tmp_path / "died")
    with OrderedEnqueuer(range(4), dies, backend=backend, max_restarts=1) as enqueuer:
        assert list(enqueuer) == ["file"] * 4


def fail():
    raise KeyError("no such codec")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_error_of_the_initializer_is_a_start_error(method, on_error):
    backend = Processes(method, initializer=fail)
    with (
        pytest.raises(
            StartError, match=r"initializer fail failed .* KeyError: 'no such codec'"
        ) as e,
        GeneratorEnqueuer(opened, backend=backend, on_error=on_error) as enqueuer,
    ):
        list(enqueuer)
    assert isinstance(e.value.__cause__, KeyError)


# --- starts while a module is imported ----------------------------------------------------------

STARTS = """
from enqueuer import OrderedEnqueuer
def double(number):
    return 2 * number
with OrderedEnqueuer(range(2), double, backend="process") as enqueuer:
    TABLE = list(enqueuer)
"""


def test_a_module_that_starts_workers_when_a_worker_imports_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "starts_workers.py").write_text(STARTS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StartError, match=r"module starts_workers .* into a function"):
        import starts_workers  # noqa: F401
    sys.modules.pop("starts_workers", None)


class Proxy:
    """Like a proxy of Django or flask outside of a request, or `torch.distributed.reduce_op`."""

    @property
    def __class__(self):
        raise RuntimeError("working outside of application context")


def test_proxies_of_other_modules_are_not_looked_into(method, monkeypatch, tmp_path):
    name = f"one_with_a_lock_{method}"
    (tmp_path / f"{name}.py").write_text("import threading\nLOCK = threading.Lock()\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    lock = module.LOCK
    monkeypatch.setattr(module, "request", Proxy(), raising=False)
    space = {"LOCK": lock, "__name__": "nowhere"}
    exec("def batches():\n with LOCK: yield 1", space)
    assert first(space["batches"], method) == 1


def test_a_module_of_a_class_of_its_own_goes_by_name(method, monkeypatch, tmp_path):
    text = (
        "import sys, types, _thread\n"
        "class Odd(types.ModuleType): flag = _thread.allocate_lock()\n"
        "mine = Odd(__name__); vars(mine).update(globals()); sys.modules[__name__] = mine\n"
    )
    # A module is imported once in this process, from the folder of the first test.
    name = f"module_like_cudnn_{method}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    odd = importlib.import_module(name)
    space = {"odd": odd, "__name__": "nowhere"}
    exec(f"import sys\ndef batches(): yield odd is sys.modules[{name!r}]", space)
    assert first(space["batches"], method) is True


def with_functions():
    yield str(np.array([1.5])), float(np.float64(1) / np.float64(0)), np.geterrcall() is None


def test_functions_that_the_program_has_given_to_numpy_are_there(method):
    before = np.seterrcall(lambda kind, flag: None)
    try:
        with np.errstate(divide="call"), np.printoptions(formatter={"float": lambda x: "ours"}):
            assert first(with_functions, method) == ("[ours]", float("inf"), False)
    finally:
        np.seterrcall(before)
