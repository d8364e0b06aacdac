"""abseil-py#170 and its like, by the most common instance: `ImageFile.LOAD_TRUNCATED_IMAGES = True` and
`Image.MAX_IMAGE_PIXELS = None` at the top of a script. A plain loop, threads, fork, and multiprocessing's spawn (which
imports the script again) decode the file. Needs Pillow."""

# needs: PIL
import concurrent.futures
import io
import multiprocessing
import os
import tempfile

import numpy as np
from PIL import Image, ImageFile

ImageFile.LOAD_TRUNCATED_IMAGES = True
Image.MAX_IMAGE_PIXELS = 2_000_000_000
folder = os.environ.setdefault("ENQ_FOLDER20", tempfile.mkdtemp())


def load(i):
    with Image.open(os.path.join(folder, f"{i}.jpg")) as image:
        return int(np.asarray(image).shape[0])


def rows(shard):
    for i in shard.split(range(4)):
        yield load(i)


if __name__ == "__main__":
    from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes

    rng = np.random.default_rng(0)
    for i in range(4):
        data = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), "uint8")).save(data, "JPEG")
        data = data.getvalue()
        with open(os.path.join(folder, f"{i}.jpg"), "wb") as f:
            f.write(data[: len(data) - 300] if i == 2 else data)
    problems = []
    for method in ("thread", "fork", "forkserver", "spawn"):
        backend = "thread" if method == "thread" else Processes(start_method=method)
        for name, make in {
            "shards": lambda **kw: GeneratorEnqueuer(rows, workers=2, backend=backend, **kw),
            "tasks": lambda **kw: OrderedEnqueuer(range(4), load, workers=2, backend=backend, **kw),
        }.items():
            try:
                with make() as e:
                    got = [int(x) for x in e]
            except Exception as error:
                got = f"{type(error).__name__}: {str(error)[:80]}"
            if got != [64] * 4:
                problems.append(f"{name}, {method}: {got}")
    for method in ("fork", "forkserver", "spawn"):
        with concurrent.futures.ProcessPoolExecutor(
            2, mp_context=multiprocessing.get_context(method)
        ) as pool:
            print("  concurrent.futures,", method, list(pool.map(load, range(4))))
    print("FAIL: " + "; ".join(problems) if problems else "ok")
