"""The programs in benchmarks/ run without any peer, and name the missing ones."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import wave
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers import needs, needs_installed

pytestmark = pytest.mark.thorough

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT = 110.0  # seconds; it takes about three
OURS = ("enqueuer-thread", "enqueuer-fork")

REMARKS = """
import ast, sys
from faults import FAULTS
from faults.verdict import Seen, remarks
print(", ".join(remarks(FAULTS[sys.argv[1]], Seen(*ast.literal_eval(sys.argv[2])))))
"""


ENDED_CHILD = """
import subprocess, sys
import machine
before = machine.cpu_of_session()
code = "import time; e = time.process_time() + 0.3\\nwhile time.process_time() < e: pass"
subprocess.run([sys.executable, "-c", code], check=True)
print(machine.cpu_of_session() - before)
"""


def run(*arguments, program="run.py", path=()):
    return run_python(BENCHMARKS / program, *arguments, path=path)


def run_python(*arguments, path=()):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=BENCHMARKS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *sys.path])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        start_new_session=True,
    )


def hide(package, folder):
    """Have programs with this folder on their path find no such package."""
    hidden = "import importlib.util as u; f = u.find_spec\n"
    hidden += f"u.find_spec = lambda name, *rest: None if name == {package!r} else f(name, *rest)\n"
    (folder / "sitecustomize.py").write_text(hidden)


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


def test_a_run_writes_a_page_with_pictures_and_the_page_can_be_made_again(tmp_path):
    options = ("--quick", "--seconds", 0.1, "--out", tmp_path / "out", "--only", "tiny", "queue")
    contestants = ("--contestants", "enqueuer-thread", "queue.Queue")
    done = run(*options, *contestants, "--page", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "benchmarks.rst").read_text()
    assert "Small items\n-----------\n" in page
    for name in re.findall(r"^\.\. image:: (.*)$", page, re.MULTILINE):
        root = ElementTree.parse(tmp_path / name).getroot()
        assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 2, name
    assert page.count(".. image::") == page.count(":alt: Bars of") == 2
    files = {path: path.read_bytes() for path in tmp_path.glob("benchmarks*/*.*")}
    # Whether there are losses depends on the run.
    assert {path.name for path in files} - {"losses.csv"} == {
        *("failures.csv", "queue.csv", "queue.svg", "results.json", "sequences.csv"),
        *("tiny.csv", "tiny.svg"),
    }
    done = run(tmp_path, program="page.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "benchmarks.rst").read_text() == page
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.parametrize(
    ("program", "page"),
    [("page.py", "benchmarks.rst"), ("workloads_page.py", "benchmarks_workloads.rst")],
)
def test_a_committed_page_is_what_its_results_give(program, page, tmp_path):
    docs = Path(__file__).parents[2] / "docs"
    shutil.copytree(docs / "benchmarks", tmp_path / "benchmarks")
    for made in (tmp_path / "benchmarks").glob("*.[sc]*v*"):
        made.unlink()
    assert run(tmp_path, program=program).returncode == 0
    assert (tmp_path / page).read_text() == (docs / page).read_text()
    names = re.findall(r"benchmarks/[\w-]+\.(?:svg|csv)$", (docs / page).read_text(), re.MULTILINE)
    assert len(names) > 10
    for name in names:
        assert (tmp_path / name).read_text() == (docs / name).read_text()


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
@pytest.mark.parametrize(
    ("case", "parts"), [("ints-thread", [""]), ("ints-process", [" loop", " worker"])]
)
def test_an_instruction_too_many_fails(tmp_path, case, parts):
    program = runpy.run_path(str(BENCHMARKS / "instructions.py"))
    figures = tmp_path / "figures.json"
    kept = {"taken_with": program["versions"](), "figures": {case + part: 1 for part in parts}}
    figures.write_text(json.dumps(kept))
    done = run("--only", case, "--figures", figures, program="instructions.py")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    counted = {line.split("  ")[0]: int(line[23:37].replace(",", "")) for line in lines[1:-2]}
    assert [*counted] == [case + part for part in parts]
    assert all(1_000 < each < 1_000_000 for each in counted.values())
    above = ", ".join(counted)
    assert lines[-2] == f"FAILED: more than 5% above the figure: {above}."


def test_without_valgrind_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run(program="instructions.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert "valgrind is not installed" in done.stdout


def test_a_tree_is_compared_with_another(tmp_path):
    other = BENCHMARKS.parent
    only = ("--only", "tiny", "tasks-batch")
    done = run(other, "--repeats", 1, "--items", 200, *only, program="against.py")
    assert done.returncode == 0, done.stderr
    rows = {line[:26].strip() for line in done.stdout.splitlines()[1:]}
    assert rows == {f"{a}, {b}" for a in ("tiny", "tasks-batch") for b in ("thread", "process")}


def test_settings_are_compared(tmp_path):
    (tmp_path / "mydata.py").write_text("def batches(shard):\n    yield from range(9)\n")
    done = run(
        *("mydata:batches", "--workers", 1, 2, "--backends", "thread", "--seconds", 0.05),
        program="settings.py", path=[tmp_path],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    head, *rows, best = done.stdout.splitlines()
    assert head.split() == ["batches/s", "waiting", "first", "batch"]
    names = ["without workers", "1 thread", "2 threads"]
    assert all(row.startswith(name) for row, name in zip(rows, names, strict=True))
    assert best.startswith("best: workers=")


def test_hdf5_is_measured(tmp_path):
    needs("h5py")
    done = run("--quick", "--cold", "--json", tmp_path / "hdf5.json", program="hdf5.py")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "hdf5.json").read_text())
    assert len(found) == 18
    assert all(rate > 0 for rates in found.values() for rate in rates)


def test_what_ray_actors_send_is_measured(tmp_path):
    needs_installed("ray")
    done = run(
        *("--quick", "--contestants", "ray", "bare", "--json", tmp_path / "ray.json"),
        program="ray_backend.py",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "ray.json").read_text())["found"]
    assert {size: list(rates) for size, rates in found.items()} == {
        size: ["ray 1", "bare 1"] for size in ("tiny", "middle")
    }
    assert all(rate > 0 for rates in found.values() for each in rates.values() for rate in each)


def test_what_a_batch_of_an_actor_costs_is_measured():
    needs_installed("ray")
    done = run("--quick", "--per-batch", program="ray_backend.py")
    assert done.returncode == 0, done.stderr
    assert "tiny, queue 256, 1 actor(s)" in done.stdout


def test_without_ray_that_is_said(tmp_path):
    hide("ray", tmp_path)
    done = run(program="ray_backend.py", path=[tmp_path])
    assert (done.returncode, done.stderr) == (0, "")
    assert "not installed" in done.stdout


def test_tasks_are_measured(tmp_path):
    contestants = ("enqueuer-process", "enqueuer-thread", "ThreadPoolExecutor")
    done = run(
        *("--quick", "--seconds", 0.01, "--out", tmp_path, "--only", "tasks-batch"),
        *("--contestants", *contestants),
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]["tasks-batch"][""]
    assert {name: cell["status"] for name, cell in results.items()} == dict.fromkeys(
        contestants, "ok"
    ), done.stderr


def test_a_peer_that_is_not_installed_is_shown_as_missing(tmp_path):
    # which of the peers are installed here is not known, so this one is hidden
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['pescador'] = None")
    cells, results = run_tiny(tmp_path, "enqueuer-thread", "pescador", path=[tmp_path])
    assert (cells[-1], results["pescador"]["status"]) == ("missing", "missing")
    ours = results["enqueuer-thread"]
    assert (ours["status"], len(ours["repeats"]), len(cells)) == ("ok", 2, 2)
    assert ours["median"] > 0


def test_the_list_names_cases_and_contestants():
    done = run("--list")
    assert (done.returncode, done.stderr) == (0, "")
    names = {line.split()[0] for line in done.stdout.splitlines() if line}
    assert {"large", "memory", "tasks-tiny", "enqueuer-process", "memcpy"} <= names


def test_ours_pass_the_failure_table(tmp_path):
    done = run(
        *("--only", *OURS, "--faults", "ValueError", "sys.exit", "--json", tmp_path / "all.json"),
        program="failures.py",
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "all.json").read_text())["cells"]
    for name in OURS:
        assert {fault: cell["verdict"] for fault, cell in cells[name].items()} == {
            "ValueError": "ok",
            "sys.exit": "ok",
        }, cells[name]
        assert f"{name}, sys.exit: error after" in done.stderr
    assert [line.endswith("2 of 2") for line in done.stdout.splitlines()[-2:]] == [True, True]


@pytest.mark.parametrize(
    ("needs_all", "code", "said"), [([], 0, "not installed"), (["--needs-all"], 1, "needs spdl")]
)
def test_a_loader_that_is_not_installed_is_shown_or_an_error(tmp_path, needs_all, code, said):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['spdl'] = None")
    done = run("--only", "spdl", *needs_all, program="failures.py", path=[tmp_path])
    assert done.returncode == code
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("fault", "seen", "expected"),
    [
        # items, end, original, attributes, frames, text, seconds
        ("ValueError", ((0, 1), "error", True, True, "real"), ""),
        ("ValueError", ((0, 1), "error", True, False, "text"), "attributes lost, frames as text"),
        ("ValueError", ((0, 1), "error", False, False, "none"), "type lost, unclear, no frames"),
        ("ValueError", ((0,), "error", True, True, "real"), "lost item"),
        ("unpicklable", ((0, 1, 3, 4, 5), "end"), "went on, silent end"),
        ("unpicklable", ((0, 1, 2, 3, 4, 5), "end"), ""),
        ("SIGKILL", ((0, 1), "hang"), "hang"),
        ("SIGKILL", ((0, 1), "error", False, False, "none", "EOFError: "), "unclear"),
        ("SIGKILL", ((0, 1), "error", False, False, "none", "a worker died", 60.0), "slow"),
        ("SIGKILL", ((0, 1), "gone"), "consumer gone"),
        ("holds-lock", ((0, 1), "error", False, False, "none", "X: a HoldsLock"), ""),
    ],
)
def test_a_verdict_says_what_is_wrong(fault, seen, expected):
    done = run_python("-c", REMARKS, fault, repr(seen))
    assert (done.stdout.strip(), done.stderr) == (expected, "")


def test_the_cpu_time_of_a_child_that_has_ended_is_counted():
    done = run_python("-c", ENDED_CHILD)
    assert done.returncode == 0, done.stderr
    # The child computes for 0.3 s; the system counts in ticks of 10 ms.
    assert float(done.stdout) > 0.25


def test_the_workloads_compare_outputs_and_write_a_page_that_can_be_made_again(tmp_path):
    out = tmp_path / "workloads.json"
    options = ("--only", "plain loop", "enqueuer", "--count", 40, "--repeats", 1, "--out", out)
    done = run("stragglers", *options, "--page", tmp_path, program="workloads.py")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.endswith("the same")]
    assert {row.split("  ")[0] for row in rows} == {"plain loop", "enqueuer"}
    cells = json.loads(out.read_text())["workloads"]["stragglers"]
    assert all(one["rate"] > 0 < one["speed"] for tries in cells.values() for one in tries)
    (digest,) = {one["digest"] for tries in cells.values() for one in tries}
    assert len(digest) == 16
    page = (tmp_path / "benchmarks_workloads.rst").read_text()
    assert "stragglers\n----------\n" in page
    assert page.count(".. image:: benchmarks/workload-stragglers.svg") == 1
    assert page.count(":alt: Bars of stragglers.") == 1
    picture = tmp_path / "benchmarks" / "workload-stragglers.svg"
    root = ElementTree.parse(picture).getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 2
    before = picture.read_bytes()
    assert run(tmp_path, program="workloads_page.py").returncode == 0
    assert (tmp_path / "benchmarks_workloads.rst").read_text() == page
    assert picture.read_bytes() == before


def test_a_contestant_that_failed_is_a_dash(tmp_path):
    options = ("--only", "plain loop", "enqueuer", "--count", 40, "--repeats", 1, "--limit", 0.01)
    done = run("stragglers", *options, "--page", tmp_path, program="workloads.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("timeout") == 2
    page = (tmp_path / "benchmarks_workloads.rst").read_text()
    dash = "\N{EN DASH}"
    table = (tmp_path / "benchmarks" / "workload-stragglers.csv").read_text()
    assert f"\nenqueuer,{dash},{dash},{dash}," in table
    assert ".. image::" not in page


def test_a_workload_that_does_not_exist_is_named():
    done = run("nothing", program="workloads.py")
    assert done.returncode != 0
    assert "no such workload: nothing" in done.stderr


def test_a_diagnosis_is_judged_by_what_its_advice_gains(tmp_path):
    before = tmp_path / "before.json"
    options = ("--only", "slow-4", "--seconds", 0.5, "--repeats", 1)
    done = run(*options, "--out", before, program="diagnosis.py")
    assert done.returncode == 0, done.stderr
    row = json.loads(before.read_text())["rows"]["slow-4"]
    assert all(rate > 0 for rates in row["rates"].values() for rate in rates)
    assert "ordered=False" in row["gains"]
    score = r"^slow-4 .*\nkind right: [01] of 1 \(10?0? %, goal: at least 95 %\)\nuseful: "
    assert re.search(score, done.stdout, re.MULTILINE)
    # A gain that is known is not measured again.
    row["gains"]["workers=64"] = 99.0
    before.write_text(json.dumps({"rows": {"slow-4": row}}))
    done = run(*options, "--known", before, "--burners", 1, program="diagnosis.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^slow-4 .* 99.00 workers=64 +not useful$", done.stdout, re.MULTILINE)
    assert "goal: at least 90 %" in done.stdout


def test_a_situation_is_left_out_where_its_package_is_missing(tmp_path):
    hide("ray", tmp_path)
    done = run("--only", "ray-file", program="diagnosis.py", path=[tmp_path])
    assert done.returncode == 0, done.stderr
    assert re.search("^ray-file +left out: ray is not installed$", done.stdout, re.MULTILINE)
    assert "kind right: 0 of 0" in done.stdout


def test_the_order_is_measured():
    done = run(program="order.py")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\w.* \d\.\d\d million events/s$", done.stdout, re.MULTILINE)) == 3


def test_real_files_are_compared_with_the_library_of_each(tmp_path):
    needs_installed("PIL", "soundfile", "h5py")
    import h5py

    np.save(tmp_path / "a.npy", np.arange(3))
    table = np.dtype([("name", h5py.string_dtype()), ("rows", h5py.vlen_dtype("i4")), ("x", "f4")])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["texts"], file["odd"] = ["a", "b"], [file.ref]
        file.create_dataset("table", (3,), table)[1] = ("c", np.arange(3), np.nan)
    (tmp_path / "b.h5").write_bytes(b"1 2 3")
    (tmp_path / "b.npy").write_bytes(b"1 2 3")
    (tmp_path / "a.pgm").write_bytes(b"P5 2 1 255 Az")
    (tmp_path / "b.pgm").write_bytes(b"P5 2 1 255 A")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(8))
    done = run(tmp_path, program="real_files.py")
    assert done.returncode == 0, done.stdout + done.stderr
    each = "1 x the same values, 1 x an error in both"
    assert sorted(re.sub(" +", " ", done.stdout).splitlines()) == [
        "h5 1 x the same values, 1 x an error",
        f"npy {each}",
        f"pgm {each}",
        "wav 1 x the same values",
    ]


def test_packing_is_measured(tmp_path):
    hide("grain", tmp_path)
    names = ("enqueuer", "enqueuer, concat", "plain loop", "Grain")
    options = ("--quick", "--cases", "pack", "python", "--only", *names)
    done = run(*options, program="sequences.py", path=[tmp_path])
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(.+?) +(\d+\.\d+) +(\d+\.\d)% +\d+$", done.stdout, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(names[:3] * 2)
    assert all(float(useful) > 95 for _, _, useful in rows)
    assert len(re.findall(r"^Grain, (pack|python): .*grain", done.stderr, re.MULTILINE)) == 2


def test_decoders_are_measured(tmp_path):
    needs_installed("PIL", "skimage", "soundfile")
    # The others may be missing; one of them is, here.
    hide("simplejpeg", tmp_path)
    names = ("Pillow", "load_image (Pillow, reduced)", "simplejpeg", "load_audio (start, frames)")
    done = run("--quick", "--only", *names, program="decoders.py", path=[tmp_path])
    assert done.returncode == 0, done.stderr
    tables = re.findall(r"^(\w+), (.*)\n\n=+", done.stdout, re.MULTILINE)
    kinds = [kind for kind, _ in tables]
    assert kinds == ["jpeg"] * 3 + ["png", "webp", "wav", "flac", "ogg"]
    # The quickest first; Pillow's pixels are what the others are compared with.
    rows = re.findall(
        r"^(Pillow|load_image).*? +(\d+\.\d+) +(\d+\.\d+)$", done.stdout, re.MULTILINE
    )
    assert [float(difference) for name, _, difference in rows if name == "Pillow"] == [0.0] * 5
    assert all(float(cpu_ms) > 0 for _, cpu_ms, _ in rows)
    assert len(re.findall("^simplejpeg +needs simplejpeg$", done.stdout, re.MULTILINE)) == 3
