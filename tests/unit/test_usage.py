"""What the system says, read from files as the kernel writes them."""

import os
import sys
import threading

import pytest

from enqueuer.monitoring import usage

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {40 * GIB // 1024} kB\nHugePages: 0\n"


class Machine:
    """A tree of files in the place of /proc and /sys/fs/cgroup."""

    def __init__(self, folder):
        self.folder = folder
        self.write("proc/meminfo", MEMINFO)

    def write(self, path, text):
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(str(text))

    def group(self, path, most, now, cached=0):
        """Make a control group of version 2."""
        self.write(f"cgroup/{path}/memory.max", most)
        self.write(f"cgroup/{path}/memory.current", now)
        self.write(f"cgroup/{path}/memory.stat", f"anon 7\nactive_file 0\ninactive_file {cached}\n")

    def old_group(self, path, most, now, cached=0):
        """Make a control group of version 1."""
        self.write(f"cgroup/memory/{path}/memory.limit_in_bytes", most)
        self.write(f"cgroup/memory/{path}/memory.usage_in_bytes", now)
        self.write(f"cgroup/memory/{path}/memory.stat", f"total_active_file {cached}\n")

    def cpus(self):
        return usage.cpus(str(self.folder / "proc"), str(self.folder / "cgroup"))

    def available_bytes(self):
        return usage.available_bytes(str(self.folder / "proc"), str(self.folder / "cgroup"))


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


MEMORY = {
    # The group of the process; others, with their limit, use and cache; what is free: in GiB.
    "without groups, all of the machine": (None, [], 40),
    "a group without a limit": ("/user.slice/mine", [("user.slice/mine", "max", 3)], 40),
    "the narrowest group": ("/pod/container", [("pod/container", 20, 1), ("pod", 10, 4)], 6),
    "files in the cache are free": ("/", [("", 10, 9, 5)], 6),
    "a container, whose path is that on the host": ("/kubepods/pod", [("", 8, 9)], 0),
}


@pytest.mark.parametrize(("own", "groups", "free"), MEMORY.values(), ids=MEMORY)
def test_memory_is_what_the_machine_and_all_groups_allow(machine, own, groups, free):
    if own is not None:
        machine.write("proc/self/cgroup", f"0::{own}\n")
    for path, most, *sizes in groups:
        most = most if most == "max" else most * GIB
        machine.group(path, most, *(size * GIB for size in sizes))
    assert machine.available_bytes() == free * GIB


def test_groups_of_version_1_count_likewise(machine):
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/docker/abc\n0::/\n")
    machine.old_group("docker/abc", 4 * GIB, 2 * GIB, cached=1 * GIB)
    machine.old_group("", 1 << 62, 30 * GIB)
    assert machine.available_bytes() == 3 * GIB


def test_where_the_system_does_not_tell_nothing_is_known(tmp_path):
    assert usage.available_bytes(str(tmp_path), str(tmp_path)) is None


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="of Linux")
def test_of_this_process_it_is_known():
    assert 1_000_000 < usage.unshared_bytes(os.getpid()) <= usage.of_process(os.getpid()).rss_bytes
    assert usage.available_bytes() > 0


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="of Linux")
def test_the_waits_of_a_thread_are_counted():
    counts = []

    def wait():
        counts.append(usage.of_thread(threading.current_thread()).switches)
        for _ in range(20):
            threading.Event().wait(0.001)
        counts.append(usage.of_thread(threading.current_thread()).switches)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert counts[1] - counts[0] >= 20


def test_of_a_process_that_has_ended_nothing_is_known():
    assert usage.unshared_bytes(2**22 + 1) is None


def test_without_an_answer_there_is_a_gil(monkeypatch):
    monkeypatch.delattr(sys, "_is_gil_enabled", raising=False)
    assert usage.has_gil()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not usage.has_gil()


def test_a_cpu_limit_of_a_group_around_it_counts(machine):
    """As of a service, and of a container that sees the groups of its machine."""
    machine.write("proc/self/cgroup", "0::/pod/container\n")
    machine.write("cgroup/pod/cpu.max", "50000 100000\n")
    machine.write("cgroup/pod/container/cpu.max", "max 100000\n")
    assert machine.cpus() == 0.5


def test_a_cpu_limit_of_version_1_counts(machine):
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/x\n0::/\n")
    machine.write("cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    machine.write("cgroup/cpu/cpu.cfs_period_us", "100000\n")
    machine.write("cgroup/cpu/docker/abc/cpu.cfs_quota_us", "25000\n")
    machine.write("cgroup/cpu/docker/abc/cpu.cfs_period_us", "100000\n")
    assert machine.cpus() == 0.25


def test_without_a_limit_all_cpus_count(machine):
    machine.write("proc/self/cgroup", "0::/\n")
    assert machine.cpus() == usage.cpus() >= 1
