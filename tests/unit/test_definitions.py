"""Definitions: by value once, then by reference; what arrives here is this process's own."""

import functools
import gc
import io
import pickle
import re
import struct
import sys
import threading
import types
import weakref

import pytest

from enqueuer.transport.definitions import Pickler, dumps


def local_class():
    class Local:
        count = 0

        def __init__(self, number):
            self.number = number

    return Local


def test_an_object_of_a_local_class_arrives_as_one_of_the_same_class():
    kind = local_class()
    data = dumps(kind(7), known={})
    kind.count = 3
    arrived = pickle.loads(data)
    assert type(arrived) is kind and (arrived.number, kind.count) == (7, 3)


def test_what_the_other_side_has_goes_by_its_id():
    kind = local_class()
    kind.table = bytes(100_000)
    pickler = Pickler(file := io.BytesIO(), known={})
    pickler.dump(kind)
    assert len(file.getvalue()) > 100_000 and kind in pickler.sent.values()
    data = dumps([kind(number) for number in range(3)], known=pickler.sent)
    assert len(data) < 300
    assert {type(one) for one in pickle.loads(data)} == {kind}


def test_a_class_that_is_gone_is_told():
    kind = local_class()
    pickler = Pickler(io.BytesIO(), known={})
    pickler.dump(kind)
    data = dumps(kind(1), known=pickler.sent)
    del pickler, kind
    gc.collect()
    with pytest.raises(pickle.UnpicklingError, match="gone by now"):
        pickle.loads(data)


def test_a_class_whose_state_could_not_be_loaded_is_whole_the_next_time():
    class Stubborn:
        fails = True

        def __reduce__(self):
            return _loaded, ()

    kind = local_class()
    kind.part = Stubborn()
    data = dumps(kind, known={})
    other = _as_another_process(data)
    with pytest.raises(OSError, match="not yet"):
        pickle.loads(other)
    _fails.clear()
    again = pickle.loads(other)
    assert again.part == "part" and again(3).number == 3


_fails = [True]


def _loaded():
    if _fails:
        raise OSError("not yet")
    return "part"


def _as_another_process(data):
    """Return a pickle with ids that this process does not know."""
    for key in set(re.findall(rb"[0-9a-f]{32}", data)):
        data = data.replace(key, key[::-1])
    return data


@pytest.mark.parametrize(
    "value",
    [
        struct.Struct("<II"),
        weakref.WeakKeyDictionary(),
        weakref.WeakValueDictionary(),
        threading.local(),
        functools.cached_property(len),
    ],
    ids=lambda value: type(value).__name__,
)
def test_kinds_that_pickle_refuses_arrive(value):
    assert type(pickle.loads(dumps(value))) is type(value)


def test_a_local_of_threads_keeps_what_this_one_has():
    value = threading.local()
    value.number = 3
    assert pickle.loads(dumps(value)).number == 3


@pytest.mark.parametrize("kind", [io.BytesIO, io.StringIO])
def test_a_class_of_the_interpreter_goes_by_its_name(kind):
    # Its module `_io` calls itself `io`, which is another one.
    assert pickle.loads(dumps(kind, {})) is kind
    assert len(dumps(kind, {})) < 100


def test_code_keeps_the_name_of_its_file():
    function = _copy(lambda: 1)
    assert function.__code__.co_filename == __file__


def _copy(function):
    """Return a function as another process gets it."""
    return pickle.loads(_as_another_process(dumps(function, known={})))


def test_a_single_dispatch_function_arrives():
    @functools.singledispatch
    def kind_of(value):
        return "other"

    @kind_of.register
    def _(value: int):
        return "int"

    copy = _copy(kind_of)
    assert copy is not kind_of
    assert [copy(1), copy("a")] == ["int", "other"]


def test_flags_of_absl_arrive_with_their_values():
    flags = pytest.importorskip("absl.flags")
    own = flags.FlagValues()
    flags.DEFINE_integer("size", 1, "", flag_values=own)
    own(["program", "--size=10"])
    assert pickle.loads(dumps(own)).size == 10


def test_what_a_module_holds_goes_by_its_name(monkeypatch):
    module = types.ModuleType("holder_of_a_lock")
    module.lock, module.__file__ = threading.Lock(), __file__
    held = {id(module.lock): ("holder_of_a_lock", "lock")}
    monkeypatch.setitem(sys.modules, "holder_of_a_lock", module)
    Pickler(file := io.BytesIO(), known={}, held=held).dump({"a": module.lock})
    assert pickle.loads(file.getvalue())["a"] is module.lock
