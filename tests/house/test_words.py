"""One word for one thing, and the field's word where it has one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(path for folder in ("enqueuer", "docs", "examples") for path in (ROOT / folder).rglob("*")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
# Words that were used for what the second one names.
INSTEAD = {
    r"roads?": "ring, channel",
    r"shel(f|ves|ved)": "reorder buffer",
    r"ticket ?office": "task queue",
    r"tuners?": "autoscaler",
    r"verdicts?": "bottleneck",
    r"worker_?end|consumer_?end": "item sender, item receiver",
    r"fall_asleep": "arm_wake_up",
    r"greet(s|ed)?|hello|bye": "ready, end frame",
    r"obituary|epitaph|mourned|see_off": "death message, reap",
    r"came_home|tell_home": "release",
    r"sights?": "snapshot",
    r"surroundings": "parent environment",
    r"(go|goes|sent) home": "exit",
    r"bell": "notifier",
}


@pytest.mark.parametrize("banned", INSTEAD)
def test_a_word_is_not_used(banned):
    word = re.compile(rf"(?<![^\W_])({banned})(?![^\W_])", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{at}: {line}"
        for path in PAGES
        if path.suffix in (".py", ".rst", ".md")
        for at, line in enumerate(path.read_text().splitlines(), 1)
        if word.search(line)
    ]
    assert not found, f"say {INSTEAD[banned]}"
