"""Random clips of audio files: a worker reads only the part of a file that it needs."""

import sys
import tempfile
from pathlib import Path

import numpy as np

try:
    import soundfile
except ImportError as error:
    print(f"{error}. This needs soundfile: pip install soundfile", file=sys.stderr)
    sys.exit(2)

from enqueuer import OrderedEnqueuer

RATE = 16_000


# [recipe]
def clip(path, task, seconds=0.5):
    """Return a random clip of a file, float32 (samples,)."""
    samples = int(seconds * RATE)
    with soundfile.SoundFile(path) as file:
        # The same clip for this file in this epoch, in any worker.
        file.seek(task.rng.integers(max(1, file.frames - samples + 1)))
        # A file that is shorter is filled up with silence.
        audio = file.read(samples, dtype="float32", fill_value=0)
        return {"audio": audio, "name": path.stem}


# [end]


with tempfile.TemporaryDirectory() as folder:
    paths = [Path(folder, f"{i:02}.wav") for i in range(24)]
    for i, path in enumerate(paths):
        tone = np.sin(np.arange(2 * RATE) * (200 + 20 * i) * 2 * np.pi / RATE)
        soundfile.write(path, tone, RATE)
    runs = []
    for backend in ("thread", "process"):
        with OrderedEnqueuer(
            paths, clip, batch_size=8, shuffle=True, workers=2, backend=backend, random_seed=7
        ) as enqueuer:
            runs.append(list(enqueuer))
            print(backend, [batch["audio"].shape for batch in runs[-1]])

assert all(
    np.array_equal(a["audio"], b["audio"]) and a["name"] == b["name"]
    for a, b in zip(*runs, strict=True)
)
