"""The command line: `enqueuer demo`, `pack`, `inspect` and `report`, or `python -m enqueuer demo`.

Parses and prints; the work is done elsewhere. Results go to standard output, progress and errors
to standard error. Exit codes: 0 done, 1 failed, 2 wrong arguments, 130 interrupted by Ctrl-C,
143 asked to end by SIGTERM.
"""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from enqueuer import __version__, commands, demo
from enqueuer.report.command import add_report

_FAILED = 1
_INTERRUPTED = 128 + signal.SIGINT  # as shells tell it
_TERMINATED = 128 + signal.SIGTERM


class _Terminated(KeyboardInterrupt):
    """SIGTERM came; whatever lets Ctrl-C through lets this through, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: The arguments without the program's name; by default those of the process.

    Raises:
        SystemExit: From argparse, after `--help`, `--version` or wrong arguments.
    """
    options = _parser().parse_args(argv)
    try:
        with _sigterm_unwinds():
            code: int = options.run(options)
            return code
    except _Terminated:
        print("\nenqueuer: terminated", file=sys.stderr)
        return _TERMINATED
    except KeyboardInterrupt:
        print("\nenqueuer: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enqueuer",
        description="Run any Python generator ahead of the loop that consumes it.",
    )
    parser.add_argument("--version", action="version", version=f"enqueuer {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(subparsers)
    commands.add_pack(subparsers, _positive, _not_negative)
    commands.add_inspect(subparsers)
    add_report(subparsers)
    return parser


def _add_demo(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    default = demo.Settings()
    command = subparsers.add_parser(
        "demo",
        help="train on images that workers read and augment, and compare with doing it serially",
        description=(
            "Train a small network on scikit-learn's handwritten digits, which workers read from "
            "image files and augment; then do the same without the enqueuer, and compare. "
            "In both, numpy multiplies matrices on one thread. "
            "Downloads nothing and leaves nothing behind. Needs: pip install 'enqueuer[demo]'"
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument(
        "--workers",
        type=_positive,
        default=default.workers,
        metavar="N",
        help="threads or processes that make batches",
    )
    command.add_argument(
        "--epochs",
        type=_positive,
        default=default.epochs,
        metavar="N",
        help="times through the training images",
    )
    command.add_argument(
        "--batch-size",
        type=_positive,
        default=default.batch_size,
        metavar="N",
        help="images in a batch",
    )
    command.add_argument(
        "--backend",
        choices=("thread", "process"),
        default=default.backend,
        help="what a worker is",
    )
    command.add_argument(
        "--seed",
        type=_not_negative,
        default=default.seed,
        metavar="N",
        help="of everything random: the same seed and number of workers give the same result",
    )
    command.set_defaults(run=_demo)


def _positive(text: str) -> int:
    return _integer(text, minimum=1)


def _not_negative(text: str) -> int:
    return _integer(text, minimum=0)


def _integer(text: str, minimum: int) -> int:
    """Read an integer for argparse, which puts the option's name before the error."""
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {minimum}, got {text!r}")
    return number


def _demo(options: argparse.Namespace) -> int:
    """Run the demo; print what it measured, or what it lacks."""
    try:
        demo.check_extras()
    except ModuleNotFoundError as error:
        print(f"enqueuer: {error}", file=sys.stderr)
        return _FAILED
    settings = demo.Settings(
        workers=options.workers,
        epochs=options.epochs,
        batch_size=options.batch_size,
        backend=options.backend,
        seed=options.seed,
    )
    report = demo.run(settings)
    print("\n".join(_lines(settings, report)))
    return 0 if report.same_weights else _FAILED


def _lines(settings: demo.Settings, report: demo.Report) -> Iterator[str]:
    """Put a report into words and numbers, a line each."""
    workers = _counted(settings.workers, settings.backend)
    yield (
        f"{_counted(report.train_images, 'image')}, {_counted(settings.epochs, 'epoch')}, "
        f"{_counted(report.steps, 'step')}; "
        f"accuracy on {report.held_out_images} held-out images: {report.accuracy:.3f}"
    )
    yield _timing_line(f"with the enqueuer ({workers})", report.enqueued)
    yield _timing_line("without it", report.serial)
    yield f"{report.ratio:.2f} times as fast with the enqueuer"
    if report.same_weights:
        yield "both trainings ended with the same weights, bit for bit"
    else:
        yield "the two trainings ended with DIFFERENT weights, which should not happen"


def _counted(number: int, word: str) -> str:
    if number == 1:
        return f"1 {word}"
    return f"{number} {word}{'es' if word.endswith('s') else 's'}"


def _timing_line(title: str, timing: demo.Timing) -> str:
    return (
        f"{title + ':':<36}{timing.total:6.2f} s, "
        f"of which {timing.training:.2f} s in training steps"
    )


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM raise _Terminated, so that `with` blocks remove temporary files and workers."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; whoever called from another sees to it
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated
