"""Resuming, replacing workers and changing their number, against a plain serial loop.

What arrives must be what the loop gives, item by item and bit by bit, whatever was saved and
loaded, killed or reconfigured on the way. `ENQUEUER_ROUNDS=20` draws that many times as many runs.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections import Counter

import pytest
from helpers import alive, kill_one, packed, start_method_of, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serial import SEED, Source, instead, plain, serial

from enqueuer import GeneratorEnqueuer, Processes
from enqueuer.backends.job import HAS_FORKSERVER
from enqueuer.backends.process.handle import Starter
from enqueuer.enqueuers.enqueuer import core_of

ROUNDS = int(os.environ.get("ENQUEUER_ROUNDS", "1"))
EPOCHS = 2
ALL = 10**9
MANY = 10**6  # restarts

pytestmark = [
    pytest.mark.filterwarnings("ignore::enqueuer.EmptyEpochWarning"),  # some are empty
    pytest.mark.timeout(120 * ROUNDS),
    pytest.mark.filterwarnings("ignore:max_restarts has no effect with threads"),
    # Their source names global generators, from which it draws in processes only.
    pytest.mark.filterwarnings("ignore:all threads draw"),
]

BACKENDS = [{"backend": "thread"}, {"backend": Processes(start_method="fork")}]
if HAS_FORKSERVER:
    BACKENDS.append({"backend": Processes(start_method="forkserver")})


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Do not keep thousands of records."""
    caplog.set_level(logging.CRITICAL)


def assert_same(seen, wanted, ordered=True):
    """Compare the items of an epoch; out of order each shard keeps its own."""
    if ordered:
        assert seen == wanted
        return
    assert Counter(seen) == Counter(wanted)
    for shard in {item[0] for item in wanted}:
        assert [i for i in seen if i[0] == shard] == [i for i in wanted if i[0] == shard]


class Reader:
    """Reads on from one enqueuer to the next, as a training loop does in several jobs."""

    def __init__(self, ordered=True):
        self.seen = [[] for _ in range(EPOCHS)]
        self.epoch = 0
        self._ordered = ordered

    @property
    def done(self):
        return self.epoch == EPOCHS

    def read(self, enqueuer, count=ALL, after_each=lambda: None):
        """Read so many items, into the next epoch if need be; call back also at its end."""
        while not self.done:
            for item in enqueuer:
                self.seen[self.epoch].append(plain(item))
                del item
                after_each()
                count -= 1
                if count <= 0:
                    return
            self.epoch += 1
            after_each()

    def check(self, source, **options):
        assert self.done
        for epoch, seen in enumerate(self.seen):
            assert_same(seen, serial(source, epoch, **options), self._ordered)


def make(source, options, state=None):
    if state is None:
        return GeneratorEnqueuer(source, random_seed=SEED, shards=len(source.lengths), **options)
    enqueuer = GeneratorEnqueuer(source, **options)  # the seed and the shards are the state's
    enqueuer.load_state_dict(state)
    return enqueuer


def cost(options):
    """Return how many times as long as others a start method takes."""
    return 4 if start_method_of(options) == "spawn" else 1


# --- saved and loaded ---


def for_examples(count, **strategies):
    """Run a check with so many examples, each time the same ones."""
    some = settings(
        max_examples=max(1, count) * ROUNDS,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    return lambda check: some(given(**strategies)(check))()


SOURCES = st.builds(
    Source,
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5).map(tuple),
    gaps=st.frozensets(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=6),
    size=st.sampled_from([0, 0, 3, 100_000]),
    knows=st.booleans(),
)
SIZES = st.fixed_dictionaries(
    {"workers": st.integers(1, 4), "max_queue_size": st.sampled_from([1, 2, 3, 10, 40])}
)


@pytest.mark.thorough
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.repeats
def test_a_state_of_any_item_is_gone_on_from_anywhere(backend, ordered):
    """One run saves at every item; others, on other workers, begin at some of these."""

    @for_examples(
        10 // cost(backend),
        source=SOURCES,
        sizes=SIZES,
        later=st.lists(
            st.tuples(st.sampled_from(BACKENDS), SIZES, st.floats(0, 1)), min_size=2, max_size=2
        ),
    )
    def check(source, sizes, later):
        reader, saved = Reader(ordered), []
        with make(source, dict(backend, ordered=ordered, **sizes)) as enqueuer:

            def save():
                seen = [list(items) for items in reader.seen]
                saved.append((reader.epoch, seen, packed(enqueuer.state_dict())))

            save()
            reader.read(enqueuer, after_each=save)
        reader.check(source)
        for other, sizes, where in later:
            reader = Reader(ordered)
            reader.epoch, seen, state = saved[round(where * (len(saved) - 1))]
            reader.seen = [list(items) for items in seen]
            with make(source, dict(other, ordered=ordered, **sizes), state) as enqueuer:
                reader.read(enqueuer)
            reader.check(source)


