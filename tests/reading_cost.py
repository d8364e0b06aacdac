"""What the code of the package costs to read: lines, files, long functions, forwarding methods.

python tests/reading_cost.py          prints the figures, and what they are made of
"""

import ast
import collections
import functools
import importlib.util
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "enqueuer"
if not PACKAGE.exists():  # the sources are out of reach where a wheel is tested
    PACKAGE = Path(importlib.util.find_spec("enqueuer").origin).parent
# Tokens that are no code.
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def sources():
    """Return the text of each module, by its path in the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in paths}


@functools.cache
def nodes(path):
    """Return all nodes of the syntax tree of a module; the tests of `house/` share them."""
    return tuple(ast.walk(ast.parse(sources()[path])))


def docstring(node):
    """Return the statement that is the docstring of a module, a class or a function."""
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return first if isinstance(first.value.value, str) else None
    return None


def lines_of(node):
    return range(node.lineno, node.end_lineno + 1)


@functools.cache
def code_of(path):
    """Return the numbers of lines and of tokens of code: no docstrings, comments, blank lines."""
    used, left_out, tokens = set(), set(), 0
    for node in nodes(path):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and docstring(node):
            left_out.update(lines_of(docstring(node)))
    for token in tokenize.generate_tokens(io.StringIO(sources()[path]).readline):
        if token.type not in LAYOUT and token.start[0] not in left_out:
            used.update(range(token.start[0], token.end[0] + 1))
            tokens += 1
    return len(used), tokens


def code_lines(path):
    return code_of(path)[0]


def total_lines():
    return sum(map(code_lines, sources()))


def total_tokens():
    return sum(code_of(path)[1] for path in sources())


def long_functions(most):
    """Return (lines without the docstring, file, name) of each function with more lines."""
    found = []
    for path in sources():
        for node in nodes(path):
            if isinstance(node, FUNCTIONS):
                text = docstring(node)
                lines = len(lines_of(node)) - (len(lines_of(text)) if text else 0)
                if lines > most:
                    found.append((lines, path, node.name))
    return sorted(found, reverse=True)


def importers():
    """Return, for each file, the other files of the package that import it."""
    modules = {path[:-3].replace("/", ".").removesuffix(".__init__"): path for path in sources()}
    found = {path: set() for path in sources()}
    for path in sources():
        for node in nodes(path):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                target = modules.get(name.removeprefix("enqueuer."))
                if target not in (None, path):
                    found[target].add(path)
    return found


def small_files(least):
    """Return the files with fewer lines that exactly one other file imports."""
    return {
        path
        for path, by in importers().items()
        if len(by) == 1 and not path.endswith("__init__.py") and sources()[path].count("\n") < least
    }


def doubled_classes():
    """Return the names that several classes have."""
    names = collections.Counter(
        node.name for path in sources() for node in nodes(path) if isinstance(node, ast.ClassDef)
    )
    return {name for name, count in names.items() if count > 1}


def is_forwarding(function):
    """Return whether a method only calls, or returns, a member of another object of its own."""
    body = [node for node in function.body if node is not docstring(function)]
    if function.name.startswith("__") or len(body) != 1:
        return False
    value = getattr(body[0], "value", None)
    called = value.func if isinstance(value, ast.Call) else value
    match called:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"))):
            own = {argument.arg for argument in function.args.args}
            given = []
            if isinstance(value, ast.Call):
                given = [*value.args, *(keyword.value for keyword in value.keywords)]
            return all(isinstance(one, ast.Name) and one.id in own for one in given)
    return False


def forwarding_methods():
    """Return (file, class, method) of each method that only forwards."""
    return [
        (path, node.name, function.name)
        for path in sources()
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        for function in node.body
        if isinstance(function, FUNCTIONS) and is_forwarding(function)
    ]


if __name__ == "__main__":
    lines, tokens = total_lines(), total_tokens()
    print(f"{lines:6,} lines and {tokens:,} tokens of code in {len(sources())} files")
    print("functions above 40 lines:", *long_functions(40), sep="\n    ")
    print("files below 60 lines with one importer:", *sorted(small_files(60)), sep="\n    ")
    print("names of several classes:", *sorted(doubled_classes()), sep="\n    ")
    print("methods that only forward:", *forwarding_methods(), sep="\n    ")
