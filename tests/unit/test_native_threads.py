"""Unit: limiting the native libraries that a forked worker inherits."""

import ctypes

import pytest
from threadpoolctl import ThreadpoolController

from enqueuer.workers import native


def has_variable(library):
    """Return whether the number of threads is a variable of the library that can be stored."""
    try:
        value = ctypes.c_int.in_dll(library.dynlib, "blas_cpu_number").value
    except ValueError:
        return False
    return value == library.num_threads


def test_a_fork_limits_openblas_without_starting_its_threads(monkeypatch):
    """The function of OpenBLAS starts all threads, which takes milliseconds in each worker."""
    libraries = [
        library
        for library in ThreadpoolController().select(internal_api="openblas").lib_controllers
        if library.threading_layer == "pthreads" and library.num_threads > 1
    ]
    if not libraries or not all(map(has_variable, libraries)):
        pytest.skip("needs an OpenBLAS with more than one thread, which shows its variable")
    before = [library.num_threads for library in libraries]
    loaded = native.Loaded(dict.fromkeys(native.THREAD_VARIABLES, "1"))
    with monkeypatch.context() as patched:
        for kind in {type(library) for library in libraries}:
            patched.setattr(kind, "set_num_threads", lambda *_: pytest.fail("it was called"))
        loaded.limit()
    try:
        assert {library.num_threads for library in libraries} == {1}
    finally:
        for library, count in zip(libraries, before, strict=True):
            library.set_num_threads(count)
