"""Run a published training program with its loading changed: run.py NAME PROGRAM [ARGUMENTS].

    python examples/proof/run.py imagenet ~/examples/imagenet/main.py --dummy

NAME is a folder beside this file. Its `change.py` replaces one or two names of the modules that
the program imports; the program itself stays as it is.
"""

import runpy
import sys
from pathlib import Path


def begin(program, arguments):
    """Let imports and the command line be those of the program."""
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).resolve().parent)


def change(name):
    """Replace what `change.py` of a folder replaces."""
    runpy.run_path(str(Path(__file__).parent / name / "change.py"))


if __name__ == "__main__":
    _, name, program, *arguments = sys.argv
    begin(program, arguments)
    change(name)
    runpy.run_path(program, run_name="__main__")
