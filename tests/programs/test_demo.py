"""The command line as a user meets it: `python -m enqueuer`, in a process of its own."""

import importlib.util
import os
import re
import signal

import pytest
from helpers import Program, terminal

from enqueuer import cli, demo
from enqueuer.common.extras import install_command

LIMIT = 120.0  # seconds; a small demo takes about 5 on two cores

needs_extras = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in ("sklearn", "PIL", "tqdm")),
    reason="needs enqueuer[demo]",
)
COMMAND = """
import os, runpy, sys
{before}
sys.argv[1:] = {arguments}
runpy.run_module("enqueuer", run_name="__main__")
"""


def command(*arguments, before=""):
    """Return a program that is the command line with some arguments."""
    return COMMAND.format(arguments=arguments, before=before)


def run(folder, *arguments, before=""):
    with Program(folder, command(*arguments, before=before)) as program:
        result = program.wait(LIMIT)
        program.check_nothing_left()
    return result


def lack(folder, module, missing):
    """Make `import module` fail as if `missing` were not installed, whatever is installed."""
    for other in ("sklearn", "PIL", "tqdm"):
        (folder / f"{other}.py").touch()
    (folder / f"{module}.py").write_text(
        f"raise ModuleNotFoundError('No module named {missing}', name={missing!r})\n"
    )


@needs_extras
@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_demo_reports_accuracy_and_times(tmp_path, backend):
    options = ("--epochs", "2", "--workers", "2", "--batch-size", "32", "--backend", backend)
    code, output, errors = run(tmp_path, "demo", *options)
    assert code == 0, errors
    accuracy = re.search(r"accuracy on 360 held-out images: (\d\.\d+)", output)
    assert accuracy and float(accuracy[1]) > 0.8
    assert re.search(r"with 2 \w+: +\d+\.\d+ s", output)
    assert re.search(r"without workers: +\d+\.\d+ s", output)
    assert "same weights, bit for bit" in output
    assert errors == ""  # no bar on a pipe


@needs_extras
@pytest.mark.thorough
@pytest.mark.parametrize(("load", "is_noted"), [(99.0, True), (0.5, False)])
def test_demo_says_that_the_machine_was_busy(tmp_path, load, is_noted):
    before = f"os.getloadavg = lambda: ({load}, 0.0, 0.0)"
    options = ("--epochs", "1", "--backend", "thread")
    code, output, errors = run(tmp_path, "demo", *options, before=before)
    assert code == 0, errors
    assert ("run it again on an idle machine" in output) == is_noted
    # A number that means little is not shown.
    assert bool(re.search(r"\d+\.\d+ times as fast", output)) != is_noted


@needs_extras
@pytest.mark.thorough
def test_demo_with_default_settings_learns(tmp_path):
    code, output, errors = run(tmp_path, "demo")
    assert code == 0, errors
    accuracy = re.search(r"held-out images: (\d\.\d+)", output)
    assert accuracy and float(accuracy[1]) >= 0.94


@needs_extras
@pytest.mark.thorough
def test_demo_of_a_seed_is_the_same_training_with_any_workers(tmp_path):
    def result(seed, workers):
        options = ["--epochs", "1", "--workers", str(workers), "--backend", "thread"]
        code, output, errors = run(tmp_path, "demo", *options, "--seed", seed)
        assert code == 0, errors
        assert "1 epoch," in output and f"{workers} thread" in output
        return output.splitlines()[0]

    first, again, another = result("1", 1), result("1", 2), result("2", 1)
    assert first == again != another


@needs_extras
@pytest.mark.thorough
@pytest.mark.parametrize("to_group", [True, False], ids=["group", "parent"])
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_demo_leaves_nothing(tmp_path, number, exit_code, to_group):
    with terminal() as screen:
        before = f"os.dup2(os.open({os.ttyname(screen.fileno())!r}, os.O_RDWR | os.O_NOCTTY), 2)"
        endless = command("demo", "--epochs", "500", "--workers", "1", before=before)
        with Program(tmp_path, endless) as program:
            screen.wait_for(r"[1-9]\d*/\d+ \[")
            assert os.listdir(program.temporary) != []
            # A terminal sends Ctrl-C to the workers, too.
            (os.killpg if to_group else os.kill)(program.process.pid, number)
            code, output, _ = program.wait(60)
            program.check_nothing_left()
    assert (code, output) == (exit_code, ""), screen.text()
    assert "Traceback" not in screen.text()


@pytest.mark.thorough
@needs_extras
def test_interrupt_of_a_training_step_ends_the_demo(monkeypatch):
    from sklearn.neural_network import MLPClassifier

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(MLPClassifier, "_backprop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.run(1, 1, 64, "thread", 7)


@pytest.mark.parametrize(
    ("module", "package"), [("sklearn", "scikit-learn"), ("PIL", "Pillow"), ("tqdm", "tqdm")]
)
def test_missing_extra_names_the_cure(tmp_path, module, package):
    lack(tmp_path, module, missing=module)
    code, output, errors = run(tmp_path, "demo")
    assert (code, output) == (1, "")
    assert errors.startswith(f"enqueuer: the demo needs {package} >= ")
    assert errors.endswith(f", or {install_command('demo')}\n")
    assert errors.count("\n") == 1


def test_broken_extra_keeps_its_own_error(tmp_path):
    lack(tmp_path, "sklearn", missing="scipy")
    code, output, errors = run(tmp_path, "demo")
    assert (code, output) == (1, "")
    assert errors.endswith("ModuleNotFoundError: No module named scipy\n")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]], ids=" ".join)
def test_help(tmp_path, arguments):
    code, output, errors = run(tmp_path, *arguments)
    assert (code, errors) == (0, "")
    assert output.startswith("usage: enqueuer")


def test_version(tmp_path):
    code, output, errors = run(tmp_path, "--version")
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
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_named(arguments, complaint, capsys):
    """In this process, as each interpreter takes a while to start."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    output, errors = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert complaint in errors


def test_no_command_shows_the_help(capsys):
    assert cli.main([]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert "show the datasets of an HDF5 file" in errors and "--version" in errors


def test_bad_arguments_end_the_program(tmp_path):
    code, output, errors = run(tmp_path, "dmeo")
    assert (code, output) == (2, "")
    assert "invalid choice: 'dmeo'" in errors and "Traceback" not in errors
