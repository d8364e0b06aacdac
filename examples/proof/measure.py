"""Measure a published program before and after the change: measure.py NAME CLONE [REPEATS].

    python examples/proof/measure.py imagenet ~/examples

CLONE is your own clone of its repository. Both versions run alternately, three times, on data that
is made here; then a worker of each is killed.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
# Seconds that a run may take; a run whose worker was killed hangs if it takes as long.
LIMIT = 90.0
# Seconds that workers have to end after their program.
GRACE = 5.0
# The last line of a traceback, before its notes.
IS_ERROR = re.compile(r"[A-Za-z_.]+: ")


class Program(NamedTuple):
    """A program, and how it is run here.

    Attributes:
        path: Its file in the clone; None: `train.py` in our folder, which imports the clone.
        arguments: Its arguments.
        steps: Number of steps of a run.
        restarts: Whether it is also run with `max_restarts=1`.
        environment: Variables of its environment, as `NAME=value`.
        resume: Arguments for a run that saves after half of the steps, and for one that resumes
            there.
    """

    path: str | None
    arguments: str
    steps: int
    restarts: bool = True
    environment: tuple[str, ...] = ()
    resume: tuple[str, str] = ("", "")


PROGRAMS = {
    "imagenet": Program(
        "imagenet/main.py",
        "--dummy --no-accel --seed 7 -a shufflenet_v2_x0_5 -b 4 -j 2",
        steps=16,
    ),
    "unet": Program(
        "train.py",
        "--epochs 4 --batch-size 1 --scale 0.5",
        steps=10,
        environment=("WANDB_MODE=disabled",),
    ),
    "east": Program(None, "2", steps=40, restarts=False),
    "ctpn": Program(None, "2", steps=40, restarts=False),
    "nnunet": Program(
        "nnunetv2/run/run_training.py",
        "1 2d 0 -device cpu",
        steps=10,
        restarts=False,
        environment=(
            "nnUNet_raw=raw",
            "nnUNet_preprocessed=preprocessed",
            "nnUNet_results=results",
            "nnUNet_n_proc_DA=2",
        ),
    ),
    "forecasting": Program(None, "", steps=100),
    "nanovlm": Program(None, "samples", steps=20, restarts=False, environment=("HF_HOME=.",)),
    "nanochat": Program(
        "scripts/base_train.py",
        "--device-type=cpu --depth=1 --aspect-ratio=32 --head-dim=32 --window-pattern=L"
        " --max-seq-len=256 --device-batch-size=8 --total-batch-size=2048 --num-iterations=500"
        " --eval-every=-1 --core-metric-every=-1 --sample-every=-1",
        steps=40,
        restarts=False,
        resume=("--save-every=20", "--resume-from-step=20"),
        environment=("NANOCHAT_BASE_DIR=.", "TORCHDYNAMO_DISABLE=1"),
    ),
}


def run(name, clone, version, kill_at=0, restarts=0, more=""):
    """Run the program once; return its report, how it ended, and what it left.

    Args:
        version: `"before"`, or `"after"` the change.
        kill_at: Step after which a worker is killed; 0: none is. The run is then longer, as the
            batches that are ready may come first.
        restarts: Number of dead workers that are replaced.
        more: Further arguments of the program.
    """
    program = PROGRAMS[name]
    steps = program.steps * 2 if kill_at and not restarts else program.steps
    path = Path(clone, program.path) if program.path else HERE / name / "train.py"
    with tempfile.TemporaryDirectory() as folder:
        errors, report = Path(folder, "errors.txt"), Path(folder, "report.json")
        numbers = [str(number) for number in (steps, kill_at, restarts)]
        with errors.open("w") as file:
            start = time.perf_counter()
            process = subprocess.Popen(
                [
                    *(sys.executable, HERE / "meter.py", report, name, version, *numbers),
                    *(path, *program.arguments.split(), *more.split()),
                ],
                env=environment_of(program, clone) | {"TMPDIR": folder},
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT)
        result = json.loads(report.read_text()) if report.exists() else {"losses": []}
        result["seconds"] = time.perf_counter() - start
        if process.returncode is None:
            result["end"] = f"hangs: no end after {LIMIT:.0f} s"
        elif process.returncode:
            lines = errors.read_text().splitlines()
            result["end"] = [line for line in lines if IS_ERROR.match(line)][-1]
        else:
            result["end"] = "ends"
        # What torch compiles is kept on purpose.
        kept = {"errors.txt", "report.json"}
        files = [
            path
            for path in Path(folder).iterdir()
            if path.name not in kept and not path.name.startswith("torchinductor")
        ]
        result["left"] = f"left: {end_all(process)} processes, {len(files)} temporary files"
    return result


def environment_of(program, clone):
    """Return the environment of a run. One core is for the training, one for the workers."""
    own = dict(variable.split("=") for variable in program.environment)
    return {**os.environ, "PYTHONPATH": clone, "OMP_NUM_THREADS": "1", **own}


def end_all(process):
    """Kill what is left of the session of a process; return how many others were left."""
    deadline = time.monotonic() + GRACE
    while (left := members(process.pid) - {process.pid}) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left | {process.pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return len(left)


def members(session):
    """Return the processes of a session."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) == session:
                found.add(int(path.name))
    return found


