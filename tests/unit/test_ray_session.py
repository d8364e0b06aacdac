"""Starting Ray and shutting it down, with a small Ray of our own that only counts."""

import random
import signal
import threading
import types

import pytest
from helpers import LIMIT

from enqueuer.backends.job import RayOptions
from enqueuer.backends.ray import session as ray_session
from enqueuer.backends.ray.session import Gone, Session
from enqueuer.common import interrupts
from enqueuer.errors import StartError


class Context:
    def __init__(self, number):
        self.gcs_address = f"10.0.0.{number}:6379"
        self.number = number

    def get_node_id(self):
        return f"node {self.number}"

    def get_job_id(self):
        return "01000000"


class FakeRay:
    """Keeps what Ray promises of init() and shutdown(), and does what it does to the process."""

    def __init__(self):
        self.started = 0
        self.is_up = False

    def init(self, address=None):
        assert not self.is_up
        random.random()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        self.started += 1
        self.is_up = True

    def shutdown(self):
        random.random()
        self.is_up = False

    def is_initialized(self):
        return self.is_up

    def get_runtime_context(self):
        # Otherwise Ray would start.
        assert self.is_up
        return Context(self.started)


@pytest.fixture
def ray(monkeypatch):
    # No server listens at the address.
    monkeypatch.setattr(ray_session, "check_reachable", lambda address: None)
    fake = FakeRay()
    monkeypatch.setattr(ray_session, "framework", lambda *args, **options: fake)
    # The small Ray has no threads.
    monkeypatch.setattr(ray_session, "check_process", lambda: None)
    monkeypatch.setattr(ray_session, "started_here", None)
    before = signal.getsignal(signal.SIGTERM)
    yield fake
    signal.signal(signal.SIGTERM, before)


def joined(address=None):
    session = Session(RayOptions(address))
    with interrupts.held():
        session.join()
    return session


def test_the_last_to_leave_shuts_down_what_was_started(ray):
    sessions = [joined(), joined()]
    sessions[0].leave()
    sessions[0].leave()
    assert ray.is_up
    sessions[1].leave()
    assert (ray.started, ray.is_up) == (1, False)


def test_a_ray_of_the_users_is_left_as_it_is(ray):
    ray.init()
    joined().leave()
    assert ray.is_up


def test_a_ray_that_the_user_started_in_the_place_of_ours_is_left_as_it_is(ray):
    session = joined()
    ray.shutdown()
    ray.init()
    session.leave()
    assert ray.is_up


def test_one_that_outlived_its_ray_does_not_shut_down_that_of_another(ray):
    old = joined()
    ray.shutdown()
    new = joined()
    old.leave()
    assert ray.is_up
    new.leave()
    assert not ray.is_up


@pytest.mark.parametrize("address", ["local", "head:6379"])
def test_the_address_that_the_first_one_took_is_taken_by_the_second(ray, address):
    sessions = [joined(address), joined(address)]
    for session in sessions:
        session.leave()
    assert (ray.started, ray.is_up) == (1, False)


def test_another_address_is_an_error_and_counts_for_nothing(ray):
    session = joined("local")
    with pytest.raises(StartError, match="connected to Ray at"):
        joined("10.9.9.9:6379")
    session.leave()
    assert not ray.is_up


@pytest.mark.parametrize("starts_another", [False, True])
def test_a_ray_that_was_shut_down_is_gone(ray, starts_another):
    session = joined()
    session.check()
    ray.shutdown()
    if starts_another:
        ray.init()
    with pytest.raises(Gone, match="was shut down"):
        session.check()


def test_random_numbers_are_left_as_they_are(ray):
    before = random.getstate()
    joined().leave()
    assert random.getstate() == before


def test_what_the_user_does_at_sigterm_stays(ray):
    def mine(number, frame):
        pass

    signal.signal(signal.SIGTERM, mine)
    session = joined()
    assert signal.getsignal(signal.SIGTERM) is mine
    with interrupts.held():
        session.leave()
    assert signal.getsignal(signal.SIGTERM) is mine


