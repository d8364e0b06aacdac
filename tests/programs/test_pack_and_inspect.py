"""`enqueuer pack` and `enqueuer inspect`: what they print, write and return."""

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers import LIMIT, needs, terminal

from enqueuer import cli

h5py = needs("h5py")
needs("tqdm")

SOURCE = """
import os, time
import numpy as np

def batches(shard):
    for number in shard.split(range(20)):
        yield {"x": np.full((5, 2), number), "name": [f"n{number}"] * 5}

def pairs():
    yield np.arange(3), np.arange(3.0)

def samples(shard):
    for number in shard.split(range(9)):
        yield {"x": np.arange(number, dtype="int16")}

def broken(shard):
    raise KeyError("no such file")
    yield

def large(shard):
    for _ in range(20):
        yield {"x": shard.rng.integers(0, 255, (1000, 1000), np.uint8)}

def slow(shard):
    yield np.zeros(2)
    if shard.index == 1:
        print("reached", flush=True)
        time.sleep(100)

listed = [np.arange(4)]

def lists():
    yield {"x": [[1], [2, 3]]}

def single():
    yield {"x": 1}
"""


@pytest.fixture
def run(tmp_path):
    """Run a command where mydata.py lies; return what came of it."""
    (tmp_path / "mydata.py").write_text(SOURCE)

    def run(*arguments, stderr=subprocess.PIPE):
        return subprocess.run(
            command(arguments),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            **surroundings(),
        )

    return run


def files_in(folder):
    return sorted(set(os.listdir(folder)) - {"__pycache__"})


def command(arguments):
    return [sys.executable, "-m", "enqueuer", *map(str, arguments)]


def surroundings():
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return dict(env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL)


def test_what_was_packed_is_inspected(run, tmp_path):
    done = run("pack", "mydata:batches", "out.h5", "--workers", 2, "--seed", 7, "--shards", 4)
    assert (done.returncode, done.stdout) == (0, "out.h5: 100 rows\n"), done.stderr
    done = run("inspect", "out.h5")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["key", "shape", "dtype", "chunk", "compression", "stored"]
    assert lines[1][:4] == ["name", "100", "text", "25"]
    assert lines[2][:6] == ["x", "100", "x", "2", "int64", "25"]
    assert len(lines) == 3


def test_a_merged_file_is_alone(run, tmp_path):
    options = ["--keys", "x,y", "--merge", "--quiet", "--compression", "gzip"]
    done = run("pack", "mydata:pairs", "out.h5", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert files_in(tmp_path) == ["mydata.py", "out.h5"]
    with h5py.File(tmp_path / "out.h5") as file:
        assert sorted(file) == ["x", "y"]
        assert file["x"].compression == "gzip"


def test_samples_of_any_length_and_lists_are_packed(run):
    options = ["--samples", "--ragged", "x", "--backend", "thread", "--checksum", "--quiet"]
    options += ["--chunk-rows", "2"]
    assert run("pack", "mydata:samples", "a.h5", *options).stdout == "a.h5: 9 rows\n"
    assert run("pack", "mydata:listed", "b.h5", "--quiet").stdout == "b.h5: 4 rows\n"
    assert "ragged int16" in run("inspect", "a.h5").stdout


def test_a_bar_is_shown_on_a_terminal_only(run):
    done = run("pack", "mydata:batches", "a.h5", "--shards", 4)
    assert (done.returncode, done.stderr) == (0, "")
    with terminal() as screen:
        assert run("pack", "mydata:batches", "b.h5", "--shards", 4, stderr=screen).returncode == 0
    assert "packing: 100%" in screen.text()


def test_a_dry_run_tells_and_writes_nothing(run, tmp_path):
    done = run("pack", "mydata:batches", "out.h5", "--dry-run", "--workers", 8)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out.h5: would be written by 8 workers, 32 shards; ")
    assert "x     5 x 2  int64" in done.stdout
    assert files_in(tmp_path) == ["mydata.py"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("pack nothing:f out.h5", "there is no module 'nothing'"),
        ("pack mydata:f out.h5", "module 'mydata' has no 'f'"),
        ("pack mydata:batches mydata.py", "mydata.py is there already"),
        ("pack mydata:batches mydata.py --dry-run", "mydata.py is there already"),
        ("pack mydata:batches no/out.h5", "there is no folder"),
        ("pack mydata:batches no/out.h5 --dry-run", "there is no folder"),
        ("pack mydata:np out.h5", "mydata:np: pack needs a generator function or an iterable"),
        ("pack mydata:listed out.h5 --shards 2", "only a generator function of a shard can be"),
        ("inspect out.h5", "out.h5: no such file"),
        ("inspect .", "a folder, and no HDF5 file"),
        ("inspect /", "a folder, and no HDF5 file"),
        ("inspect mydata.py", "mydata.py: not an HDF5 file"),
    ],
)
def test_a_failure_is_reported_in_a_line(run, arguments, says):
    done = run(*arguments.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert done.stderr.startswith("enqueuer: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "mydata:lists",
            "if the rows differ in shape, pad them, or give --ragged x if",
        ),
        ("mydata:single", "if the source yields one sample at a time, give --samples"),
        ("mydata:pairs --keys x", "--keys x do not name the 2 arrays of an item"),
        ("mydata:listed --shards 2", "can be split into --shards 2; write"),
    ],
)
def test_a_remedy_is_named_as_an_option_of_the_shell(
    tmp_path, monkeypatch, capsys, arguments, says
):
    (tmp_path / "mydata.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mydata", raising=False)
    source, *options = arguments.split()
    code = cli.main(["pack", source, "out.h5", "--quiet", "--backend", "thread", *options])
    monkeypatch.delitem(sys.modules, "mydata", raising=False)
    printed = capsys.readouterr().err
    assert code == 1
    assert says in printed
    assert len(printed.splitlines()) == 1


