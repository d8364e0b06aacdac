"""The rules that a loader must keep: written before the first run, and the same for all loaders."""

from __future__ import annotations

import re
from dataclasses import dataclass

from faults import COUNT, STRIKES_AT, Fault

# Longer than the timer of any loader, as the machine may be busy.
_PROMPT_S = 10.0
_SAYS_PICKLING = re.compile("pickl|serializ", re.IGNORECASE)
_SAYS_DEATH = re.compile("worker|process|exit|kill|signal|died|terminated", re.IGNORECASE)


@dataclass(frozen=True)
class Seen:
    """Observations of a consumer about its loader.

    Attributes:
        items: The indices of the items that arrived, in the order in which they did.
        end: How its loop ended: by an "error", by its "end", not at all: "hang"; or it is "gone"
            itself.
        original: Whether the error has the class of the worker's exception.
        attributes: Whether its arguments and attributes are the same, too.
        frames: Where the worker's frames are: "real" in its traceback, in its "text", or "none".
        text: Its class, message and notes, and those of its causes and contexts.
        seconds: From the last item, or from the beginning, to the error or end.
    """

    items: tuple[int, ...]
    end: str
    original: bool = False
    attributes: bool = False
    frames: str = "none"
    text: str = ""
    seconds: float = 0.0


def remarks(fault: Fault, seen: Seen) -> list[str]:
    """Return the violations of the rules in the observations of a consumer.

    The rules are the same for all loaders:

    - The items that were made before the fault arrive, once and in order; else `lost item`.
      Nothing arrives that comes after it; else `went on`.
    - Then there is an error. The loop neither waits until the limit (`hang`) nor ends as if that
      were all (`silent end`), and the consumer is not ended by it (`consumer gone`). The error
      comes within 10 s, which is longer than the polling interval of any loader; else `slow`.
    - The error says what happened; else `unclear`. What that takes is up to the fault.

    The faults' own rules:

    - `itself`, an ordinary exception: the error has the class of the original (else `type lost`,
      and `unclear` if the name of that class is nowhere), its arguments and attributes (else
      `attributes lost`), and the worker's frames are in its traceback, where a debugger finds them
      (else `frames as text`, or `no frames`).
    - `named`, an exception that pickle cannot store: the name of its class is in the error's text.
      It need not be the original.
    - `pickling`, an item that pickle cannot store: the error's text speaks of pickling or
      serializing. Nothing is wrong if all items arrive, that one as well.
    - `death` of the worker process: the text speaks of a worker or a process, or of how it ended.
    - `exit`, by SystemExit: either of these, the name or the death.

    The text is the class, message and notes of the error, and of all that a traceback would print
    with it. A loader may choose its own class and words.
    """
    if fault.rule == "pickling" and seen.items == tuple(range(COUNT)) and seen.end == "end":
        return []
    found = _about_items(seen.items)
    if seen.end != "error":
        return [*found, {"end": "silent end", "hang": "hang", "gone": "consumer gone"}[seen.end]]
    if seen.seconds > _PROMPT_S:
        found.append("slow")
    return found + (_about_itself(fault, seen) if fault.rule == "itself" else _unclear(fault, seen))


def _about_items(items: tuple[int, ...]) -> list[str]:
    before = tuple(range(STRIKES_AT))
    found = []
    if items[:STRIKES_AT] != before:
        found.append("lost item")
    if set(items) - set(before):
        found.append("went on")
    return found


def _about_itself(fault: Fault, seen: Seen) -> list[str]:
    if not seen.original:
        found = ["type lost", *_unclear(fault, seen)]
    else:
        found = [] if seen.attributes else ["attributes lost"]
    return found + {"real": [], "text": ["frames as text"], "none": ["no frames"]}[seen.frames]


def _unclear(fault: Fault, seen: Seen) -> list[str]:
    named = seen.original or (bool(fault.original) and fault.original in seen.text)
    clear = {
        "itself": named,
        "named": named,
        "pickling": bool(_SAYS_PICKLING.search(seen.text)),
        "death": bool(_SAYS_DEATH.search(seen.text)),
        "exit": named or bool(_SAYS_DEATH.search(seen.text)),
    }
    return [] if clear[fault.rule] else ["unclear"]
