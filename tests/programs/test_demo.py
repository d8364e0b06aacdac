"""The command line as a user meets it: `python -m enqueuer`, in a process of its own."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import terminal, wait_until

from enqueuer import cli, demo
from enqueuer.common.extras import install_command

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0  # seconds; a small demo takes about 5 on two cores

needs_extras = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in ("sklearn", "PIL", "tqdm")),
    reason="needs enqueuer[demo]",
)
needs_signals = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")


class Program:
    """Starts `python -m enqueuer` with temporary files of its own, and never leaves it running."""

    def __init__(self, folder: Path) -> None:
        self.temporary = folder / "temporary"
        self.stubs = folder / "stubs"
        self.temporary.mkdir()
        self.stubs.mkdir()
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, stderr: Any = subprocess.PIPE) -> "subprocess.Popen[str]":
        path = os.pathsep.join([str(self.stubs), str(ROOT), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, "-m", "enqueuer", *arguments],
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(self.temporary)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,  # so that a signal can reach it and its workers, not us
        )
        self._processes.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Return its exit code and what it wrote to standard output and standard error."""
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=LIMIT)
        return process.returncode, output, errors

    def lack(self, module: str, missing: str) -> None:
        """Make `import module` fail as if `missing` were not installed, whatever is installed."""
        for other in ("sklearn", "PIL", "tqdm"):
            (self.stubs / f"{other}.py").touch()
        (self.stubs / f"{module}.py").write_text(
            f"raise ModuleNotFoundError('No module named {missing}', name={missing!r})\n"
        )

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.end()


def left_in(folder: Path) -> Sequence[str]:
    return sorted(entry.name for entry in folder.iterdir())


def group_members(process: "subprocess.Popen[str]") -> set[int]:
    """Return which processes of the program's session still run."""
    psutil = pytest.importorskip("psutil")
    members = set()
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == process.pid and psutil.Process(pid).status() != "zombie":
                members.add(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


@needs_extras
@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_demo_reports_accuracy_and_times(program: Program, backend: str) -> None:
    code, output, errors = program.run(
        "demo", "--epochs", "2", "--workers", "2", "--batch-size", "32", "--backend", backend
    )
    assert code == 0, errors
    accuracy = re.search(r"accuracy on 360 held-out images: (\d\.\d+)", output)
    assert accuracy and float(accuracy[1]) > 0.8
    assert re.search(r"with 2 \w+: +\d+\.\d+ s", output)
    assert re.search(r"without workers: +\d+\.\d+ s", output)
    assert re.search(r"\d+\.\d+ times as fast", output)
    assert "same weights, bit for bit" in output
    assert errors == ""  # no bar on a pipe
    assert left_in(program.temporary) == []


@needs_extras
@pytest.mark.thorough
@pytest.mark.parametrize(("load", "is_noted"), [(99.0, True), (0.5, False)])
def test_demo_says_that_the_machine_was_busy(program: Program, load: float, is_noted: bool) -> None:
    stub = f"import os; os.getloadavg = lambda: ({load}, 0.0, 0.0)"
    (program.stubs / "sitecustomize.py").write_text(stub)
    code, output, errors = program.run("demo", "--epochs", "1", "--backend", "thread")
    assert code == 0, errors
    assert ("run it again on an idle machine" in output) == is_noted


@needs_extras
@pytest.mark.thorough
def test_demo_with_default_settings_learns(program: Program) -> None:
    code, output, errors = program.run("demo")
    assert code == 0, errors
    accuracy = re.search(r"held-out images: (\d\.\d+)", output)
    assert accuracy and float(accuracy[1]) >= 0.94


@needs_extras
@pytest.mark.thorough
def test_demo_of_a_seed_is_the_same_training_with_any_workers(program: Program) -> None:
    def result(seed: str, workers: int) -> str:
        options = ["--epochs", "1", "--workers", str(workers), "--backend", "thread"]
        code, output, errors = program.run("demo", *options, "--seed", seed)
        assert code == 0, errors
        assert "1 epoch," in output and f"{workers} thread" in output
        return output.splitlines()[0]

    first, again, another = result("1", 1), result("1", 2), result("2", 1)
    assert first == again != another


@needs_extras
@needs_signals
@pytest.mark.thorough
@pytest.mark.parametrize("to_group", [True, False], ids=["group", "parent"])
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_demo_leaves_nothing(
    program: Program, number: signal.Signals, exit_code: int, to_group: bool
) -> None:
    with terminal() as screen:
        process = program.start("demo", "--epochs", "500", stderr=screen)
        screen.wait_for(r"[1-9]\d*/\d+ \[")
        assert left_in(program.temporary) != []
        if to_group:
            os.killpg(process.pid, number)  # a terminal sends Ctrl-C to the workers, too
        else:
            process.send_signal(number)
        output, _ = process.communicate(timeout=LIMIT / 2)  # before pytest's own limit
    assert process.returncode == exit_code, screen.text()
    assert "Traceback" not in screen.text()
    assert output == ""
    assert left_in(program.temporary) == []
    # multiprocessing's resource tracker sees the end of the program, and then ends
    wait_until(lambda: group_members(process) == set())


@pytest.mark.thorough
@needs_extras
def test_interrupt_of_a_training_step_ends_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.neural_network import MLPClassifier

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MLPClassifier, "_backprop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.run(1, 1, 64, "thread", 7)


@pytest.mark.parametrize(
    ("module", "package"), [("sklearn", "scikit-learn"), ("PIL", "Pillow"), ("tqdm", "tqdm")]
)
def test_missing_extra_names_the_cure(program: Program, module: str, package: str) -> None:
    program.lack(module, missing=module)
    code, output, errors = program.run("demo")
    assert (code, output) == (1, "")
    assert errors.startswith(f"enqueuer: the demo needs {package} >= ")
    assert errors.endswith(f", or {install_command('demo')}\n")
    assert errors.count("\n") == 1


def test_broken_extra_keeps_its_own_error(program: Program) -> None:
    program.lack("sklearn", missing="scipy")
    code, output, errors = program.run("demo")
    assert (code, output) == (1, "")
    assert errors.endswith("ModuleNotFoundError: No module named scipy\n")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]], ids=" ".join)
def test_help(program: Program, arguments: Sequence[str]) -> None:
    code, output, errors = program.run(*arguments)
    assert (code, errors) == (0, "")
    assert output.startswith("usage: enqueuer")


def test_version(program: Program) -> None:
    code, output, errors = program.run("--version")
    assert (code, errors) == (0, "")
    assert re.fullmatch(r"enqueuer \d+\.\d+\S*\n", output)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["demo", "--workers", "0"], "--workers: must be a whole number >= 1, got '0'"),
        (["demo", "--epochs", "-1"], "--epochs: must be a whole number >= 1, got '-1'"),
        (["demo", "--batch-size", "many"], "--batch-size: must be a whole number >= 1, got 'many'"),
        (["demo", "--seed", "-1"], "--seed: must be a whole number >= 0, got '-1'"),
        (["demo", "--backend", "ray"], "invalid choice: 'ray'"),
        (["demo", "--nonsense"], "unrecognized arguments: --nonsense"),
        ([], "required: COMMAND"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_named(
    arguments: Sequence[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, as each interpreter takes a while to start."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    output, errors = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert complaint in errors


def test_bad_arguments_end_the_program(program: Program) -> None:
    code, output, errors = program.run("dmeo")
    assert (code, output) == (2, "")
    assert "invalid choice: 'dmeo'" in errors and "Traceback" not in errors
