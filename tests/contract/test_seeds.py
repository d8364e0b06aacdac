"""Seeds: each shard and epoch draws from a stream of its own, and the parent is left alone."""

import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from helpers import needs, twelve

from enqueuer import EnqueuerWarning, GeneratorEnqueuer, OrderedEnqueuer, Processes, mix


def draws(shard):
    for _ in range(3):
        yield shard.epoch, shard.index, shard.seed, float(shard.rng.random())


def global_draws(shard):
    for _ in range(3):
        yield random.random(), float(np.random.random())


def test_the_streams_are_those_of_the_seed_sequence(backend):
    with GeneratorEnqueuer(draws, workers=2, random_seed=7, **backend) as enqueuer:
        batches = [batch for _ in range(2) for batch in enqueuer]
    for epoch in range(2):
        for index in range(2):
            sequence = np.random.SeedSequence(7, spawn_key=(epoch, index))
            expected = list(np.random.default_rng(sequence).random(3))
            assert [b[3] for b in batches if b[:2] == (epoch, index)] == expected


def test_without_a_seed_one_is_drawn_and_shown(backend):
    with GeneratorEnqueuer(draws, workers=2, **backend) as first:
        batches = list(first)
    other = GeneratorEnqueuer(draws, workers=2, random_seed=first.random_seed, **backend)
    with other:
        assert list(other) == batches
    assert GeneratorEnqueuer(draws).random_seed != first.random_seed
    # numpy.random.seed and OpenCV take no larger seed.
    assert first.random_seed < 2**31


def test_a_state_with_a_longer_seed_is_loaded():
    # seeds that were drawn had 128 bits once
    saved = GeneratorEnqueuer(draws, workers=2, random_seed=2**127 + 1)
    enqueuer = GeneratorEnqueuer(draws, workers=2)
    enqueuer.load_state_dict(saved.state_dict())
    with saved, enqueuer:
        assert list(enqueuer) == list(saved)


def test_a_process_seeds_the_global_generators_by_shard(process):
    runs = []
    for workers in (1, 2, 4):
        with GeneratorEnqueuer(
            global_draws, workers=workers, shards=4, random_seed=7, **process
        ) as enqueuer:
            runs.append([batch for _ in range(2) for batch in enqueuer])
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) == 24


def test_the_parents_generators_are_never_touched(backend):
    random.seed(1), np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    with GeneratorEnqueuer(twelve, workers=2, random_seed=7, **backend) as enqueuer:
        list(enqueuer)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


def hashes(shard):
    """Yield the hash of a text and the order of a set, which depends on the hashes."""
    yield hash("text"), list({f"{n:03}" for n in range(20)}), os.environ.get("PYTHONHASHSEED")


@pytest.mark.thorough
@pytest.mark.local
def test_workers_that_are_not_forked_hash_alike():
    found = []
    for method in ("forkserver", "spawn"):
        with GeneratorEnqueuer(
            hashes, workers=2, backend=Processes(start_method=method)
        ) as enqueuer:
            found += enqueuer
    assert len(set(map(str, found))) == 1
    given = os.environ.get("PYTHONHASHSEED")
    # A process that the worker starts has the environment of this process.
    assert found[0][2] == given
    program = "print(hash('text'))"
    output = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": given or "0"},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    # The seed is the same in another process of this program.
    assert found[0][0] == int(output)


class Noisy:
    """A sequence, and a `map`, with a generator of its own."""

    def __init__(self, rng):
        self.parts = {"noise": [rng]}

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index, self.parts["noise"][0].random()

    __call__ = __getitem__


SHARED = np.random.default_rng(7)


def of_module(shard):
    yield from [SHARED.random() for _ in range(2)]


def of_default(shard, rng=np.random.RandomState(7)):  # noqa: B008
    yield rng.random_sample()


def of_closure():
    rng = random.Random(7)

    def batches(shard):
        yield rng.random()

    return batches


def of_method(draw=SHARED.random):
    return lambda shard: iter([draw()])


HELD = {
    "global": (lambda: [of_module], "of_module: the global 'SHARED'"),
    "default": (lambda: [of_default], "of_default: a default argument .a numpy RandomState"),
    "closure": (lambda: [of_closure()], "the variable 'rng' .a random Random"),
    "bound method": (lambda: [of_method()], "the variable 'draw'"),
    "mixture": (lambda: [mix({"a": of_module})], r"sources\['a'\].function: the global 'SHARED'"),
    "map": (lambda: [range(8), Noisy(SHARED)], r"map.parts\['noise'\]\[0\] .*task.rng"),
    "sequence": (lambda: [Noisy(random.Random(7))], r"sequence.parts\['noise'\]\[0\] .a random"),
}


