"""What this process may really use: processors by affinity and cgroup quota, memory by cgroup limit."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = CGROUP) -> int:
    """Processors that this process can keep busy: the affinity mask, cut to the cgroup's CPU quota, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that can still be allocated: what the system has free, cut to what the cgroup limit leaves.

    Cached files count as used in a cgroup, but the kernel gives their memory back: what is not in active use is free.
    """
    free = int(psutil.virtual_memory().available)
    limit, used = _read_int(cgroup / "memory.max"), _read_int(cgroup / "memory.current")
    cached = _read_stat(cgroup / "memory.stat", "inactive_file")
    if limit is None:
        limit = _read_int(cgroup / "memory" / "memory.limit_in_bytes")
        used = _read_int(cgroup / "memory" / "memory.usage_in_bytes")
        cached = _read_stat(cgroup / "memory" / "memory.stat", "total_inactive_file")
    if limit is None or used is None:
        return free
    return max(0, min(free, limit - used + cached))


def _cpu_quota(cgroup: Path) -> float | None:
    """Quota in processors: cgroup v2's cpu.max ("max 100000" is none), else v1's pair of files."""
    v2 = cgroup / "cpu.max"
    if v2.is_file():
        quota, _, period = v2.read_text().strip().partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    v1_quota = _read_int(cgroup / "cpu" / "cpu.cfs_quota_us")
    v1_period = _read_int(cgroup / "cpu" / "cpu.cfs_period_us")
    if v1_quota is None or not v1_period or v1_quota < 0:
        return None
    return v1_quota / v1_period


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, name: str) -> int:
    """One number of a memory.stat file; 0 where it is not there."""
    try:
        lines = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return int(lines.get(name, 0))
    except (OSError, ValueError):
        return 0
