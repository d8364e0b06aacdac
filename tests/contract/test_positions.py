"""A state saved at any step, resumed in a new process, gives the undisturbed run, value by value.

`ENQUEUER_POSITIONS=2000` compares so many states, over sources and loaders of all shapes.
"""

import os
import pickle
import random
import struct
import subprocess
import sys
from pathlib import Path

import positions
import pytest

CASES = int(os.environ.get("ENQUEUER_POSITIONS", "200"))
EACH = max(1, -(-CASES // len(positions.KINDS)))
SCRIPT = Path(positions.__file__)

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(120 + 3 * EACH)]


class Scripts:
    """Runs scripts, each in a process forked from one that has imported everything."""

    def __enter__(self):
        self._server = subprocess.Popen(
            [sys.executable, SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [SCRIPT.parent, *sys.path]))},
        )
        return self

    def __exit__(self, *error):
        self._server.stdin.close()
        assert self._server.wait(30) == 0
        self._server.stdout.close()

    def __call__(self, name, *arguments):
        pickle.dump((name, arguments), self._server.stdin)
        self._server.stdin.flush()
        (size,) = struct.unpack("=Q", self._server.stdout.read(8))
        result = pickle.loads(self._server.stdout.read(size))
        assert not isinstance(result, str), result
        return result


def same(found, wanted):
    """Compare epochs; at an epoch's end, the rest of it may be empty, or be left out."""
    if not wanted[0] and found[0]:
        return found[: len(wanted) - 1] == wanted[1:]
    return found == wanted


@pytest.fixture(scope="module")
def script():
    """Call scripts of one server: it imports torch, which takes longer than a test."""
    with Scripts() as scripts:
        yield scripts


@pytest.mark.parametrize("kind", positions.KINDS)
def test_a_state_of_any_step_gives_the_undisturbed_run(kind, script):
    draw = random.Random(kind)
    setups = positions.SETUPS[positions.KINDS[kind][1]]
    runs = [script("undisturbed", kind, setup) for setup in setups]
    assert all(epochs == runs[0][0] for epochs, _, _ in runs), "it depends on the workers"
    epochs, _, errors = runs[0]
    assert len(epochs) == positions.EPOCHS
    saved = [state for _, states, _ in runs for state in states]
    draw.shuffle(saved)
    for state in saved[:EACH] if len(saved) > EACH else draw.choices(saved, k=EACH):
        epoch, step, *_ = state
        setup = draw.choice(setups)
        found, count = script("resumed", kind, setup, state, positions.EPOCHS)
        wanted = [epochs[epoch][step:], *epochs[epoch + 1 :]]
        assert same(found, wanted), (epoch, step, setup, state)
        assert count == errors
