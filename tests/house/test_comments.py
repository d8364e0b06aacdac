"""A comment is a sentence above the code; only units and labels share its line."""

import tokenize
from pathlib import Path

import enqueuer

PACKAGE = Path(enqueuer.__file__).parent
# Share of the comments that share a line with code. It only shrinks.
MOST_TRAILING = 0.01
# Comments that linters and type checkers read, which must share the line.
MARKS = ("# type:", "# noqa", "# pragma")


def comments(path):
    """Yield for each comment of a file its place, and whether it shares a line with code."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and not token.string.startswith(MARKS):
                trails = bool(token.line[: token.start[1]].strip())
                yield f"{path.relative_to(PACKAGE)}:{token.start[0]}: {token.string}", trails


def test_few_comments_share_a_line_with_code():
    found = [comment for path in sorted(PACKAGE.rglob("*.py")) for comment in comments(path)]
    trailing = [place for place, trails in found if trails]
    share = len(trailing) / len(found)
    assert share <= MOST_TRAILING, "\n".join(trailing)
