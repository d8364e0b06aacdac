"""Make documents of random words, and train nanochat's tokenizer on them: make_data.py CLONE."""

import random
import runpy
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet

SHARDS, GROUPS, DOCUMENTS = 3, 12, 500

rng = random.Random(7)
words = ["".join(rng.choices("aeinorst", k=rng.randint(2, 9))) for _ in range(2000)]
folder = Path("base_data_climbmix")
folder.mkdir()
for shard in range(SHARDS):
    texts = [
        " ".join(rng.choices(words, k=int(rng.lognormvariate(3.5, 0.8)) + 1))
        for _ in range(GROUPS * DOCUMENTS)
    ]
    path = folder / f"shard_{shard:05d}.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=DOCUMENTS)
program = Path(sys.argv[1], "scripts", "tok_train.py")
sys.argv = [str(program), "--vocab-size=1024"]
runpy.run_path(str(program), run_name="__main__")
