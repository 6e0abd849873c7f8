from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from packhorse.machine import available_memory, usable_cpus

GIB = 1 << 30


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight processors, and 10 GiB that the system would give."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10 * GIB))


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "200000\n"}, 2),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "0\n"}, 8),
    ],
    ids=str,
)
def test_processors_are_the_affinity_cut_to_the_quota(tmp_path: Path, files: dict[str, str], cpus: int) -> None:
    assert usable_cpus(write(tmp_path, files)) == cpus


def test_affinity_counts_and_not_the_processors_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5}, raising=False)
    assert usable_cpus(tmp_path) == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cpus(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cpus(tmp_path) == 1


UNLIMITED_V1 = str(0x7FFFFFFFFFFFF000)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 10 * GIB),
        ({"memory.max": "max\n", "memory.current": str(GIB)}, 10 * GIB),
        ({"memory.max": str(4 * GIB), "memory.current": str(GIB)}, 3 * GIB),
        ({"memory.max": str(64 * GIB), "memory.current": str(GIB)}, 10 * GIB),
        ({"memory.max": str(GIB), "memory.current": str(2 * GIB)}, 0),
        ({"memory.max": str(4 * GIB)}, 10 * GIB),
        (
            {"memory/memory.limit_in_bytes": str(2 * GIB), "memory/memory.usage_in_bytes": str(GIB // 2)},
            3 * GIB // 2,
        ),
        ({"memory/memory.limit_in_bytes": UNLIMITED_V1, "memory/memory.usage_in_bytes": str(GIB)}, 10 * GIB),
    ],
    ids=str,
)
def test_memory_is_what_the_system_has_cut_to_what_the_limit_leaves(
    tmp_path: Path, files: dict[str, str], free: int
) -> None:
    assert available_memory(write(tmp_path, files)) == free


def test_cached_files_are_not_counted_as_used(tmp_path: Path) -> None:
    """Having read a large model once must not shrink the cache of the next run: the kernel gives that memory back."""
    v2 = {"memory.max": str(4 * GIB), "memory.current": str(4 * GIB), "memory.stat": f"anon 7\ninactive_file {GIB}\n"}
    assert available_memory(write(tmp_path / "v2", v2)) == GIB
    v1 = {
        "memory/memory.limit_in_bytes": str(4 * GIB),
        "memory/memory.usage_in_bytes": str(3 * GIB),
        "memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
    }
    assert available_memory(write(tmp_path / "v1", v1)) == 2 * GIB


def test_this_machine_can_be_asked() -> None:
    assert usable_cpus() >= 1
    assert available_memory() > 0
