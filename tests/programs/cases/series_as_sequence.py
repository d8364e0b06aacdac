"""keras-preprocessing `flow_from_dataframe`, and KeyError of torch after `train_test_split`.

A Series whose index is not 0..n-1 is given where a list is expected. A plain loop gives its values
in their order.
"""
# needs: pandas

import pandas as pd

from enqueuer import OrderedEnqueuer, imap

PATHS = pd.Series([f"f{i}" for i in range(6)])
SERIES = {
    "shuffled index": PATHS.sample(frac=1, random_state=1),
    "part": PATHS[[1, 3, 5]],
    "strings as index": pd.Series([1, 2, 3], index=list("abc")),
    "plain": pd.Series([4, 5, 6]),
}
RUNS = {
    "tasks": lambda series: OrderedEnqueuer(series, lambda x: x, workers=1),
    "imap": lambda series: imap(lambda x: x, series, workers=1),
    "batches": lambda series: (
        value for batch in OrderedEnqueuer(series, batch_size=2, workers=1) for value in batch
    ),
}

problems = []
for name, series in SERIES.items():
    for label, run in RUNS.items():
        try:
            got = [str(x) for x in run(series)]
        except Exception as error:
            got = f"{type(error).__name__}: {str(error)[:80]}"
        if got != [str(x) for x in series]:
            problems.append(f"{name}, {label}: {got} instead of {[str(x) for x in series]}")
try:
    list(OrderedEnqueuer(pd.DataFrame({"path": ["a", "b"], "label": [0, 1]}), workers=1))
    problems.append("a DataFrame was accepted")
except TypeError as error:
    print(error)
print("FAIL: " + "; ".join(problems) if problems else "ok")
