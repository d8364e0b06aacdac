"""The adapter for Keras on each of its backends; a process imports only one of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import needs_installed

CASES = Path(__file__).with_name("keras_on_a_backend.py")
LIMIT = 400.0  # seconds; TensorFlow alone takes ten to be imported


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_it_keeps_its_promises_on(backend):
    needs_installed("keras", backend)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", CASES],
        cwd=CASES.parents[2],
        env={
            **os.environ,
            "KERAS_BACKEND": backend,
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
