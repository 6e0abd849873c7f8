"""Importing Packhorse costs next to nothing."""

from __future__ import annotations

import subprocess
import sys

MEASURE = """
import sys, time
begin = time.perf_counter()
import packhorse
seconds = time.perf_counter() - begin
heavy = {"torch", "transformers", "numba", "onnxruntime", "numpy", "pydantic"} & set(sys.modules)
print(seconds, *sorted(heavy))
"""


def test_import_takes_less_than_half_a_second_and_loads_nothing_heavy() -> None:
    finished = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    seconds, *heavy = finished.stdout.split()
    assert heavy == []
    assert float(seconds) < 0.5


def test_the_public_names_are_there() -> None:
    import packhorse

    for name in packhorse.__all__:
        assert getattr(packhorse, name) is not None
    assert set(packhorse.__all__) <= set(dir(packhorse))
