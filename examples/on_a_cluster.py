"""Make the batches on the machines of a Ray cluster; the loop and the generator stay the same.

    python on_a_cluster.py                          # a Ray of its own, on this machine
    python on_a_cluster.py --address auto           # on a node of a cluster, or 10.0.0.1:6379

It needs `pip install ray`, and on a cluster enqueuer and Ray on every node.
"""

import argparse
import os
import socket
import sys

import numpy as np

try:
    import ray
except ImportError as error:
    print(f"{error}. This needs Ray: pip install ray", file=sys.stderr)
    sys.exit(2)

from enqueuer import GeneratorEnqueuer, Ray


def make(rng):
    """Return a batch, slowly; a third of a megabyte, for which Python takes a while."""
    pixels = rng.integers(0, 255, (8, 64, 64, 3), np.uint8)
    return np.array([[value % 7 for value in row] for row in pixels.reshape(8, -1)], np.uint8)


def batches(shard):
    for number in shard.split(range(16)):
        where = f"{socket.gethostname()}, process {os.getpid()}"
        yield {"pixels": make(shard.rng), "number": number, "where": where}


def epoch(**options):
    with GeneratorEnqueuer(batches, shards=4, random_seed=7, **options) as enqueuer:
        return list(enqueuer)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument(
    "--address", default="local", help="of the cluster; by default one is started here"
)
parser.add_argument("--workers", type=int, default=2, help="how many actors (default: 2)")
options = parser.parse_args()

# Without this call, each enqueuer would start Ray and shut it down. Here two of them share it.
ray.init(
    options.address,
    include_dashboard=None if options.address != "local" else False,
    log_to_driver=False,
    logging_level="error",
)

here = epoch(workers=1)
there = epoch(workers=options.workers, backend="ray")
print("made by:", *sorted({batch["where"] for batch in there}), sep="\n  ")
assert str(os.getpid()) not in " ".join(batch["where"] for batch in there)
assert [batch["number"] for batch in there] == list(range(16))
assert all((a["pixels"] == b["pixels"]).all() for a, b in zip(here, there, strict=True))
print("the same batches as in a plain loop, in the same order")

pixels = there[0]["pixels"]
# It lies in the object store, without a copy.
assert not pixels.flags.writeable
for batch in epoch(workers=options.workers, backend=Ray(copy_arrays=True)):
    # It is a copy, so the loop may change it.
    batch["pixels"] //= 2
print("changed in place, with copy_arrays=True")

ray.shutdown()