# --- killed ---


class Killer:
    """Kills workers at random moments of theirs, in a thread of its own.

    Args:
        rng: Draws moments and victims.
        pause_s: How long it waits before each kill, on average.
        most: How many it kills.
        starting: Whether it kills only those that have not said a word yet.
    """

    def __init__(self, rng, pause_s, most, starting=False):
        self._rng, self._pause_s, self._most, self._starting = rng, pause_s, most, starting
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.enqueuer = None
        self.kills = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _run(self):
        while self.kills < self._most:
            if self._over.wait(self._rng.expovariate(1 / self._pause_s)):
                return
            if self.enqueuer is not None:
                self.kills += kill_one(self.enqueuer, self._rng, self._starting)


def drawn_source(rng, **more):
    """Return a source of small or of large items."""
    is_large = rng.random() < 0.5
    lengths = tuple(rng.randint(0, 30 if is_large else 100) for _ in range(rng.randint(1, 5)))
    gaps = frozenset((rng.randrange(5), rng.randrange(30)) for _ in range(rng.choice([0, 10])))
    return Source(lengths, gaps, size=300_000 if is_large else rng.choice([0, 8]), **more)


def drawn_sizes(rng):
    return {"workers": rng.randint(1, 4), "max_queue_size": rng.choice([1, 2, 5, 10, 40])}


def drawn_deaths(rng, lengths, count):
    """Return places at which one or two workers die."""
    shards = [shard for shard, length in enumerate(lengths) if length]
    places = {("load",): 1}
    for _ in range(count):
        if shards:
            shard = rng.choice(shards)
            number = rng.choice([0, lengths[shard] - 1, rng.randrange(lengths[shard])])
            places[shard, rng.randrange(EPOCHS), number] = rng.randint(1, 2)
    return tuple(places.items())


@pytest.fixture
def told(request):
    """Count what was done, and tell."""
    counts = Counter()
    yield counts
    print(f"{request.node.name}: {dict(counts)}")


