"""Scripts as people write them: no guard, from stdin, `python -c`; the process stays as it was."""

import pytest
from helpers import METHODS, run_program

OPTIONS = ["backend='thread'"] + [f"backend=Processes(start_method={m!r})" for m in METHODS]


@pytest.fixture(params=OPTIONS, ids=["thread", *METHODS])
def options(request):
    return request.param


UNGUARDED = """
    import multiprocessing
    from dataclasses import dataclass

    import numpy as np

    from enqueuer import GeneratorEnqueuer, Processes

    print("once")
    SCALE = 10

    @dataclass
    class Batch:
        number: int
        images: np.ndarray

    class BadFile(Exception):
        def __init__(self, path, line):
            super().__init__(path, line)
            self.path, self.line = path, line

    def scaled(number):
        return number * SCALE

    def batches(shard):
        for number in range(3):
            yield Batch(scaled(number), np.full((100, 100), number))
        raise BadFile("a.jpg", 7)

    got = []
    try:
        for batch in GeneratorEnqueuer(batches, OPTIONS):
            got.append(batch)
    except BadFile as error:
        assert type(error) is BadFile and (error.path, error.line) == ("a.jpg", 7)
    else:
        raise AssertionError
    assert all(type(batch) is Batch for batch in got), got
    assert [batch.number for batch in got] == [0, 10, 20]
    assert all((batch.images == at).all() for at, batch in enumerate(got))
    assert multiprocessing.get_start_method(allow_none=True) is None
"""


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("how", ["file", "stdin", "-c"])
def test_a_script_needs_no_guard_and_its_classes_come_back(options, how, tmp_path):
    text = UNGUARDED.replace("OPTIONS", options)
    assert run_program(tmp_path, text, how=how) == (0, "once\n", "")


@pytest.mark.thorough
def test_the_process_stays_as_it_was(options, tmp_path):
    text = """
        import logging, multiprocessing, os, random, signal, sys, threading
        import numpy as np
        import threadpoolctl  # which sets a variable of OpenMP when it is imported
        import enqueuer
        from enqueuer import GeneratorEnqueuer, Processes

        logging.basicConfig(level="INFO")
        multiprocessing.set_start_method("spawn")
        signal.signal(signal.SIGTERM, lambda *_: None)

        def surroundings():
            numbers = range(1, signal.NSIG)
            return {
                "signals": [signal.getsignal(n) for n in numbers if n not in (32, 33)],
                "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
                "random": random.getstate(),
                "numpy": [str(part) for part in np.random.get_state()],
                "directory": os.getcwd(),
                "environment": dict(os.environ),
                "handlers": list(logging.getLogger().handlers),
                "logger class": logging.getLoggerClass(),
                "path": list(sys.path),
                "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
                "start method": multiprocessing.get_start_method(allow_none=True),
                "standard streams": (sys.stdin, sys.stdout, sys.stderr),
            }

        def batches(shard):
            import numpy as np  # the worker does its worst
            random.seed(5); np.random.seed(6)
            if OPTIONS_ARE_PROCESSES:
                os.chdir("/"); os.environ["NEW"] = "1"
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                logging.getLogger().handlers.clear()
            yield from range(5 * shard.index, 5 * shard.index + 5)

        before = surroundings()
        for epoch in range(2):
            with GeneratorEnqueuer(batches, workers=2, OPTIONS) as running:
                during = surroundings()
                list(running)
        after = surroundings()
        if not OPTIONS_ARE_PROCESSES:  # this generator itself uses the shared generators
            for one in (before, during, after):
                del one["random"], one["numpy"]
        for key in before:
            assert before[key] == during[key] == after[key], key
    """
    text = text.replace("OPTIONS_ARE_PROCESSES", str("Processes" in options))
    assert run_program(tmp_path, text.replace("OPTIONS", options)) == (0, "", "")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options_of_python",
    [["-W", "error"], ["-X", "dev", "-W", "error"], ["-O"], ["-s", "-B"]],
    ids=" ".join,
)
def test_strict_interpreters_have_nothing_to_say(options, options_of_python, tmp_path):
    text = """
        import warnings
        # of Python itself, about fork with the threads of numpy; see the documentation
        warnings.filterwarnings("ignore", "This process .* is multi-threaded")
        from enqueuer import GeneratorEnqueuer, Processes

        def batches():
            yield from range(5)

        for _ in range(2):
            with GeneratorEnqueuer(batches, workers=2, shards=1, OPTIONS) as running:
                assert list(running) == list(range(5))
        for batch in GeneratorEnqueuer(batches, OPTIONS):
            break
        del running
    """
    got = run_program(tmp_path, text.replace("OPTIONS", options), options=options_of_python)
    assert got == (0, "", "")


@pytest.mark.thorough
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_closed_standard_streams_do_no_harm(options, closed, tmp_path):
    text = f"""
        import os
        for fd in {closed}:
            os.close(fd)
        from enqueuer import GeneratorEnqueuer, Processes

        def batches():
            yield from range(5)

        with GeneratorEnqueuer(batches, OPTIONS) as running:
            assert list(running) == list(range(5))
        os._exit(42)  # an AssertionError would reach no process
    """
    assert run_program(tmp_path, text.replace("OPTIONS", options))[0] == 42


SPAWNED = """
    import multiprocessing

    from enqueuer import GeneratorEnqueuer, Processes

    def doubled(number):
        return 2 * number

    def batches(shard):
        yield from map(doubled, range(3))

    def child(options):
        with GeneratorEnqueuer(batches, **options) as enqueuer:
            assert list(enqueuer) == [0, 2, 4]

    if __name__ == "__main__":
        for method in METHODS:
            options = {"backend": Processes(start_method=method)}
            spawn = multiprocessing.get_context("spawn")
            process = spawn.Process(target=child, args=(options,))
            process.start()
            process.join()
            assert process.exitcode == 0
"""


@pytest.mark.thorough
def test_a_function_of_the_script_is_known_to_workers_of_a_process_that_it_spawned(tmp_path):
    text = SPAWNED.replace("METHODS", repr(METHODS))
    assert run_program(tmp_path, text) == (0, "", "")
