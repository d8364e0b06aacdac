"""Measure some rows of one case for one contestant, in this process, and write a line for each.

Called by run.py: measure.py CASE CONTESTANT SECONDS OUTPUT ROW...
"""

from __future__ import annotations

import json
import sys

from cases import CASES
from contestants import CONTESTANTS
from measures import Missing


def main(case_name: str, contestant_name: str, seconds: str, output: str, *rows: str) -> None:
    """Write a JSON object a line to `output`, each as soon as it is known."""
    case, contestant = CASES[case_name], CONTESTANTS[contestant_name]
    with open(output, "w", buffering=1) as file:
        for row in rows:
            try:
                result = {"value": case.measure(contestant, case.rows[row], float(seconds))}
            except Missing as why:
                result = {"status": "missing", "why": str(why)}
            file.write(json.dumps({"row": row, **result}) + "\n")


if __name__ == "__main__":  # started processes import this file
    main(*sys.argv[1:])
