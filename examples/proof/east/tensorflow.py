"""The part of TensorFlow 1 that EAST's icdar.py uses: its flags."""

from types import SimpleNamespace

from absl import flags

app = SimpleNamespace(flags=flags)
