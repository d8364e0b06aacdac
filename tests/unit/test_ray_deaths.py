"""Why an actor is lost, and whether that counts as a restart; without Ray."""

import pytest

from enqueuer.backends.pool import WorkerState
from enqueuer.backends.ray.pool import Actor


class ActorDiedError(Exception):
    """Ray's: it knows that the actor is dead."""


class ActorUnavailableError(Exception):
    """Ray's: the connection broke, and Ray noticed no death within a second."""


def lost(error, state):
    """Return an actor that was in this state when its stream raised."""
    actor = Actor(0, (0,), *[None] * 3)
    actor.state = state
    actor.lose(error, str(error))
    assert actor.state is WorkerState.DEAD
    return actor


OF_ITS_NODE = [
    ActorDiedError("The actor died because its node has died. Node Id: 1234"),
    ActorUnavailableError("The actor 1234 is unavailable: RPC error: Socket closed"),
]


@pytest.mark.parametrize("error", OF_ITS_NODE)
def test_an_actor_that_its_node_took_along_before_it_began_is_no_restart(error):
    """Ray may choose a node that is dead, or about to be, until it has missed heartbeats of it."""
    assert lost(error, WorkerState.STARTING).never_ran


@pytest.mark.parametrize("error", OF_ITS_NODE)
def test_one_that_had_begun_is(error):
    assert not lost(error, WorkerState.RUNNING).never_ran


def test_one_whose_process_died_is():
    """An import that crashes must not be tried for ever."""
    error = ActorDiedError("The actor is dead because its worker process has died.")
    assert not lost(error, WorkerState.STARTING).never_ran
