"""Texts to packed rows, beside peers: tokens a second, the share of useful tokens, CPU time.

    python benchmarks/sequences.py                          # what is installed, about five minutes
    python benchmarks/sequences.py --only enqueuer Grain --repeats 1
    python benchmarks/sequences.py --quick                  # only to see that it runs

Three cases. `pack`: documents of token numbers in memory, whose lengths are log-normal with a mean
of 500, are packed in one process, by one thread. `python` and `tokenizers`: texts of as many words
are tokenized by two worker processes, and packed; one tokenizer is a regular expression and a dict,
the other a byte-pair encoding that is trained before. Rows have 2048 tokens, and come to the loop
in batches of 8.

Each number is taken in a fresh process; the time is that from the source in memory to the last
batch, with the start of workers. The contestants run in turn, and the fastest of their repeats
counts. Each uses its own means: `datasets` and torchdata have no packing, so that theirs is the
usual function for `map`, which drops what is left of each thousand texts and gives tokens alone,
and the plain loop. Grain gives no labels. The row `tokens alone` is the plain loop without what
attention and loss need beside the tokens.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import machine
import numpy as np

ROW, BATCH, WINDOW = 2048, 8, 1000
PACKAGES = ["grain", "torchdata", "datasets", "tokenizers"]
CASES = ("pack", "python", "tokenizers")
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}

Tokenize = Callable[[str], Any]


def lengths_of(count: int) -> np.ndarray:
    """Return the lengths of documents; none is longer than a row, as Grain splits none."""
    lengths = np.random.default_rng(7).lognormal(np.log(500) - 0.5, 1.0, count).astype(int) + 1
    return np.minimum(lengths, ROW)


def texts_of(count: int) -> list[str]:
    """Return texts of these numbers of words, of a vocabulary of 5000."""
    rng = np.random.default_rng(8)
    letters = rng.integers(97, 123, (5000, 9)).astype(np.uint8)
    sizes = rng.integers(2, 10, 5000)
    words = [row[:size].tobytes().decode() for row, size in zip(letters, sizes, strict=True)]
    return [" ".join(words[k] for k in rng.integers(0, 5000, n)) for n in lengths_of(count)]


def python_tokenizer(texts: list[str]) -> Tokenize:
    """Return a tokenizer in Python: a regular expression, and a dict of the words."""
    split = re.compile(r"\w+|[^\w\s]").findall
    number = {word: n for n, word in enumerate(sorted({w for t in texts for w in split(t)}), 1)}

    def tokenize(text: str) -> np.ndarray:
        return np.array([number[word] for word in split(text)][:ROW], np.int32)

    return tokenize


def trained_tokenizer(texts: list[str]) -> Tokenize:
    """Return a byte-pair encoding of the package tokenizers, trained with some of the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=10_000, show_progress=False)
    bpe.train_from_iterator(texts[:500], trainer)

    def tokenize(text: str) -> np.ndarray:
        return np.array(bpe.encode(text).ids[:ROW], np.int32)

    return tokenize


# --- contestants: each yields arrays of batches of rows, and the number of useful tokens ---

Found = Iterator[tuple[np.ndarray, int]]


def concatenated(documents: Iterable[np.ndarray], is_bare: bool = False) -> Found:
    """Yield batches of rows of one document after the other, with what attention and loss need."""
    waiting: list[np.ndarray] = []
    count, size = 0, ROW * BATCH
    for document in documents:
        waiting.append(document)
        count += len(document)
        if count >= size:
            tokens = np.concatenate(waiting)
            batch = tokens[:size].reshape(BATCH, ROW)
            if not is_bare:
                described(batch, np.cumsum([len(own) for own in waiting]))
            yield batch, size
            waiting, count = [tokens[size:]], count - size


