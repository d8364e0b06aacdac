"""benchmarks/run.py runs without any peer, and says who is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"
LIMIT = 60.0  # seconds; it takes about three


def run(*arguments, path=()):
    return subprocess.run(
        [sys.executable, RUN, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *sys.path])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def run_tiny(out, *contestants, path=()):
    """Run the smallest case; return its cells in the table, and its results."""
    done = run(
        *("--quick", "--seconds", 0.1, "--repeats", 2, "--out", out, "--only", "tiny"),
        *("--contestants", *contestants),
        path=path,
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("tiny: "))
    assert line in (out / "results.txt").read_text()
    everything = json.loads((out / "results.json").read_text())
    return line.partition("items/s")[2].split(), everything["results"]["tiny"][""]


def test_a_run_prints_a_table_and_saves_it(tmp_path):
    cells, results = run_tiny(tmp_path, "enqueuer-thread", "multiprocessing.Queue")
    assert len(cells) == len(results) == 2
    for one in results.values():
        assert (one["status"], len(one["repeats"])) == ("ok", 2)
        assert one["median"] > 0


def test_a_peer_that_is_not_installed_is_shown_as_missing(tmp_path):
    # which of the peers are installed here is not known, so this one is hidden
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['pescador'] = None")
    cells, results = run_tiny(tmp_path, "enqueuer-thread", "pescador", path=[tmp_path])
    assert (cells[-1], results["pescador"]["status"]) == ("missing", "missing")


def test_the_list_names_cases_and_contestants():
    done = run("--list")
    assert (done.returncode, done.stderr) == (0, "")
    names = {line.split()[0] for line in done.stdout.splitlines() if line}
    assert {"large", "memory", "enqueuer-process", "memcpy"} <= names
