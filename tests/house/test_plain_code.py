"""Code is correct because a lock or `interrupts.held()` says so, not because C runs it."""

import ast
import re

import pytest
from reading_cost import nodes, sources

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