def for_drawn_runs(request, options, count):
    """Run a check with so many random generators, each time the same ones."""

    def run_all(check):
        for run in range(max(1, count // cost(options)) * ROUNDS):
            seed = f"{request.node.name} {run}"
            print(seed)
            check(random.Random(seed))

    return run_all


# Pauses of the killer, on average.
AT_ANY_MOMENT, DURING_THE_START = [0.001, 0.01, 0.03], [0.0001, 0.001, 0.003]


@pytest.mark.parametrize(
    ("pauses_s", "knows"),
    [
        pytest.param(AT_ANY_MOMENT, False, marks=pytest.mark.thorough),
        pytest.param(AT_ANY_MOMENT, True, marks=pytest.mark.thorough),
        (DURING_THE_START, False),
    ],
    ids=["any moment", "any moment, knows", "start"],
)
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.repeats
def test_kills_at_random_moments_change_nothing(request, process, ordered, pauses_s, knows, told):
    starting = pauses_s is DURING_THE_START

    @for_drawn_runs(request, process, 3)
    def check(rng):
        source = drawn_source(rng, draws_globals=not knows, knows=knows)
        options = dict(process, **drawn_sizes(rng), ordered=ordered, max_restarts=MANY)
        reader = Reader(ordered)
        pause_s = rng.choice(pauses_s) * cost(process) ** (2 if starting else 1)
        with Killer(rng, pause_s, most=rng.randint(2, 5), starting=starting) as killer:
            with make(source, options) as enqueuer:
                killer.enqueuer = enqueuer
                if starting:
                    told.update(kills=kill_one(enqueuer, rng, starting=True))
                reader.read(enqueuer)
                killer.enqueuer = None
                told.update(runs=1, kills=killer.kills, restarts=enqueuer.restart_count)
        reader.check(source)


# --- errors that are skipped ---


@pytest.mark.thorough
@pytest.mark.parametrize("on_error", ["skip", instead])
@pytest.mark.parametrize("knows", [False, True])
@pytest.mark.repeats
def test_skipped_errors_and_kills(request, process, on_error, knows, told, tmp_path_factory):
    """Each error counts once, and what stands for its item comes once."""

    @for_drawn_runs(request, process, 3)
    def check(rng):
        folder = tmp_path_factory.mktemp("deaths")
        lengths = tuple(rng.randint(0, 20) for _ in range(rng.randint(1, 5)))

        def places(count):
            return frozenset((rng.randrange(5), rng.randrange(15)) for _ in range(count))

        source = Source(
            lengths,
            gaps=places(4),
            fails=places(3),
            unsendable=places(6),
            size=rng.choice([0, 8, 300_000]),
            draws_globals=not knows,
            knows=knows,
            deaths=drawn_deaths(rng, lengths, 3),
            folder=str(folder),
        )
        options = dict(process, **drawn_sizes(rng), max_restarts=MANY, on_error=on_error)
        reader = Reader()
        with Killer(rng, 0.01 * cost(process), most=3) as killer:
            with make(source, options) as enqueuer:
                killer.enqueuer = enqueuer
                reader.read(enqueuer)
                killer.enqueuer = None
                assert enqueuer.error_count == EPOCHS * source.error_count()
                told.update(restarts=enqueuer.restart_count)
        told.update(runs=1, kills=killer.kills + len(os.listdir(folder)))
        reader.check(source, on_error=on_error)


@pytest.mark.thorough
@pytest.mark.parametrize("on_error", ["skip", instead])
@pytest.mark.repeats
def test_skipped_errors_and_states(process, on_error):
    """A state of any item: what was skipped is not there again, and nothing else is missing."""

    @for_examples(
        10 // cost(process),
        source=st.builds(
            Source,
            lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
            gaps=st.frozensets(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=2),
            fails=st.frozensets(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=3),
            unsendable=st.frozensets(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=3),
            knows=st.booleans(),
        ),
        sizes=st.tuples(SIZES, SIZES),
        where=st.floats(0, 1),
    )
    def check(source, sizes, where):
        reader, saved = Reader(), []
        with make(source, dict(process, on_error=on_error, **sizes[0])) as enqueuer:

            def save():
                seen = [list(items) for items in reader.seen]
                saved.append((reader.epoch, seen, packed(enqueuer.state_dict())))

            reader.read(enqueuer, after_each=save)
        reader.check(source, on_error=on_error)
        reader = Reader()
        reader.epoch, seen, state = saved[round(where * (len(saved) - 1))]
        reader.seen = [list(items) for items in seen]
        with make(source, dict(process, on_error=on_error, **sizes[1]), state) as enqueuer:
            reader.read(enqueuer)
        reader.check(source, on_error=on_error)


# --- while a worker is being replaced ---


def twenty(shard):
    yield from ((shard.index, number) for number in range(20))


def with_a_replacement_that_meets(act, process, monkeypatch):
    """Kill a worker; call `act` with the process that is started in its place, once."""
    launched, really = [], Starter.launch

    def launch(*args):
        launched.append(really(*args))
        if len(launched) == 3:
            act(launched[-1])
        return launched[-1]

    monkeypatch.setattr(Starter, "launch", launch)
    options = dict(workers=2, max_queue_size=2, max_restarts=2, **process)
    with GeneratorEnqueuer(twenty, **options) as enqueuer:
        batches = iter(enqueuer)
        seen = [next(batches)]
        core_of(enqueuer).run.backend.pool.workers[1].send_signal(signal.SIGKILL)
        while True:
            try:
                seen.extend(batches)
                break
            except KeyboardInterrupt:
                seen.append(KeyboardInterrupt)
        return seen, enqueuer.restart_count, len(launched)


ALL_OF_TWENTY = [(shard, number) for number in range(20) for shard in range(2)]


def test_an_interrupt_meanwhile_neither_loses_nor_repeats_the_replacement(process, monkeypatch):
    def interrupt(_):
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    seen, restarts, launched = with_a_replacement_that_meets(interrupt, process, monkeypatch)
    seen.remove(KeyboardInterrupt)
    assert seen == ALL_OF_TWENTY
    assert (restarts, launched) == (1, 3)


def test_a_replacement_that_dies_before_it_is_told_its_job_is_replaced(process, monkeypatch):
    def kill(new):
        os.kill(new.pid, signal.SIGKILL)
        wait_until(lambda: not alive(new.pid))

    seen, restarts, launched = with_a_replacement_that_meets(kill, process, monkeypatch)
    assert seen == ALL_OF_TWENTY
    assert (restarts, launched) == (2, 4)
