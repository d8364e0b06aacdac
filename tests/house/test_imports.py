"""The architecture as a test: imports point down the list, and everything has one place."""

import ast
import subprocess
import sys
from pathlib import Path

import enqueuer

PACKAGE = Path(enqueuer.__file__).parent

# From the top down; what shares a line does not import each other.
ORDER = [
    ["__main__"],
    ["cli"],
    ["bench_cli", "report.command"],
    ["commands", "demo"],
    ["chart", "report.page"],
    ["bench", "report.reading"],
    ["report.__init__"],
    ["__init__"],
    ["adapters.cuda"],
    ["adapters.torch.__init__"],
    ["adapters.torch.datasets"],
    ["adapters.torch.local"],
    ["adapters.torch.entries", "adapters.torch.indexed", "adapters.torch.loader"],
    ["adapters.pinning", "adapters.ranks"],
    ["adapters.tensorflow"],
    ["adapters.jax"],
    ["adapters.keras"],
    ["adapters.loading"],
    ["adapters.__init__"],
    ["datasets.hdf5"],
    ["datasets.h5inspect", "datasets.h5pack", "datasets.h5source"],
    ["datasets.h5resume"],
    ["datasets.h5reader", "datasets.h5rows"],
    ["datasets.h5layout"],
    ["datasets.h5files"],
    ["datasets.files"],
    ["datasets.loaders"],
    ["datasets.lists"],
    ["datasets.__init__"],
    ["enqueuers"],
    ["base"],
    ["reach"],
    ["failures", "stats_callbacks"],
    ["arguments", "asynchronous", "replaying", "state"],
    ["backends.process_tasks", "backends.ray_tasks", "backends.thread_tasks"],
    ["backends.processes", "backends.ray", "backends.threads"],
    ["backends.payload", "backends.ray_session", "backends.reorder_buffer", "backends.watched"],
    ["backends.bootstrap"],
    ["arrays"],
    ["backends.launching", "backends.ray_worker", "backends.stacks"],
    ["tracing"],
    ["backends.__init__"],
    ["worker"],
    ["tasks"],
    ["sources"],
    ["stalls"],
    ["merging"],
    ["trace", "transport.item_sender", "transport.item_receiver"],
    ["transport.channel", "transport.ring", "transport.task_queue"],
    ["transport.codec"],
    ["transport.tensors", "transport.tracebacks", "transport.blocks", "transport.packets"],
    ["transport.__init__"],
    ["buffer", "exports", "logs", "progress"],
    ["autoscaler"],
    ["stats"],
    ["meters", "native_threads", "shards", "usage", "bottleneck"],
    [
        "allocator",
        "duplicates",
        "finalizers",
        "formats",
        "frameworks",
        "gil",
        "import_hook",
        "interrupts",
        "messages",
        "sizes",
    ],
    ["errors"],
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

THIRD_PARTIES = {
    "numpy": {
        "adapters.torch.loader",
        "adapters.tensorflow",
        "adapters.jax",
        "datasets.h5files",
        "datasets.h5inspect",
        "datasets.h5layout",
        "datasets.h5reader",
        "datasets.h5resume",
        "datasets.h5rows",
        "datasets.h5source",
        "datasets.files",
        "datasets.loaders",
        "shards",
        "tasks",
        "transport.blocks",
        "transport.codec",
        "transport.tensors",
        "transport.item_sender",
        "arrays",
        "backends.ray_worker",
        "demo",
        "duplicates",
        "report.reading",
    },
    "cloudpickle": {
        "transport.codec",
        "transport.item_receiver",
        "transport.task_queue",
        "backends.payload",
    },
    "ray": {"backends.ray_worker"},
    "tblib": {"transport.codec"},
    "PIL": {"demo", "datasets.loaders"},
    "sklearn": {"demo"},
    "threadpoolctl": {"demo", "native_threads"},
    "tqdm": {"demo"},
}


def modules():
    """Yield (name, syntax tree) for each module of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name, ast.parse(path.read_text())


def imported(tree):
    """Yield the full names that a module imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def ours(name):
    """Return the module of the package that a full name lies in."""
    parts = name.split(".")[1:]
    for end in range(len(parts), 0, -1):
        for module in (".".join(parts[:end]), ".".join([*parts[:end], "__init__"])):
            if module in RANK:
                return module
    return "__init__"


def test_every_module_is_in_the_list():
    assert sorted(name for name, _ in modules()) == sorted(RANK)


def test_imports_point_down():
    climbs = [
        f"{here} imports {there}"
        for here, tree in modules()
        for there in {ours(name) for name in imported(tree) if name.split(".")[0] == "enqueuer"}
        if there != here and RANK[there] <= RANK[here]
    ]
    assert climbs == []


def test_third_parties_are_imported_where_they_belong():
    found = {}
    for here, tree in modules():
        for root in {name.split(".")[0] for name in imported(tree)}:
            if root not in sys.stdlib_module_names and root not in ("enqueuer", "__future__"):
                found.setdefault(root, set()).add(here)
    assert {root: here - THIRD_PARTIES.get(root, set()) for root, here in found.items()} == {
        root: set() for root in found
    }


def test_importing_the_package_imports_no_framework_and_no_extra():
    heavy = "torch tensorflow keras jax ray h5py sklearn PIL tqdm multiprocessing_logging"
    program = f"import sys, enqueuer; print([m for m in {heavy!r}.split() if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
