"""The architecture as a test: imports point down the list, and everything has one place."""

import ast
import graphlib
import subprocess
import sys

import pytest
import reading_cost

# Folders, and modules that lie beside them, from the top down: imports point down this list.
# Folders that share a line do not import each other.
RANKS = [
    ["__main__"],
    ["cli"],
    ["demo"],
    ["__init__"],
    ["adapters", "datasets"],
    ["enqueuers"],
    ["backends"],
    ["transport", "mixing", "sequences", "buffer"],
    ["workers"],
    ["exports"],
    ["monitoring", "order"],
    ["common"],
    ["errors"],
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}

THIRD_PARTIES = {
    "numpy": {
        "adapters.torch.fetching",
        "adapters.torch.position",
        "adapters.torch.loader",
        "adapters.tensorflow",
        "adapters.jax",
        "datasets.hdf5.files",
        "datasets.hdf5.pack",
        "datasets.hdf5.rows",
        "datasets.hdf5.source",
        "datasets.hdf5.writer",
        "datasets.arrays",
        "datasets.loaders",
        "workers.shards",
        "enqueuers.ordered",
        "workers.tasks",
        "workers.arrays",
        "transport.blocks",
        "transport.item_codec",
        "backends.ray.actor",
        "demo",
        "monitoring.duplicates",
        "sequences.lengths",
        "sequences.packing",
        "sequences.stages",
    },
    "cloudpickle": {"transport.definitions"},
    "ray": {"backends.ray.actor"},
    "tblib": {"transport.errors"},
    "PIL": {"demo", "datasets.loaders"},
    "sklearn": {"demo"},
    "threadpoolctl": {"demo", "workers.native"},
    "tqdm": {"demo"},
    "torch": {"adapters.torch.loader"},  # for type checkers only
    "typing_extensions": {"enqueuers.enqueuer", "enqueuers.options"},
}


# Imports inside functions, apart from third parties: costly ones that most programs never need,
# modules that are missing on some systems, and those that a first start by fork does not need.
INNER = {
    ("backends.process.child", "enqueuer"),
    ("backends.process.handle", "enqueuer"),
    ("backends.stall", "json"),
    ("cli", "enqueuer"),
    ("workers.tasks", "pathlib"),
    ("datasets.hdf5.pack", "fcntl"),
    ("enqueuers.enqueuer", "enqueuer"),
    ("common.checks", "difflib"),
    ("common.extras", "importlib"),
    ("monitoring.trace", "json"),
    ("transport.errors", "enqueuer"),
    ("transport.item_codec", "enqueuer"),
    ("transport.memory", "tempfile"),
    ("transport.receiver", "enqueuer"),
    ("transport.channel", "enqueuer"),
    ("workers.event_loop", "asyncio"),
}


def modules():
    """Yield (name, nodes of the syntax tree) for each module of the package."""
    for path in reading_cost.sources():
        yield path.removesuffix(".py").replace("/", "."), reading_cost.nodes(path)


def imported(nodes):
    """Yield the full names that a module imports, wherever in the file."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def edges():
    """Yield (importing module, imported module) for each import within the package."""
    known = dict(modules())
    for here, nodes in known.items():
        for name in imported(nodes):
            if name.split(".")[0] != "enqueuer":
                continue
            parts = name.split(".")[1:]
            ends = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            found = (m for end in ends for m in (end, f"{end}.__init__".lstrip(".")) if m in known)
            there = next(found, "__init__")
            if there != here:
                yield here, there


def folder_of(module):
    return module.split(".")[0]


def test_every_folder_has_a_rank():
    assert {folder_of(name) for name, _ in modules()} == set(RANK)


def test_imports_between_folders_point_down():
    climbs = {
        f"{here} imports {there}"
        for here, there in edges()
        if folder_of(here) != folder_of(there) and RANK[folder_of(there)] <= RANK[folder_of(here)]
    }
    assert climbs == set()


def test_what_comes_next_is_data():
    """`order/` has no threads, no locks, no clocks, no signals and no I/O."""
    pure = {"bisect", "collections", "dataclasses", "enum", "functools", "itertools"}
    pure |= {"math", "typing", "zlib"}
    in_order = {here for here, _ in modules() if folder_of(here) == "order"}
    inner = {there for here, there in edges() if here in in_order}
    assert inner - in_order == {"common.checks", "errors"}
    names = {n for here, nodes in modules() if here in in_order for n in imported(nodes)}
    assert {name.split(".")[0] for name in names} <= {*pure, "enqueuer", "__future__"}


def test_no_modules_import_each_other_in_a_circle():
    graph = {}
    for here, there in edges():
        graph.setdefault(here, set()).add(there)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_imports_stand_at_the_top_of_the_file():
    inner = {
        (here, name.split(".")[0])
        for here, nodes in modules()
        for function in nodes
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for name in imported(ast.walk(function))
    }
    extras = {(here, name) for here, name in inner if here in THIRD_PARTIES.get(name, ())}
    assert inner - extras == INNER


def test_third_parties_are_imported_where_they_belong():
    found = {}
    for here, nodes in modules():
        for root in {name.split(".")[0] for name in imported(nodes)}:
            if root not in sys.stdlib_module_names and root not in ("enqueuer", "__future__"):
                found.setdefault(root, set()).add(here)
    assert {root: here - THIRD_PARTIES.get(root, set()) for root, here in found.items()} == {
        root: set() for root in found
    }


RUN = """
with enqueuer.{kind}({source}, {options}) as batches:
    assert list(batches) == ["a", "b"]
"""
KINDS = {"GeneratorEnqueuer": "lambda: iter('ab')", "OrderedEnqueuer": "['a', 'b']"}


def imported_by(program, after="sys"):
    """Return the modules that a program imports after some others."""
    program = f"import sys, {after}\nbefore = {{*sys.modules}}\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint({{*sys.modules}} - before)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ast.literal_eval(done.stdout)


def test_importing_the_package_imports_no_framework_no_extra_and_no_backend():
    heavy = "torch tensorflow keras jax ray h5py sklearn PIL tqdm multiprocessing_logging"
    folders = ("enqueuer.enqueuers", "enqueuer.backends", "enqueuer.transport")
    found = imported_by("import enqueuer")
    assert [name for name in found if name in heavy.split() or name.startswith(folders)] == []


# Modules that a first start imports beside its pool, since many programs never need them:
# threadpoolctl for a fork in a process with native threads, the others to pickle a source for the
# fork server, and to start multiprocessing's resource tracker.
LATE = {
    "fork": {"threadpoolctl"},
    "forkserver": {
        "_uuid",
        "cloudpickle",
        "cloudpickle.cloudpickle",
        "enqueuer.backends.payload",
        "enqueuer.transport.definitions",
        "uuid",
        *("_multiprocessing", "_posixshmem", "importlib._abc", "importlib.util"),
        *("multiprocessing.resource_tracker", "multiprocessing.spawn", "runpy"),
    },
}


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_start_imports_nothing_else(kind, method):
    options = f"backend=enqueuer.Processes(start_method={method!r})"
    run = RUN.format(kind=kind, source=KINDS[kind], options=options)
    found = imported_by(run, after=f"enqueuer.backends.process.pool; enqueuer.{kind}")
    assert found <= LATE[method]


def test_a_program_with_threads_imports_nothing_for_processes():
    run = RUN.format(kind="GeneratorEnqueuer", source=KINDS["GeneratorEnqueuer"], options="")
    folders = ("enqueuer.backends.process", "enqueuer.transport")
    assert [name for name in imported_by(run, after="enqueuer") if name.startswith(folders)] == []
