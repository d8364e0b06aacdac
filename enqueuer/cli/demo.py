"""The command `enqueuer demo`: a small training, with the enqueuer and without it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator

from enqueuer.cli.arguments import FAILED, Commands, add_backend, add_number, add_seed
from enqueuer.common.text import pluralize
from enqueuer.monitoring import usage
from enqueuer.tools import demo


def add_demo(commands: Commands) -> None:
    """Add `demo` and its options."""
    default = demo.Settings()
    command = commands.add_parser(
        "demo",
        help="train on images that workers read and augment, and compare with a plain loop",
        description=(
            "Train a small network on scikit-learn's handwritten digits, which workers read from "
            "image files and augment; then do the same without the enqueuer, and compare. "
            "In both, numpy multiplies matrices on one thread. "
            "Downloads nothing and leaves nothing behind. "
            "Needs, in the clone: pip install '.[demo]'"
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    numbers = {
        "--workers": (default.workers, "number of threads or processes that make batches"),
        "--epochs": (default.epochs, "number of passes through the training images"),
        "--batch-size": (default.batch_size, "number of images in a batch"),
    }
    for option, (number, text) in numbers.items():
        add_number(command, option, help=text, default=number)
    add_backend(command, default=default.backend)
    add_seed(
        command,
        help="seed of everything random: the same seed and number of workers give the same result",
        default=default.seed,
    )
    command.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    """Run the demo; print the measurements, or the package that is missing."""
    try:
        demo.check_extras()
    except ModuleNotFoundError as error:
        print(f"enqueuer: {error}", file=sys.stderr)
        return FAILED
    names = (field.name for field in dataclasses.fields(demo.Settings))
    settings = demo.Settings(**{name: getattr(options, name) for name in names})
    load, cpus = os.getloadavg()[0], usage.cpus()
    report = demo.run(settings)
    print("\n".join(_lines(settings, report)))
    if load > cpus:
        print(
            f"NOTE: other programs used the {cpus:g} CPUs, with a load of {load:.0f} at first, "
            "so the times mean little: run it again on an idle machine"
        )
    return 0 if report.same_weights else FAILED


def _lines(settings: demo.Settings, report: demo.DemoResult) -> Iterator[str]:
    """Put a report into words and numbers, a line each."""
    workers = pluralize(settings.workers, settings.backend)
    yield (
        f"{pluralize(report.train_images, 'image')}, {pluralize(settings.epochs, 'epoch')}, "
        f"{pluralize(report.steps, 'step')}; "
        f"accuracy on {report.held_out_images} held-out images: {report.accuracy:.3f}"
    )
    yield _timing_line(f"with the enqueuer ({workers})", report.enqueued)
    yield _timing_line("without it", report.serial)
    yield f"{report.ratio:.2f} times as fast with the enqueuer"
    if report.same_weights:
        yield "both trainings ended with the same weights, bit for bit"
    else:
        yield "the two trainings ended with DIFFERENT weights, which should not happen"


def _timing_line(title: str, timing: demo.Timing) -> str:
    return (
        f"{title + ':':<36}{timing.total:6.2f} s, "
        f"of which {timing.training:.2f} s in training steps"
    )
