"""Lines of text -> 128 token numbers each, by Python: split, look up, pad."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from workload import Epochs, Workload, mapped
from workload.mapped import Mapped

_TOKENS, _WORDS = 128, 20_000


def _prepare(folder: Path, items: int) -> Mapped:
    path = folder / "lines.txt"
    if not path.exists():
        rng = np.random.default_rng(7)
        # A few words are not in the vocabulary.
        words = [f"Word{n}" for n in range(_WORDS + 200)]
        lengths = rng.integers(20, _TOKENS, items)
        lines = (" ".join(words[n] for n in rng.integers(0, len(words), k)) for k in lengths)
        path.write_text("\n".join(lines) + "\n")
    return Mapped(path.read_text().splitlines(), load, 64)


WORKLOAD = Workload(
    "text-tokens",
    f"lines of 20 to {_TOKENS} words -> token numbers; batches of 64; 2 workers",
    unit="lines",
    items=12_800,
    batch_size=64,
    prepare=_prepare,
    size_of=len,
    why="Python in the workers, which splits lines and looks words up. tf.data has a "
    "tokenizer of its own.",
)


@functools.cache
def _vocabulary() -> dict[str, int]:
    return {f"word{n}": n + 1 for n in range(_WORDS)}


def load(line: str) -> Any:
    """Return the number of each word, 0 for an unknown one and at the end."""
    known = _vocabulary()
    tokens = np.zeros(_TOKENS, np.int64)
    words = line.lower().split()[:_TOKENS]
    tokens[: len(words)] = [known.get(word, 0) for word in words]
    return tokens


mapped.add(WORKLOAD)


def _transform(rows: Any) -> Any:
    return {"tokens": [load(line) for line in rows["text"]]}


def _tokens(rows: list[Any]) -> Any:
    return np.stack([row["tokens"] for row in rows])


@WORKLOAD.contestant("Hugging Face, torch", "datasets", (_transform, _tokens))
def _datasets(data: Mapped, items: int) -> Epochs:
    import datasets
    from torch.utils.data import DataLoader

    dataset = datasets.Dataset.from_dict({"text": data.elements}).with_transform(_transform)
    options = dict(num_workers=2, persistent_workers=True)
    batches = DataLoader(dataset, batch_size=64, collate_fn=_tokens, **options)
    while True:
        yield batches


@WORKLOAD.contestant("tf.data, own tokenizer", "tensorflow", is_other=True)
def _tensorflow(data: Mapped, items: int) -> Epochs:
    import tensorflow as tf

    words = list(_vocabulary())
    keys = tf.lookup.KeyValueTensorInitializer(words, tf.range(1, 1 + len(words)))
    table = tf.lookup.StaticHashTable(keys, 0)

    def tokenize(lines: Any) -> Any:
        split = tf.strings.split(tf.strings.lower(lines))
        return table.lookup(split).to_tensor(0, shape=(None, _TOKENS))

    dataset = tf.data.Dataset.from_tensor_slices(list(data.elements)).batch(64)
    dataset = dataset.map(tokenize, num_parallel_calls=2).prefetch(4)
    while True:
        yield dataset.as_numpy_iterator()
