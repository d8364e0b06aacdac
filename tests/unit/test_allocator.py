"""The C libraries whose allocator is left alone."""

import ctypes
import runpy
import types

import pytest

from enqueuer.workers import native


class Recorder:
    """Stands for mallopt(3), which returns whether it has set a limit."""

    def __init__(self, is_set):
        self.is_set, self.calls = is_set, []

    def __call__(self, number, size):
        self.calls.append((number, size))
        return self.is_set


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (*native.MALLOC_VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("system", ["macOS", "musl"])
def test_where_there_is_no_mallopt_nothing_is_called(monkeypatch, system):
    if system == "macOS":
        monkeypatch.setattr("sys.platform", "darwin")
    else:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace())
    module = runpy.run_path(native.__file__)
    assert module["mallopt"] is None
    module["keep_freed_memory"]()


def test_memory_is_kept_only_if_the_first_limit_could_be_set(monkeypatch):
    # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h.
    calls = [(-3, native.RETAINED_BYTES), (-1, native.RETAINED_BYTES)]
    for is_set, count in [(0, 1), (1, 2)]:
        mallopt = Recorder(is_set)
        monkeypatch.setattr(native, "mallopt", mallopt)
        native.keep_freed_memory()
        assert mallopt.calls == calls[:count]
