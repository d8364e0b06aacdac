"""Skip broken files: catch the errors that you expect, and limit the others.

A generator that has raised cannot continue, so the `try` that skips one file is inside it.
`on_error` is for other errors: the rest of the shard is skipped, and nothing else.
"""

import tempfile
from pathlib import Path

import numpy as np

from enqueuer import GeneratorEnqueuer


def note(error):
    # It returns None, so nothing comes in place of the file.
    print(f"skipped: {type(error).__name__}")


with tempfile.TemporaryDirectory() as directory:
    paths = [Path(directory, f"{i:02}.npy") for i in range(12)]
    for i, path in enumerate(paths):
        np.save(path, np.full((8, 8), i))
    # The generator expects the first error, and not the second one.
    paths[3].write_bytes(b"")
    paths[6].unlink()

    def batches(shard):
        for path in shard.split(paths):
            try:
                image = np.load(path)
            except EOFError:
                continue
            yield image

    with GeneratorEnqueuer(batches, workers=2, shards=4, on_error=note, max_errors=10) as enqueuer:
        read = [int(image[0, 0]) for image in enqueuer]
        print(f"read {sorted(read)} with {enqueuer.error_count} error")

# 3 was left out; 6 ended shard 2, which has 2, 6 and 10.
assert sorted(read) == [0, 1, 2, 4, 5, 7, 8, 9, 11]
