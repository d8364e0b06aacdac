"""Run the programs whose output the pages show, and write the new output into the pages.

    python docs/outputs.py            on an idle machine; then read the differences

A page marks such an output by a comment, with the arguments of the program:

    .. output: examples/is_it_waiting.py 1

    .. code-block:: text

       the output
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The comment, the directive, and the lines that are indented.
MARKED = re.compile(r"(\.\. output: (.+)\n\n\.\. code-block:: text\n\n)((?:   .*\n|\n(?=   ))+)")


def output_of(command: str) -> str:
    """Return what a program of this repository prints, as the body of a code block."""
    done = subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return "".join(f"   {line}".rstrip() + "\n" for line in done.stdout.splitlines())


def main() -> None:
    """Renew all outputs."""
    for page in sorted((ROOT / "docs").rglob("*.rst")):
        text = page.read_text("utf-8")
        new = MARKED.sub(lambda found: found[1] + output_of(found[2]), text)
        if new != text:
            page.write_text(new, "utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
