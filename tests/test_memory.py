import math
import sys

import pytest
import torch

from tracer import memory
from tracer.memory import free_bytes

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Files of a machine with 8 GiB free and no limits; returns a function that writes more of them."""
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    return write


def test_what_the_machine_has_free(machine):
    assert free_bytes(CPU) == 8 * GIB


def test_a_container_may_use_less(machine):
    """Pages of files that it has read count as used, but can be dropped."""
    machine("proc/self/cgroup", "0::/box/inner\n")
    machine("cgroup/box/memory.max", f"{4 * GIB}\n")
    machine("cgroup/box/memory.stat", f"anon {GIB}\nfile {2 * GIB}\nkernel {GIB // 2}\n")
    machine("cgroup/box/inner/memory.max", "max\n")
    assert free_bytes(CPU) == 2.5 * GIB
    machine("cgroup/box/inner/memory.max", f"{3 * GIB}\n")
    machine("cgroup/box/inner/memory.stat", f"anon {GIB}\n")
    assert free_bytes(CPU) == 2 * GIB
    machine("cgroup/box/inner/memory.stat", f"anon {5 * GIB}\n")
    assert free_bytes(CPU) == 0


def test_an_old_control_group_says_nothing(machine):
    machine("proc/self/cgroup", "4:memory:/box\n1:cpu:/\n")
    assert free_bytes(CPU) == 8 * GIB


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
def test_the_limit_of_a_process(machine, monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 * GIB, resource.RLIM_INFINITY))
    machine("proc/self/status", f"Name:\tpython\nVmData:\t{1 << 20} kB\n")
    assert free_bytes(CPU) == 2 * GIB


def test_elsewhere_physical_memory_or_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    assert free_bytes(CPU) > 0
    assert free_bytes(torch.device("meta")) == math.inf
