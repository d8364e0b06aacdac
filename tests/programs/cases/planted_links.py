# needs: h5py
"""In a folder where others may write, such as /tmp, another user makes a link with a name that the
package is about to write: it must not be followed to a file of the caller."""

import os
import tempfile

import numpy as np

from enqueuer import GeneratorEnqueuer
from enqueuer.datasets.hdf5 import pack
from enqueuer.exports import write_prometheus

problems = []
folder = tempfile.mkdtemp(dir=".")
victim, work = os.path.join(folder, "victim"), os.path.join(folder, "work")
with open(victim, "w") as file:
    file.write("precious\n")
os.mkdir(work)
open(os.path.join(work, "thesis.tmp"), "w").close()


def rows(shard):
    for i in shard.split(range(4)):
        yield {"x": np.full((2, 2), i)}


def refused(what, call):
    try:
        call()
    except OSError:
        return
    problems.append(f"{what} was not refused")


os.mkdir(f"{folder}/a.h5.parts")
os.symlink(os.path.abspath(victim), f"{folder}/a.h5.parts/pack.json")
refused("pack.json", lambda: pack(rows, f"{folder}/a.h5", shards=2, random_seed=1))
os.symlink(os.path.abspath(work), f"{folder}/b.h5.parts")
refused("the folder", lambda: pack(rows, f"{folder}/b.h5", shards=2, random_seed=1))
os.symlink(os.path.abspath(f"{folder}/new"), f"{folder}/trace.json")
refused("the trace", GeneratorEnqueuer(iter("abc"), trace=f"{folder}/trace.json").start)
before = set(os.listdir(folder))
write_prometheus(f"{folder}/a.prom", GeneratorEnqueuer(iter("abc")).stats())
if set(os.listdir(folder)) - before != {"a.prom"}:
    problems.append("write_prometheus left a draft")
with open(victim) as file:
    if file.read() != "precious\n":
        problems.append("the victim's file was overwritten")
if os.listdir(work) != ["thesis.tmp"]:
    problems.append("a file in the victim's folder was removed")
if os.path.exists(f"{folder}/new"):
    problems.append("a file was made by way of a link")
print("FAIL: " + "; ".join(problems) if problems else "ok")
