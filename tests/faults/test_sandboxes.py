"""Old kernels and sandboxes without pidfd_open or memfd_create: all works, by other means."""

import errno
import platform

import pytest
from helpers import METHODS, run_program

from enqueuer.backends.job import default_method

DEFAULT = default_method()
NUMBERS = {  # of x86_64 and of all others that have seccomp and are not older than pidfds
    "memfd_create": 319 if platform.machine() == "x86_64" else 279,
    "pidfd_send_signal": 424,
    "pidfd_open": 434,
}

FILTER = """
    import ctypes, os, signal, struct
    import numpy as np
    import helpers
    from enqueuer import GeneratorEnqueuer, Processes

    def refuse(numbers, code):
        # load the number; for each: if it is that, return the error code; allow the rest
        load, equal, give = 0x20, 0x15, 0x06
        steps = [(load, 0, 0, 0)]
        for number in numbers:
            steps += [(equal, 0, 1, number), (give, 0, 0, 0x00050000 | code)]
        steps.append((give, 0, 0, 0x7FFF0000))
        program = b"".join(struct.pack("HBBI", *step) for step in steps)
        buffer = ctypes.create_string_buffer(program, len(program))
        filter = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(buffer))
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl.argtypes = [ctypes.c_int] + 4 * [ctypes.c_ulong]
        no_new_privileges, seccomp, with_filter = 38, 22, 2
        assert prctl(no_new_privileges, 1, 0, 0, 0) == 0
        address = ctypes.create_string_buffer(filter, len(filter))
        if prctl(seccomp, with_filter, ctypes.addressof(address), 0, 0):
            print("no seccomp:", os.strerror(ctypes.get_errno()))
            raise SystemExit(0)

    def large(shard):
        for number in shard.split(range(40)):
            yield np.full(100_000, number, np.uint8)

    def dies_once(shard):
        for number in range(6):
            if number == 3 and not os.path.exists("died"):
                open("died", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            yield number

"""

BODY = """
    refuse({numbers}, {code})
    options = dict(backend=Processes(start_method={method!r}))
    for _ in range(2):
        with GeneratorEnqueuer(large, workers=2, **options) as enqueuer:
            assert [int(batch[0]) for batch in enqueuer] == list(range(40))
    with GeneratorEnqueuer(dies_once, max_restarts=1, **options) as enqueuer:
        assert list(enqueuer) == list(range(6))
        assert enqueuer.restart_count == 1
    with GeneratorEnqueuer(helpers.Failing(1, helpers.hang_deaf), **options) as enqueuer:
        next(iter(enqueuer))
        enqueuer.stop(timeout=0)
"""


def run(tmp_path, numbers, code, method):
    text = FILTER + BODY.format(numbers=numbers, code=code, method=method)
    ended, out, err = run_program(tmp_path, text)
    if "no seccomp" in out:
        pytest.skip(out)
    assert (ended, out) == (0, ""), err
    # of the restart
    assert [line for line in err.splitlines() if "was killed by SIGKILL" not in line] == []


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_a_kernel_without_pidfds_and_memfds(method, tmp_path):
    run(tmp_path, list(NUMBERS.values()), errno.ENOSYS, method)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NUMBERS)
def test_a_sandbox_that_forbids_one_of_them(name, tmp_path):
    run(tmp_path, [NUMBERS[name]], errno.EPERM, DEFAULT)


@pytest.mark.thorough
def test_the_portable_way_needs_none_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("ENQUEUER_PORTABLE", "1")
    run(tmp_path, list(NUMBERS.values()), errno.ENOSYS, DEFAULT)
