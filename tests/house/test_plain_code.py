"""Code is correct because a lock or `interrupts.held()` says so; a comment stands above it."""

import ast
import re
import tokenize
from pathlib import Path

import pytest
from reading_cost import nodes, sources

import enqueuer

PACKAGE = Path(enqueuer.__file__).parent
# Share of the comments that share a line with code. It only shrinks.
MOST_TRAILING = 0.01
# Comments that linters and type checkers read, which must share the line.
MARKS = ("# type:", "# noqa", "# pragma")
# What a file of the package does not say.
PHRASES = {
    "raised_here": "a plain `except`, within `held()`",
    "suppressed(": "a plain `except`, within `held()`",
    "one step of": "the lock, or `held()`",
    "by one step": "the lock, or `held()`",
    "in one step": "the lock, or `held()`",
    "no call and no jump": "the lock, or `held()`",
    "written in C": "what it does, such as that it is reentrant",
    "again does nothing": "Idempotent.",
    "again is harmless": "Idempotent.",
    "bytecode": "the lock, or `held()`",
}
# Functions whose results C code reads.
CHAINS = {"chain", "filter", "from_iterable", "map", "starmap"}
# `len()` is exact there; a hint is of use where the iterator is the user's.
WITHOUT_HINTS = ("backends/", "enqueuers/", "transport/", "workers/")


def name_of(node):
    return getattr(node, "attr", getattr(node, "id", ""))


def chains_with_side_effects(path):
    """Yield the lines at which C code calls functions for what they do, not for what they return.

    `deque(..., maxlen=0)` reads an iterator and keeps nothing, and setattr() returns nothing.
    """
    for node in nodes(path):
        if not isinstance(node, ast.Call):
            continue
        keeps_nothing = any(
            keyword.arg == "maxlen" and getattr(keyword.value, "value", None) == 0
            for keyword in node.keywords
        )
        is_chain = name_of(node.func) in CHAINS
        sets = is_chain and any(name_of(part) in ("setattr", "setitem") for part in node.args)
        if keeps_nothing or sets:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_file_argues_with_bytecodes(phrase):
    texts = {
        path: " ".join(re.sub(r"\n\s*#", " ", text).split()) for path, text in sources().items()
    }
    assert [path for path, text in texts.items() if phrase in text] == [], PHRASES[phrase]


def test_no_chain_is_read_for_its_side_effects():
    assert [line for path in sources() for line in chains_with_side_effects(path)] == []


def test_no_iterator_of_ours_gives_a_hint_of_its_length():
    found = [path for path, text in sources().items() if "length_hint" in text]
    assert [path for path in found if path.startswith(WITHOUT_HINTS)] == []


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