def test_names_cannot_command_the_terminal(tmp_path, capsys):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x\x1b[31m"] = np.arange(3)
    assert cli.main(["inspect", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.replace("\n", "").isprintable()
    assert r"x\x1b[31m" in printed
    assert cli.main(["inspect", str(tmp_path / "no\x1b[2J")]) == 1
    assert r"no\x1b[2J: no such file" in capsys.readouterr().err


def test_an_error_of_the_source_has_its_traceback(run, tmp_path):
    done = run("pack", "mydata:broken", "out.h5", "--quiet")
    assert done.returncode == 1
    assert "KeyError: 'no such file'" in done.stderr
    assert "in broken" in done.stderr
    assert files_in(tmp_path) == ["mydata.py"]


@pytest.mark.parametrize(
    "arguments",
    ["pack", "pack mydata out.h5", "pack mydata:f", "pack a:b c.h5 --keys a,,b", "inspect"],
)
def test_wrong_arguments_are_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments.split())
    assert caught.value.code == 2


@pytest.mark.parametrize("name", ["pack", "inspect"])
def test_help_has_examples_and_exit_codes(name, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert f"examples:\n  enqueuer {name} " in printed
    assert "exit codes: 0" in printed


FULL = """
mount -t tmpfs -o size=6m none small || exit 77
"$@" pack mydata:large small/out.h5 --shards 2 --workers 2 --quiet
code=$?
ls -A small
exit $code
"""


def test_a_full_disk_is_reported_in_a_line_and_nothing_is_left(tmp_path):
    """HDF5 would crash, now or later, for what it could not write any more."""
    (tmp_path / "mydata.py").write_text(SOURCE)
    (tmp_path / "small").mkdir()
    (tmp_path / "full.sh").write_text(FULL)
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "full.sh"]
    if shutil.which("unshare") is None or not os.path.exists("/proc/self/ns/user"):
        pytest.skip("there are no namespaces here")
    done = subprocess.run(
        enter + command([]), cwd=tmp_path, capture_output=True, text=True, **surroundings()
    )
    if done.returncode == 77 or done.stderr.startswith("unshare: "):
        pytest.skip("nothing may be mounted here")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith("enqueuer: ")
    assert "the disk is full" in done.stderr
    assert "Segmentation" not in done.stderr


def test_after_ctrl_c_the_same_command_goes_on(run, tmp_path):
    arguments = ["pack", "mydata:slow", "out.h5", "--shards", "3", "--quiet", "--seed", "7"]
    process = subprocess.Popen(
        command(arguments), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, **surroundings(),
    )  # fmt: skip
    assert process.stdout.readline() == "reached\n"
    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert "the same command resumes" in printed
    assert "Traceback" not in printed
    assert (tmp_path / "out.h5.parts" / "shard-00000.h5").exists()
    (tmp_path / "mydata.py").write_text(SOURCE.replace("time.sleep(100)", "pass"))
    assert run(*arguments).returncode == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert np.array_equal(file["data"], np.zeros(6))
