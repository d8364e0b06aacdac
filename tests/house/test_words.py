"""One word for one thing, and the field's word where it has one."""

import functools
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(path for folder in ("enqueuer", "docs", "examples") for path in (ROOT / folder).rglob("*")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
# Words that were used for what the second one names.
INSTEAD = {
    r"roads?": "channel",
    r"shel(f|ves|ved)": "reorder buffer",
    r"ticket ?office": "task queue",
    r"tuners?": "autoscaler",
    r"verdicts?": "bottleneck",
    r"worker_?end|consumer_?end": "item sender, item receiver",
    r"greet(s|ed)?|hello|bye": "ready, end frame",
    r"obituary|epitaph|mourned|see_off": "death message, reap",
    r"came_home|tell_home": "release",
    r"sights?": "snapshot",
    r"surroundings": "parent environment",
    r"(go|goes|sent) home": "exit",
    r"bell": "notifier",
    r"whoever|somebody|someone|anybody": "the worker, the loop, the caller, you",
    r"for ever": "forever",
    r"patience": "wait limit",
    r"at_rest": "saved position",
    r"size_at_sight": "estimate_nbytes",
    r"retire(s|d)?": "exit, end",
    r"nobody|whom": "no worker, no caller",
    r"in[_ ]hand": "made, current",
    r"redo|redone": "rerun",
    r"bury|buried": "reap",
    r"likewise": "in the same way",
    r"mend(s|ed|ing)?": "fix",
    r"dearer|dearest|dear": "expensive",
    r"hand(s|ed|ing)?[ _](over|out)": "pass, assign",
    r"deal(s|t|ing)?[ _]out|dealt": "divide, distribute",
}
# The same for pages alone.
INSTEAD_IN_PAGES = {
    r"tell(s|ing)?|told": "log, send, report, record, show",
}


def pattern_of(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![^\W_])({words})(?![^\W_])", re.IGNORECASE)


@functools.cache
def lines_with_any() -> list[tuple[Path, int, str]]:
    """Return (path, number, line) of each line with any of the words, found in one search."""
    any_word = pattern_of("|".join([*INSTEAD, *INSTEAD_IN_PAGES]))
    return [
        (path.relative_to(ROOT), at, line)
        for path in PAGES
        if path.suffix in (".py", ".rst", ".md")
        for at, line in enumerate(path.read_text().splitlines(), 1)
        if any_word.search(line)
    ]


def lines_with(words: str, suffixes: tuple[str, ...]) -> list[str]:
    word = pattern_of(words)
    return [
        f"{path}:{at}: {line}"
        for path, at, line in lines_with_any()
        if path.suffix in suffixes and word.search(line)
    ]


@pytest.mark.parametrize("banned", [*INSTEAD, *INSTEAD_IN_PAGES])
def test_a_word_is_not_used(banned):
    suffixes = (".py", ".rst", ".md") if banned in INSTEAD else (".rst", ".md")
    instead = (INSTEAD | INSTEAD_IN_PAGES)[banned]
    assert lines_with(banned, suffixes) == [], f"say {instead}"


def identifiers(path):
    """Return the names of a file's variables, attributes, functions and parameters."""
    with tokenize.open(path) as file:
        tokens = tokenize.generate_tokens(file.readline)
        return {token.string for token in tokens if token.type == tokenize.NAME}


@pytest.mark.parametrize(
    "room", ["order", "backends", "enqueuers", "transport", "workers", "sequences"]
)
def test_an_identifier_names_a_thing(room):
    """These can stand for anything; the theory in `order/__init__.py` has a word for each."""
    vague = {"given", "told", "hear", "kept", "left", "stuff"}
    found = [
        f"{path.name}: {name}"
        for path in (ROOT / "enqueuer" / room).rglob("*.py")
        for name in identifiers(path)
        if name.strip("_").lower() in vague or re.match(r"_?MOST(_|$)", name)
    ]
    assert found == []