def described(batch: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return positions, numbers of documents and labels, by numpy for the whole batch."""
    ends = ends[ends < batch.size]
    begins = np.unique(np.concatenate([[0], ends, np.arange(0, batch.size, ROW)]))
    sizes = np.diff(begins, append=batch.size)
    positions = np.arange(batch.size, dtype=np.int32) - np.repeat(begins, sizes).astype(np.int32)
    numbers = np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)
    labels = np.full(batch.size, -100, np.int32)
    labels[:-1] = batch.reshape(-1)[1:]
    labels[begins[1:] - 1] = -100
    return positions, numbers, labels


def plain_loop(texts: list[Any], tokenize: Tokenize | None) -> Found:
    """Tokenize and pack in the loop."""
    return concatenated(texts if tokenize is None else map(tokenize, texts))


def tokens_alone(texts: list[Any], tokenize: Tokenize | None) -> Found:
    """Do the same, without positions, numbers of documents and labels."""
    return concatenated(texts if tokenize is None else map(tokenize, texts), is_bare=True)


def with_enqueuer(texts: list[Any], tokenize: Tokenize | None, method: Any = "best_fit") -> Found:
    """Pack in the workers that tokenize."""
    from enqueuer import GeneratorEnqueuer, pack

    packing = {"method": method, "window": WINDOW, "dtype": "int32"}
    if tokenize is None:
        rows: Iterator[Any] = iter(pack(texts, ROW, **packing))
        while batch := list(itertools.islice(rows, BATCH)):
            names = batch[0]
            arrays = {name: np.stack([row[name] for row in batch]) for name in names}
            yield arrays["tokens"], np.count_nonzero(arrays["document_ids"])
        return

    def batches(shard: Any) -> Any:
        own = shard.split(texts)
        return pack(lambda first_item=0: map(tokenize, own[first_item:]), ROW, **packing)

    options = {"workers": 2, "backend": "process", "shards": 2, "batch_size": BATCH}
    # The batches of a window come at once, and wait while the next one is tokenized.
    with GeneratorEnqueuer(batches, **options, max_queue_size=64) as enqueuer:
        for batch in enqueuer:
            yield batch["tokens"], np.count_nonzero(batch["document_ids"])


def with_enqueuer_concat(texts: list[Any], tokenize: Tokenize | None) -> Found:
    """Pack without padding."""
    return with_enqueuer(texts, tokenize, "concat")


def with_grain(texts: list[Any], tokenize: Tokenize | None, kind: str = "FirstFit") -> Found:
    """Pack in the workers that tokenize, each its part."""
    import grain
    import grain.experimental

    def element(text: Any) -> dict[str, np.ndarray]:
        return {"tokens": text if tokenize is None else tokenize(text)}

    dataset = grain.MapDataset.source(texts).map(element).to_iter_dataset()
    # As many rows as a window has tokens for.
    bins = int(lengths_of(4000).mean() * WINDOW / ROW)
    packed = getattr(grain.experimental, f"{kind}PackIterDataset")(
        dataset, length_struct={"tokens": ROW}, num_packing_bins=bins
    )
    packed = packed.batch(BATCH)
    if tokenize is not None:
        packed = packed.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    for batch in packed:
        yield batch["tokens"], np.count_nonzero(batch["tokens_segment_ids"])


def with_grain_best(texts: list[Any], tokenize: Tokenize | None) -> Found:
    """Pack by best fit."""
    return with_grain(texts, tokenize, "BestFit")


def with_torchdata(texts: list[Any], tokenize: Tokenize | None) -> Found:
    """Tokenize in workers, and pack in the loop."""
    import torchdata.nodes as nodes

    source: Any = nodes.IterableWrapper(texts)
    if tokenize is not None:
        options = {"num_workers": 2, "method": "process", "prebatch": 16}
        source = nodes.ParallelMapper(source, tokenize, **options, multiprocessing_context="fork")
    return concatenated(iter(nodes.Loader(source)))


def with_datasets(texts: list[Any], tokenize: Tokenize | None) -> Found:
    """Tokenize and pack in `map`, and read the table that it writes."""
    import datasets

    datasets.disable_progress_bars()

    def group(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        documents = rows["text"] if tokenize is None else map(tokenize, rows["text"])
        tokens = np.concatenate([np.asarray(document) for document in documents])
        return {"tokens": list(tokens[: len(tokens) // ROW * ROW].reshape(-1, ROW))}

    dataset = datasets.Dataset.from_dict({"text": texts})
    options = {"batched": True, "batch_size": WINDOW, "remove_columns": ["text"]}
    dataset = dataset.map(group, **options, num_proc=None if tokenize is None else 2)
    for batch in dataset.with_format("numpy").iter(BATCH):
        yield batch["tokens"], batch["tokens"].size


CONTESTANTS: dict[str, Callable[[list[Any], Tokenize | None], Found]] = {
    "enqueuer": with_enqueuer,
    "enqueuer, concat": with_enqueuer_concat,
    "Grain": with_grain,
    "Grain, best fit": with_grain_best,
    "torchdata.nodes": with_torchdata,
    "datasets": with_datasets,
    "plain loop": plain_loop,
    "tokens alone": tokens_alone,
}


def measure(name: str, case: str, count: int) -> dict[str, float]:
    """Return what one run took, in this process and those that it started."""
    texts: list[Any]
    tokenize = None
    if case == "pack":
        rng = np.random.default_rng(9)
        texts = [rng.integers(1, 50_000, n).astype(np.int32) for n in lengths_of(count)]
    else:
        texts = texts_of(count)
        tokenize = (python_tokenizer if case == "python" else trained_tokenizer)(texts)
    # What it imports is no part of the time.
    for _ in CONTESTANTS[name](texts[:20], None if case == "pack" else len_of):
        pass
    start, cpu = time.perf_counter(), machine.cpu_of_session()
    useful = places = 0
    for tokens, own in CONTESTANTS[name](texts, tokenize):
        useful, places = useful + own, places + tokens.size
    return {
        "rate": useful / (time.perf_counter() - start) / 1e6,
        "useful": useful / places,
        "cpu": (machine.cpu_of_session() - cpu) / useful * 1e9,
    }


def len_of(text: str) -> np.ndarray:
    """Return a document of as many tokens as the text has letters, at most a row."""
    return np.ones(min(len(text), ROW), np.int32)


def run(name: str, case: str, count: int) -> dict[str, float] | None:
    """Measure in a fresh session; return None if a package is missing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--one", name, case, str(count)]
        variables = {**os.environ, **ONE_THREAD, "HF_HOME": folder, "TMPDIR": folder}
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, start_new_session=True
        )
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    last = done.stderr.strip().splitlines()[-1:]
    print(f"{name}, {case}: {''.join(last)}", file=sys.stderr, flush=True)
    return None


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help=", ".join(CONTESTANTS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--documents", type=int, default=20_000, help="(default: 20000)")
    parser.add_argument("--repeats", type=int, default=3, help="of each (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one short repeat")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, case, count = options.one
        print(json.dumps(measure(name, case, int(count))))
        return
    if options.quick:
        options.documents, options.repeats = 500, 1
    about = machine.describe(PACKAGES)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    print(f"{datetime.date.today()}, {about['cpu']}, {about['cores']} cores, Python", end=" ")
    print(f"{about['python']}, load {about['load'][0]:.1f}\n{versions}", flush=True)
    for case in options.cases:
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.repeats):
            for name in options.only or CONTESTANTS:
                if row := run(name, case, options.documents):
                    found.setdefault(name, []).append(row)
        print(f"\n{case:20} million tokens/s   useful   CPU ns a token")
        best = {name: max(rows, key=lambda row: row["rate"]) for name, rows in found.items()}
        for name, row in sorted(best.items(), key=lambda item: -item[1]["rate"]):
            print(f"{name:20} {row['rate']:16.2f} {row['useful']:8.1%} {row['cpu']:16.0f}")


if __name__ == "__main__":
    main()