def main(name, clone, repeats=3):
    """Measure in a folder of its own, and print the figures."""
    clone = str(Path(clone).resolve())
    data = HERE / name / "make_data.py"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if data.exists():
            environment = environment_of(PROGRAMS[name], clone)
            command = [sys.executable, data, clone]
            subprocess.run(command, env=environment, check=True, capture_output=True)
        expected = measure_times(name, clone, int(repeats))
        measure_deaths(name, clone, expected)
        if PROGRAMS[name].resume[0]:
            measure_resume(name, clone)


def measure_times(name, clone, repeats):
    """Print the times of both versions; return the results of their first runs."""
    runs = {"before": [], "after": []}
    for _ in range(repeats):
        for version, results in runs.items():
            results.append(run(name, clone, version))
            if results[-1]["end"] != "ends":
                sys.exit(f"{version}: {results[-1]['end']}")
    print(f"{name}: load {os.getloadavg()[0]:.1f}; medians of {repeats} runs")
    medians = {
        version: [
            statistics.median(result[figure] for result in results)
            for figure in ("step", "waiting", "seconds")
        ]
        for version, results in runs.items()
    }
    for version, (step, waiting, seconds) in medians.items():
        print(
            f"{version}: {1000 * step:.1f} ms a step, {1000 * waiting:.1f} ms of it waiting; "
            f"{seconds:.1f} s in all; {max(result['left'] for result in runs[version])}"
        )
    expected = {version: results[0]["losses"] for version, results in runs.items()}
    for version, results in runs.items():
        are_equal = all(result["losses"] == expected[version] for result in results)
        print(f"{version}: the {len(expected[version])} results of all runs are equal: {are_equal}")
    print(f"before and after are equal to the bit: {expected['before'] == expected['after']}")
    return expected


def measure_deaths(name, clone, expected):
    """Print what happens when a worker is killed."""
    half = PROGRAMS[name].steps // 2
    print(f"a worker is killed after step {half}:")
    for version, restarts in (("before", 0), ("after", 0), ("after", 1)):
        if restarts and not PROGRAMS[name].restarts:
            continue
        killed = run(name, clone, version, half, restarts)
        print(
            f"{version}{', max_restarts=1' if restarts else ''}: "
            f"{len(killed['losses'])} steps, {killed['seconds']:.1f} s, {killed['end']}; "
            f"results equal so far: {agree(killed['losses'], expected[version])}; "
            f"{killed['left']}"
        )


def measure_resume(name, clone):
    """Print whether a resumed run goes on as if it had not been stopped."""
    save, resume = PROGRAMS[name].resume
    half = PROGRAMS[name].steps // 2
    for version in ("before", "after"):
        whole = run(name, clone, version, more=save)["losses"][half:]
        resumed = run(name, clone, version, more=resume)["losses"]
        print(f"{version}: resumed after step {half}, results equal: {agree(resumed, whole)}")


def agree(losses, expected):
    """Return whether two runs have the same results, as far as both went."""
    return bool(losses) and all(a == b for a, b in zip(losses, expected, strict=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