def several(arguments, **options):
    is_tasks = isinstance(arguments[0], (range, Noisy))
    return (OrderedEnqueuer if is_tasks else GeneratorEnqueuer)(*arguments, **options)


@pytest.mark.parametrize("name", HELD)
def test_a_generator_of_which_each_process_has_a_copy_is_told_of(process, name):
    make, says = HELD[name]
    with (
        pytest.warns(EnqueuerWarning, match=f"each worker process gets a copy of .*{says}"),
        several(make(), workers=2, **process) as enqueuer,
    ):
        list(enqueuer)


def test_a_generator_of_torch_is_told_of(process):
    generator = needs("torch").Generator()
    with (
        pytest.warns(EnqueuerWarning, match="the variable 'generator' .a torch Generator"),
        GeneratorEnqueuer(lambda shard: iter([generator.initial_seed()]), workers=2, **process),
    ):
        pass


@pytest.mark.parametrize("backend", ["thread", Processes(start_method="fork")], ids=str)
def test_an_open_file_that_workers_share_is_told_of(tmp_path, backend):
    path = tmp_path / "rows.txt"
    path.write_text("a row\n" * 9)
    with open(path) as file:
        with pytest.warns(EnqueuerWarning, match="share .*the variable 'file'.* Open the file in"):
            with GeneratorEnqueuer(
                lambda shard: iter(file.readline, ""), workers=2, backend=backend
            ):
                pass


def test_files_that_threads_read_under_a_lock_or_for_one_element_are_not(tmp_path, no_warnings):
    path, lock = tmp_path / "rows.txt", threading.Lock()
    path.write_text("a row\n" * 9)

    def line(_):
        with lock:
            return file.readline()

    with open(path) as file, OrderedEnqueuer(range(9), line, workers=2) as enqueuer:
        assert len(list(enqueuer)) == 9
    with open(path) as file, OrderedEnqueuer([file], lambda one: one.read(), workers=2) as read:
        assert list(read) == [path.read_text()]


def test_the_standard_streams_may_be_shared(no_warnings):
    out = sys.__stdout__
    options = dict(workers=2, backend=Processes(start_method="fork"))
    with GeneratorEnqueuer(lambda shard: iter([out is None]), **options) as enqueuer:
        assert len(list(enqueuer)) == 2


def draws_of_the_globals(shard, draw=random.random):
    yield draw(), np.random.rand(), random.SystemRandom().random(), shard.rng.random()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", HELD)
def test_one_worker_has_the_only_generator(process, name, workers, no_warnings):
    with several(HELD[name][0](), workers=workers, **process) as enqueuer:
        assert list(enqueuer)


def test_generators_that_workers_seed_are_not_told_of(process, no_warnings):
    with GeneratorEnqueuer(draws_of_the_globals, workers=2, **process) as enqueuer:
        assert len(list(enqueuer)) == 2


DRAWS = {
    "module": (lambda shard: iter([random.random()]), r"draw from random\.random in .*shard\.rng"),
    "numpy": (lambda shard: (np.random.rand() for _ in "ab"), r"draw from np\.random\.rand in"),
    "function": (draws_of_the_globals, r"draw from np\.random\.rand in draws_of_the_globals"),
    "own": (of_module, "draw from of_module: the global 'SHARED'"),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_that_threads_share_in_spite_of_a_seed_is_told_of(name):
    source, says = DRAWS[name]
    with pytest.warns(EnqueuerWarning, match=f"all threads {says}"):
        with GeneratorEnqueuer(source, workers=2, random_seed=7):
            pass


def draws_of_its_own(shard):
    yield np.random.default_rng(shard.seed).random(), random.Random(shard.seed).random()


def test_generators_that_threads_do_not_share_are_not_told_of(no_warnings):
    with GeneratorEnqueuer(draws_of_its_own, workers=2, random_seed=7) as enqueuer:
        assert len(list(enqueuer)) == 2
    with GeneratorEnqueuer(draws_of_the_globals, shards=2, random_seed=7) as enqueuer:
        assert len(list(enqueuer)) == 2


def test_threads_share_a_generator(no_warnings):
    with OrderedEnqueuer(range(8), Noisy(SHARED), workers=2, backend="thread") as enqueuer:
        assert len({noise for _, noise in enqueuer}) == 8
