"""huggingface/nanoVLM, ConstantLengthDataset: prefetch() makes its packs ahead of the loop.

Its two methods that choose what goes into a pack, and pack it, are those of the program.
"""

from itertools import chain

from data.advanced_datasets import ConstantLengthDataset
from torch.nn.functional import pad
from torch.utils.data import get_worker_info

from enqueuer import prefetch

KEYS = "input_ids", "labels", "attention_mask", "images"


def iterate(dataset):
    return chain.from_iterable(prefetch(lambda: groups(dataset), dataset.queue_size))


def groups(dataset):
    following = samples(dataset)
    while buffer := take(following, dataset.max_length):
        packs = dataset._balanced_greedy_knapsack(
            buffer, dataset.seq_length, 5, dataset.max_images_per_knapsack
        )
        packed = (dataset._pack_one_group(pack, buffer, dataset.seq_length) for pack in packs)
        yield [dict(zip(KEYS, values, strict=True)) for values in packed]


def take(samples, tokens):
    taken = []
    while tokens > 0 and (sample := next(samples, None)):
        taken.append(sample)
        tokens -= len(sample["input_ids"])
    return taken


def samples(dataset):
    end = dataset.dataset.tokenizer.pad_token_id
    ends = {"input_ids": end, "labels": -100, "attention_mask": 0}
    while True:
        for sample in filter(None, share(dataset.dataset)):
            is_short = len(sample["input_ids"]) < dataset.max_sample_length
            if is_short and len(sample["images"]) <= dataset.max_images_per_example:
                yield sample | {key: pad(sample[key], (0, 1), value=ends[key]) for key in ends}
        if not dataset.infinite:
            return
        dataset.epoch += 1


def share(samples):
    if not hasattr(samples.dataset, "__len__"):
        return samples.iter_for_worker()
    worker = get_worker_info()
    first, step = (worker.id, worker.num_workers) if worker else (0, 1)
    return map(samples.__getitem__, range(first, len(samples), step))


ConstantLengthDataset.__iter__ = iterate
