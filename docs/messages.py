"""Collect the messages of all errors and warnings from the sources: run this file to print them.

As an extension of Sphinx, it gives pages the directive `messages`, which lists those of classes.

A message is the text of a call such as `ValueError(f"...")` or `warnings.warn("...", Category)`.
A text in a variable or a constant is looked up. `...` stands for what is filled in.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import enqueuer

PACKAGE = Path(enqueuer.__file__).parent
# These are raised to users, beside those of `enqueuer.errors`.
BUILT_IN = ("TypeError", "ValueError", "RuntimeError", "FileNotFoundError", "FileExistsError")
# The tools raise errors of the command line, which `enqueuer --help` explains.
_SKIPPED = ("cli", "demo")
_SHORTEST = 12  # characters of a message beside what is filled in


def messages() -> dict[str, dict[str, str]]:
    """Return the messages of each class, and the file that has each."""
    classes = {*BUILT_IN, *_classes()}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(_SKIPPED):
            continue
        module = ast.parse(path.read_text(encoding="utf-8"))
        constants = _assigned(module.body)
        for function in [module, *(n for n in ast.walk(module) if isinstance(n, ast.FunctionDef))]:
            known = constants | _assigned(ast.walk(function))
            for call in _calls(function):
                kind, argument = _kind_and_text(call)
                text = _tidy(_text(argument, known)) if kind in classes else ""
                if len(text.replace("...", "").strip()) >= _SHORTEST:
                    found[kind].setdefault(text, name)
    return {kind: dict(sorted(found[kind].items())) for kind in sorted(found)}


def _tidy(text: str) -> str:
    """Return a text as one line, with one `...` for each part that is filled in."""
    return re.sub(r"\.{4,}", "...", " ".join(text.split()))


def _classes() -> set[str]:
    module = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    return {node.name for node in module.body if isinstance(node, ast.ClassDef)}


def _assigned(nodes) -> dict[str, ast.expr]:
    """Return the values of plain names."""
    return {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _calls(function: ast.AST):
    """Yield the calls in a function, without those in the functions inside it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.FunctionDef):
            yield from _calls(node)


def _kind_and_text(call: ast.Call) -> tuple[str, ast.expr | None]:
    """Return the class and the text of a call; no class if it makes neither error nor warning."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if name == "warn" and len(call.args) > 1:
        return ast.unparse(call.args[1]).rpartition(".")[2], call.args[0]
    return (name, call.args[0]) if call.args else ("", None)


def _text(node: ast.expr | None, known: dict[str, ast.expr], depth: int = 0) -> str:
    """Return the text of an expression, with `...` for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, known, depth) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, known, depth) + _text(right, known, depth)
        case ast.Name(id=name) if name in known and depth < 3:
            return _text(known[name], known, depth + 1)
        case ast.FormattedValue(value=ast.Name(id=name)) if name.isupper() and depth < 3:
            return _text(known.get(name), known, depth + 1)
    return "..."


# Texts that the package composes from parts when they are shown.
COMPOSED = {
    "WorkerDied": (
        "worker ... was killed by ...; what it had sent was delivered. ...",
        "worker ... ended with exit code ... and said nothing; what it had sent was delivered. ...",
        "worker ... ended with an unknown exit code (other code of this program collected it); ...",
        "worker ... (thread) ended by ... outside the generator; what it had sent was delivered.",
        "worker ... (Ray actor, ...) died; the items that had arrived were delivered. Ray says: "
        "...",
        "worker ... (Ray actor) could not be started. ... Check actor_options, ...",
        "max_restarts=... is used up; ... workers died at this very item.",
        "... A replacement could not be started: ...",
        "DataLoader worker (pid(s) ...) exited unexpectedly: ...",
    ),
    "BatchTimeout": (
        "DataLoader timed out after ... seconds: ...",
        "no batch came for ... s: the loop waits for ..., of epoch ...",
    ),
    "ElementTimeout": (
        "an element took longer than element_timeout=... s, so its worker was killed: ...",
        "item ... of shard ... took longer than element_timeout=... s, so its worker was killed: "
        "...",
    ),
    "StallWarning": (
        "no batch came for ... s: the loop waits for ..., of epoch ...",
        "worker ... cannot send its stack: it is starting, or its code has reset the signal for "
        "that",
        "worker ... did not send its stack within ... s: it is stopped, has the signal blocked, or "
        "hangs in the system",
        "worker ... has not started yet: Ray searches for a node, or it imports modules",
        "worker ... has not started: no node has ...",
    ),
}


def setup(app):
    """Add the directive. The tests import this file where docutils is not installed."""
    from sphinx.util.docutils import SphinxDirective

    class Messages(SphinxDirective):
        """List the messages of the classes that are its arguments."""

        has_content = False
        required_arguments, optional_arguments = 1, 20

        def run(self):
            found = messages()
            content = []
            for kind in self.arguments:
                texts = [*COMPOSED.get(kind, ()), *found.get(kind, ())]
                heading = f"Messages of `{kind}`:" if texts else ""
                shown = (text.replace("`", "'") for text in texts)
                content += ["", heading, "", *(f"- ``{text}``" for text in shown)]
            for path in PACKAGE.rglob("*.py"):
                self.env.note_dependency(path)
            return self.parse_text_to_nodes("\n".join(content))

    app.add_directive("messages", Messages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    for _kind, _texts in messages().items():
        print(f"{_kind}:", *(f"  {file}: {text}" for text, file in _texts.items()), sep="\n")
