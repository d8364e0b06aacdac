"""A worker keeps the memory that its batches free, unless the environment says otherwise."""

import dataclasses
import resource

import pytest

from enqueuer import GeneratorEnqueuer, Processes, Ray
from enqueuer.workers import native

# By itself glibc keeps about twice the largest block that was freed, so three are too many. The
# heap of a thread, which an actor of Ray's works in, has at most 64 MiB.
BLOCK = 16 << 20
# Page faults; fresh memory takes more, even with pages of 2 MiB.
FRESH = 20

if native.mallopt is None:
    pytest.skip("needs glibc", allow_module_level=True)


def page_faults(shard):
    """Yield how many page faults it takes to fill memory, time after time."""
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [bytearray(BLOCK) for _ in range(3)]
        del blocks
        yield resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (*native.MALLOC_VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


def test_the_memory_of_the_last_batch_is_used_again(process):
    with GeneratorEnqueuer(page_faults, **process) as enqueuer:
        assert min(enqueuer) < FRESH


# A process of Ray's has a heap that others used before, which may be large enough.
@pytest.mark.local
def test_an_option_leaves_the_allocator_alone(process):
    backend = dataclasses.replace(process["backend"], keep_freed_memory=False)
    with GeneratorEnqueuer(page_faults, **process | {"backend": backend}) as enqueuer:
        assert min(enqueuer) >= FRESH


@pytest.mark.parametrize("options", [Processes, Ray])
def test_the_option_is_true_or_false(options):
    with pytest.raises(TypeError, match="keep_freed_memory"):
        options(keep_freed_memory=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("MALLOC_TRIM_THRESHOLD_", "131072", marks=pytest.mark.thorough),
        pytest.param("MALLOC_MMAP_THRESHOLD_", "131072", marks=pytest.mark.thorough),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072"),
    ],
)
def test_the_environment_comes_first(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with GeneratorEnqueuer(page_faults, backend=Processes(start_method="spawn")) as enqueuer:
        assert min(enqueuer) >= FRESH
