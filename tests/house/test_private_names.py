"""Private names stay in their module: `_name` is used where it is defined, or nowhere.

This holds for `other._name` and for `self._name`, which a base class of another module may define.

Tests keep this rule, too. A test may replace a constant in capitals, such as a limit of a wait.

Modules that still break a rule are listed, and the lists only shrink: a listed module that keeps
the rule fails, so that it is removed from its list.
"""

import ast
import functools
from pathlib import Path

from reading_cost import nodes, sources

TESTS = Path(__file__).parents[1]

# Modules that use private names of other modules' objects.
INTRUDERS: set[str] = set()
# Names of named tuples and of sparse tensors, which some class here happens to have, too.
FOREIGN = {"_indices", "_replace", "_values"}
# Modules that replace a method on an instance, which no type checker sees.
REPLACERS = set()


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def nodes_of_tests():
    """Yield (path, nodes of the syntax tree) for each module of the tests."""
    for path in TESTS.rglob("*.py"):
        yield path.relative_to(TESTS).as_posix(), list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def defined_in(path):
    return names_defined_by(nodes(path))


def names_defined_by(nodes):
    """Return the private names that a module defines: functions, classes, variables, attributes."""
    found = set()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


@functools.cache
def defined_anywhere():
    return frozenset().union(*map(defined_in, sources()))


def is_own(node):
    """Return whether an attribute is asked of `self`, `cls` or `super()`."""
    of = node.value.func if isinstance(node.value, ast.Call) else node.value
    return isinstance(of, ast.Name) and of.id in ("self", "cls", "super")


def intrusions(path):
    """Yield the private names that a module takes from others of the package.

    Names that no module of the package defines are those of other packages.
    """
    taken = defined_anywhere() - defined_in(path) - FOREIGN
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and node.attr in taken:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("enqueuer"):
            yield from (f"{path}: {alias.name}" for alias in node.names if is_private(alias.name))


def intrusions_of_tests(path, nodes):
    """Yield the private names of the package that a module of the tests takes or replaces."""
    taken = {name for name in defined_anywhere() if not name.isupper()}
    taken -= names_defined_by(nodes) | FOREIGN
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in taken and not is_own(node):
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("enqueuer"):
            yield from (f"{path}: {alias.name}" for alias in node.names if alias.name in taken)
        elif isinstance(node, ast.Call) and name_of(node.func).endswith("setattr"):
            for text in node.args:
                if isinstance(text, ast.Constant) and str(text.value).split(".")[-1] in taken:
                    yield f"{path}:{node.lineno}: {text.value}"


def name_of(function):
    """Return the last name of a function that is called, as in `monkeypatch.setattr`."""
    return getattr(function, "attr", getattr(function, "id", ""))


def replacements(path):
    """Yield the lines at which a module writes to `vars(...)`."""
    for node in nodes(path):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            of = node.value
            if isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "vars":
                yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_private_names_stay_in_their_module():
    found = {path: list(intrusions(path)) for path in sources()}
    assert [line for path, lines in found.items() if path not in INTRUDERS for line in lines] == []
    assert {path for path in INTRUDERS if not found.get(path)} == set()


def test_tests_use_public_names():
    assert [line for file in nodes_of_tests() for line in intrusions_of_tests(*file)] == []


def test_no_method_is_replaced_on_an_instance():
    found = {path: list(replacements(path)) for path in sources()}
    assert [line for path, lines in found.items() if path not in REPLACERS for line in lines] == []
    assert {path for path in REPLACERS if not found.get(path)} == set()