def test_what_ray_does_at_sigterm_goes_with_it(ray):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    session = joined()
    assert callable(signal.getsignal(signal.SIGTERM))
    with interrupts.held():
        session.leave()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_exception_of_a_handler_while_ray_starts_is_no_error_of_ray(ray, monkeypatch):
    class Alarm(Exception):
        pass

    def alarm(number, frame):
        raise Alarm

    monkeypatch.setattr(ray, "init", lambda address: signal.raise_signal(signal.SIGTERM))
    signal.signal(signal.SIGTERM, alarm)
    with pytest.raises(Alarm):
        joined()
    assert signal.getsignal(signal.SIGTERM) is alarm


def test_one_that_is_collected_while_another_joins_does_not_wait_for_it(ray):
    old = joined()
    is_up, new = ray.is_initialized, []

    def collected():
        old.leave()
        return is_up()

    def join():
        ray.is_initialized = collected
        new.append(joined())

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive()
    ray.is_initialized = is_up
    assert ray.is_up
    new[0].leave()
    assert not ray.is_up


def test_who_asks_while_another_thread_shuts_ray_down_is_kept_until_that_is_over(ray):
    connection = types.SimpleNamespace(core_worker=object())
    ray._private = types.SimpleNamespace(worker=types.SimpleNamespace(global_worker=connection))
    session = joined()
    asked, raised = threading.Event(), threading.Event()

    def ask():
        asked.set()
        with pytest.raises(Gone):
            session.check()
        raised.set()

    ray.shutdown()
    asking = threading.Thread(target=ask)
    asking.start()
    assert asked.wait(LIMIT)
    assert not raised.wait(0.2)
    del connection.core_worker
    assert raised.wait(LIMIT)
    asking.join(LIMIT)


def test_a_shutdown_that_was_broken_off_keeps_whoever_asks_only_once(ray, monkeypatch):
    monkeypatch.setattr(ray_session, "_SHUTDOWN_S", 0.01)
    connection = types.SimpleNamespace(core_worker=object())
    ray._private = types.SimpleNamespace(worker=types.SimpleNamespace(global_worker=connection))
    session = joined()
    ray.shutdown()
    with pytest.raises(Gone):
        session.check()
    monkeypatch.setattr(ray_session, "_SHUTDOWN_S", 3600)
    with pytest.raises(Gone):
        session.check()


# --- what no node has ---


def node(is_alive=True, **resources):
    return {"Alive": is_alive, "Resources": resources}


NODES = [node(CPU=8.0), node(CPU=2.0, GPU=1.0, disk=2.0), node(is_alive=False, CPU=64.0)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, ""),
        ({"num_cpus": 8, "runtime_env": {}}, ""),
        ({"num_cpus": 2, "num_gpus": 0.5, "resources": {"disk": 1}}, ""),
        ({"num_cpus": 9}, "CPU 9 (at most 8 on a node)"),
        (
            {"num_gpus": 2, "resources": {"tape": 1, "disk": 1}},
            "GPU 2 (at most 1 on a node), tape 1",
        ),
        ({"num_cpus": 4, "num_gpus": 1}, "CPU 4 and GPU 1 on one node"),
        ({"memory": 2**33}, "memory 8.6 GB"),
        ({"accelerator_type": "A100"}, "accelerator_type:A100 0.001"),
    ],
)
def test_what_no_node_has_is_named(options, says):
    assert ray_session.missing(options, NODES) == says


def test_a_cluster_without_a_node_has_nothing():
    assert ray_session.missing({"num_cpus": 1}, []) == "CPU 1"


def test_a_ray_that_is_gone_lacks_nothing(ray):
    session = Session(RayOptions(options={"num_gpus": 1}))
    session.join()
    ray.nodes = list
    assert session.missing() == "GPU 1"
    ray.shutdown()
    assert session.missing() == ""
