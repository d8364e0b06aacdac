"""Link each public name that a page writes as a literal to its place in the reference.

Pages and docstrings write `OrderedEnqueuer`, `Shard.split()` and `stats()` as in Markdown. A name
that could mean several objects stays a plain literal.
"""

from __future__ import annotations

from collections import defaultdict

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

# `stats()` means the method of an enqueuer; these two classes have the same methods.
ENQUEUERS = ("GeneratorEnqueuer", "OrderedEnqueuer")
# These are names of other packages as well: pages write `enqueuer.empty()` for the function.
AMBIGUOUS = ("DataLoader", "empty", "empty()", "line", "split", "pack")


def link(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Replace the literals of a page that are public names by references."""
    targets = _targets(app)
    for literal in list(doctree.findall(nodes.literal)):
        text = literal.astext()
        full = targets.get(text.removeprefix("enqueuer."))
        if full is None or text in AMBIGUOUS or _is_linked(literal):
            continue
        entry = app.env.domaindata["py"]["objects"][full]
        literal.replace_self(
            make_refnode(
                app.builder, docname, entry.docname, entry.node_id, literal.deepcopy(), full
            )
        )


def _is_linked(literal: nodes.literal) -> bool:
    """Return whether a literal is part of a link or of a heading."""
    parent = literal.parent
    while parent is not None:
        if isinstance(parent, nodes.reference | nodes.title):
            return True
        parent = parent.parent
    return False


def _targets(app: Sphinx) -> dict[str, str]:
    """Return the full name that each literal means."""
    meant: dict[str, set[str]] = defaultdict(set)
    methods: dict[str, set[str]] = defaultdict(set)
    for full, entry in app.env.domaindata["py"]["objects"].items():
        if entry.objtype == "module" or entry.aliased:
            continue
        # The part of the name after its module: "Shard", "Shard.split", "imap".
        parts = full.split(".")
        first = next((i for i, p in enumerate(parts) if p[:1].isupper()), len(parts) - 1)
        short = parts[first:]
        name = ".".join(short)
        call = f"{name}()"
        if entry.objtype in ("class", "exception"):
            meant[name].add(full)
        elif len(short) > 1:
            meant[name].add(full)
            meant[call].add(full)
            if short[0] != ENQUEUERS[1]:
                methods[f"{short[-1]}()"].add(full)
        else:
            meant[name].add(full)
            meant[call].add(full)
    for call, fulls in methods.items():
        if any(f".{ENQUEUERS[0]}." in f".{full}" for full in fulls):
            meant[call] |= fulls
    return {text: fulls.pop() for text, fulls in meant.items() if len(fulls) == 1}


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension to Sphinx."""
    app.connect("doctree-resolved", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
