"""keras#6499, segyio#507: a generator fills one array, or takes turns with a few, and yields it.

Processes must give right values; threads cannot, but must say so. With `batch_size` the samples
wait in the worker: also there the user must hear of it.
"""

import warnings

import numpy as np

from enqueuer import GeneratorEnqueuer


def buffers(count):
    def rows():
        arrays = [np.zeros(400) for _ in range(count)]
        for i in range(24):
            arrays[i % count][:] = i
            yield arrays[i % count]

    return rows


def run(source, **options):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with GeneratorEnqueuer(source, **options) as enqueuer:
            got = [np.array(x) for x in enqueuer]
    return got, [warning.category.__name__ for warning in seen]


problems = []
for count in (1, 2, 3, 8):
    got, said = run(buffers(count), backend="process")
    if [x[0] for x in got] != list(range(24)):
        problems.append(f"process, {count} buffers: {[x[0] for x in got]}")
    got, said = run(buffers(count))
    if [x[0] for x in got] != list(range(24)) and "OverwrittenDataWarning" not in said:
        problems.append(f"thread, {count} buffers: {[int(x[0]) for x in got]}, without a word")
    for options in ({"backend": "process"}, {}, {"workers": 0}):
        got, said = run(buffers(count), batch_size=6, **options)
        values = [int(v) for batch in got for v in batch[:, 0]]
        if values != list(range(24)) and "OverwrittenDataWarning" not in said:
            problems.append(f"batch_size=6 {options}, {count} buffers: {values}, without a word")
print("FAIL: " + "; ".join(problems) if problems else "ok")
