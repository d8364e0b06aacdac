"""Draw the pictures of the tutorial "Is my training waiting for data?" anew: run this file.

They are those of `enqueuer report`, for the runs of examples/is_it_waiting.py.
"""

import re
import runpy
import tempfile
from pathlib import Path

import enqueuer.cli.main

HERE = Path(__file__).parent
EXAMPLE = runpy.run_path(str(HERE.parent / "examples" / "is_it_waiting.py"))


def main():
    with tempfile.TemporaryDirectory() as folder:
        for workers in (1, 4):
            trace = Path(folder, "run.json")
            print(EXAMPLE["run"](workers, trace=trace))
            assert enqueuer.cli.main.main(["report", str(trace)]) == 0
            page = trace.with_suffix(".html").read_text()
            style = re.search("<style>(.*?)</style>", page, re.DOTALL)[1]
            for name, picture in zip(
                ("timeline", "queue"), re.findall("<svg .*?</svg>", page, re.DOTALL), strict=False
            ):
                target = HERE / "howto" / f"waiting_{name}_{workers}.svg"
                target.write_text(alone(picture, style))


def alone(picture, style):
    """Return a picture as a file of its own."""
    tag, rest = picture.split(">", 1)
    tag = tag.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    return f'{tag} style="background: var(--back)"><style>{style}</style>{rest}\n'


if __name__ == "__main__":
    main()
