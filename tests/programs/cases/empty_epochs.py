"""Epochs without a batch ended the loop in silence: no data, or too few for `drop_last`."""

import warnings

from enqueuer import EmptyEpochWarning, GeneratorEnqueuer, OrderedEnqueuer, imap, prefetch


def samples(shard):
    yield from shard.split(range(6))


LOOPS = {
    "an empty list": lambda: OrderedEnqueuer([]),
    "too few elements": lambda: OrderedEnqueuer(range(3), batch_size=4, drop_last=True),
    "too few samples": lambda: GeneratorEnqueuer(samples, batch_size=9, drop_last=True),
    "nothing for imap": lambda: imap(abs, []),
    "nothing for prefetch": lambda: prefetch([]),
}
silent = []
for name, make in LOOPS.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = list(make())
    said = [warning for warning in caught if warning.category is EmptyEpochWarning]
    if batches or len(said) != 1 or said[0].filename != __file__:
        silent.append(name)
print("FAIL: " + "; ".join(silent) if silent else "ok")
