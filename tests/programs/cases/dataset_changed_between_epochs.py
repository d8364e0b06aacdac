"""tensorpack#732, mxnet#19738, tensorflow#45962: a dataset that is changed between two epochs.

A plain loop, and torch's loader, which starts workers anew, see a new order, another difficulty or
more elements. Worker processes with copies do not, and must not be silent about it.
"""

import warnings

from enqueuer import OrderedEnqueuer, Processes


class Rows:
    def __init__(self):
        self.level, self.items = 0, [1, 2, 3]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i] * 10 + self.level


def plain(change):
    rows = Rows()
    first = [rows[i] for i in range(len(rows))]
    change(rows)
    return first, [rows[i] for i in range(len(rows))]


CHANGES = {
    "attribute": lambda rows: setattr(rows, "level", 5),
    "order": lambda rows: rows.items.reverse(),
    "longer": lambda rows: rows.items.append(4),
}
BACKENDS = {
    "thread": "thread",
    "fork": Processes(start_method="fork"),
    "forkserver": Processes(start_method="forkserver"),
}

problems = []
for method, backend in BACKENDS.items():
    for name, change in CHANGES.items():
        rows = Rows()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                with OrderedEnqueuer(rows, workers=2, backend=backend) as enqueuer:
                    first = [int(x) for x in enqueuer]
                    change(rows)
                    got = first, [int(x) for x in enqueuer]
            except IndexError as error:
                got = repr(error)
        if got != plain(change) and not any("do not see it" in str(w.message) for w in seen):
            problems.append(f"{name}, {method}: {got} instead of {plain(change)}, without a word")
print("FAIL: " + "; ".join(problems) if problems else "ok")
