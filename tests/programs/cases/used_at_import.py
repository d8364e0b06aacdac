"""uqfoundation/multiprocess#19 (2016), DataDog/dd-trace-py#17742 (2026): workers used while a module is being imported, whose
functions they run. A worker process imports that module, which starts workers again, each of which imports it: how many?
(multiprocessing refuses to start processes while it loads the task.) With threads the import lock is a deadlock in
plain Python, too; there it is enough to end with an error that shows the place."""

import os
import subprocess
import sys
import tempfile

MODULE = """
import os, sys
marks = os.environ["MARKS"]
with open(os.path.join(marks, str(os.getpid())), "w"):
    pass
if len(os.listdir(marks)) > 20:
    os._exit(3)                            # the test's own limit
from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, prefetch
def rows(shard):
    import {name}                         # as a late import does
    for i in shard.split(range(6)):
        yield i
def load(i):
    from {name} import FACTOR
    return i * FACTOR
FACTOR = 10
kw = {kw}
with {what} as e:
    TABLE = [int(x) for x in e]
"""
problems = []
with tempfile.TemporaryDirectory() as folder:
    n = 0
    for what, want in (
        ("GeneratorEnqueuer(rows, workers=2, **kw)", list(range(6))),
        ("OrderedEnqueuer(range(6), load, workers=2, **kw)", [10 * i for i in range(6)]),
    ):
        for kw in ("dict(timeout=3)", "dict(backend='process')"):
            n += 1
            name, marks = f"used_at_import_{n}", os.path.join(folder, f"marks{n}")
            os.mkdir(marks)
            with open(os.path.join(folder, name + ".py"), "w") as f:
                f.write(MODULE.format(name=name, what=what, kw=kw))
            try:
                done = subprocess.run(
                    [sys.executable, "-c", f"import {name}; print({name}.TABLE, flush=True)"],
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    timeout=13,
                    env={**os.environ, "MARKS": marks},
                )
                told = name in done.stderr and ("timeout" in kw or "StartError" in done.stderr)
                if done.stdout.strip() != str(want) and not told:
                    problems.append(
                        f"{what[:17]} {kw}: rc {done.returncode} ...{done.stderr.strip()[-300:]!r}"
                    )
            except subprocess.TimeoutExpired:
                problems.append(f"{what[:17]} {kw}: hangs")
            count = len(os.listdir(marks))
            if count > 3:
                problems.append(
                    f"{what[:17]} {kw}: {count} processes have imported the module (the limit of this test is 21)"
                )
print("FAIL: " + "; ".join(problems) if problems else "ok")
