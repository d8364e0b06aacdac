"""The command `enqueuer demo`: a small training, with the enqueuer and without it."""

from __future__ import annotations

import argparse
import os

from enqueuer.cli.arguments import Commands, add_backend, add_number, add_seed
from enqueuer.common.text import pluralize
from enqueuer.monitoring import usage
from enqueuer.tools import demo


def add_demo(commands: Commands) -> None:
    """Add `demo` and its options."""
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
    add_number(command, "--workers", "number of threads or processes that make batches", 2)
    add_number(command, "--epochs", "number of passes through the training images", 8)
    add_number(command, "--batch-size", "number of images in a batch", 64)
    add_backend(command, default="process")
    add_seed(
        command,
        help="seed of everything random: the same seed and number of workers give the same result",
        default=7,
    )
    command.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    """Run the demo, and print the measurements."""
    load, cpus = os.getloadavg()[0], usage.cpus()
    numbers = options.workers, options.epochs, options.batch_size
    found = demo.run(*numbers, options.backend, options.seed)
    print(
        f"{pluralize(found.images, 'image')}, {pluralize(options.epochs, 'epoch')}, "
        f"{pluralize(found.steps, 'step')}; "
        f"accuracy on {found.held_out} held-out images: {found.accuracy:.3f}"
    )
    workers = pluralize(options.workers, options.backend)
    times = {f"with the enqueuer ({workers}):": found.enqueued, "without it:": found.serial}
    for title, time in times.items():
        print(f"{title:<36}{time.total:6.2f} s, of which {time.training:.2f} s in training steps")
    print(f"{found.serial.total / found.enqueued.total:.2f} times as fast with the enqueuer")
    print("both trainings ended with the same weights, bit for bit")
    if load > cpus:
        print(
            f"NOTE: other programs used the {cpus:g} CPUs, with a load of {load:.0f} at first, "
            "so the times mean little: run it again on an idle machine"
        )
    return 0
