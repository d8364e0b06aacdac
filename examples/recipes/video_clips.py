"""Random clips of video files: a worker decodes from the last keyframe before the clip."""

import sys
import tempfile

import numpy as np

try:
    import av
except ImportError as error:
    print(f"{error}. This needs PyAV: pip install av", file=sys.stderr)
    sys.exit(2)

from enqueuer import OrderedEnqueuer


# [recipe]
def clip(path, task, length=8):
    """Return `length` frames from a random place of a file, uint8 (length, height, width, 3)."""
    with av.open(path) as video:
        stream = video.streams.video[0]
        # The workers already use all CPUs.
        stream.thread_count = 1
        rate = stream.average_rate or stream.guessed_rate
        # Files such as .mkv and .ts do not say how many frames they have, but how long they are.
        count = stream.frames or int(video.duration * rate / av.time_base)
        if count < length:
            raise ValueError(f"{path} has {count} frames, and a clip has {length}")
        # The same place for this file in this epoch, in any worker.
        first = int(task.rng.integers(count - length + 1))
        ticks = 1 / (rate * stream.time_base)
        begin = (stream.start_time or 0) + first * ticks
        video.seek(int(begin), stream=stream)
        frames = []
        for frame in video.decode(stream):
            # Times are rounded to the ticks of the file.
            if frame.pts >= begin - ticks / 2:
                frames.append(frame.to_ndarray(format="rgb24"))
            if len(frames) == length:
                break
        return {"frames": np.stack(frames), "first": first}


# [end]


def write(path, count=40):
    """Write a video of grey frames, which become brighter by six levels each."""
    with av.open(path, "w") as video:
        stream = video.add_stream("mpeg4", rate=25, options={"g": "12"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(count):
            pixels = np.full((48, 64, 3), 6 * number, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                video.mux(packet)
        for packet in stream.encode():
            video.mux(packet)


with tempfile.TemporaryDirectory() as folder:
    paths = [f"{folder}/{i:02}.{('mp4', 'mkv', 'ts')[i % 3]}" for i in range(12)]
    for path in paths:
        write(path)
    runs = []
    for backend in ("thread", "process"):
        with OrderedEnqueuer(
            paths, clip, batch_size=4, shuffle=True, workers=2, backend=backend, random_seed=7
        ) as enqueuer:
            runs.append(list(enqueuer))
            print(backend, [batch["frames"].shape for batch in runs[-1]])

for a, b in zip(*runs, strict=True):
    assert np.array_equal(a["frames"], b["frames"])
    assert np.array_equal(a["first"], b["first"])
    # The clips begin at the frame that was drawn.
    brightness = a["frames"].mean(axis=(2, 3, 4)) / 6
    assert np.abs(brightness - (a["first"][:, None] + np.arange(8))).max() < 0.8
