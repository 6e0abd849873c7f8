"""What this machine can do at most: matrix products per second, memory read per second, and the CPU flags behind them.

    python -m benchmarks.limits [--threads N]

Each figure is the best of nine rounds: a limit is what the machine reaches when nothing is in its way. A step cannot
be faster than its products at the first figure and its bytes at the second; other benchmarks print their own figures
as a share of these.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import llvmlite.binding
import numba
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from packhorse.machine import usable_cpus
from packhorse.runner.crew import Crew

PRODUCT_ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512vnni", "avxvnni", "avx512bf16", "neon", "dotprod", "i8mm", "sve")
MEGABYTE = 2**20


def round_seconds(call: Callable[[], object], rounds: int = 9, least: float = 0.02) -> list[float]:
    """Seconds of one call in each of several rounds, each at least `least` seconds long, after one to warm up."""
    call()
    start = time.perf_counter()
    call()
    times = max(1, round(least / max(1e-7, time.perf_counter() - start)))
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(times):
            call()
        taken.append((time.perf_counter() - start) / times)
    return taken


def product_gflops(threads: int, depth: int = 576, width: int = 1536, weights: int = 24) -> Iterator[tuple[int, float]]:
    """(M, GFLOP/s) of float32[M, depth] x float32[depth, width] in onnxruntime.

    Several weights in a row, 85 MB of them, so that they come from memory as a model's do and not from a cache.
    """
    model = _product_chain(depth, width, weights)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    for rows in PRODUCT_ROWS:
        x = np.random.default_rng(0).standard_normal((rows, depth), np.float32)
        seconds = min(round_seconds(lambda x=x: session.run(None, {"x": x})))
        yield rows, 2e-9 * rows * depth * width * weights / seconds


def _product_chain(depth: int, width: int, weights: int) -> bytes:
    """x -> W0 -> W1 -> …, there and back between depth and width."""
    rng = np.random.default_rng(0)
    sizes = [depth if i % 2 == 0 else width for i in range(weights + 1)]
    nodes, constants = [], []
    for i, (rows, columns) in enumerate(pairwise(sizes)):
        array = rng.standard_normal((rows, columns), np.float32) / np.float32(rows) ** 0.5
        constants.append(helper.make_tensor(f"w{i}", TensorProto.FLOAT, array.shape, array.tobytes(), raw=True))
        nodes.append(helper.make_node("MatMul", [f"x{i}" if i else "x", f"w{i}"], [f"x{i + 1}"]))
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, ["M", sizes[0]])]
    outputs = [value(f"x{weights}", TensorProto.FLOAT, ["M", sizes[-1]])]
    graph = helper.make_graph(nodes, "products", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(model.SerializeToString())


@numba.njit(nogil=True, fastmath=True)
def _sum(array: np.ndarray) -> np.float32:
    total = np.float32(0.0)
    for i in range(array.size):  # by index: over the values themselves numba makes no vectors
        total += array[i]
    return total


def read_gigabytes_per_second(threads: int, megabytes: int = 512) -> float:
    """Memory read by all threads together, each through its own part of one large array."""
    array = np.ones(megabytes * MEGABYTE // 4, np.float32)
    parts = np.array_split(array, threads)
    crew = Crew(threads)
    _sum(parts[0][:16])
    seconds = min(round_seconds(lambda: crew.run(lambda member: _sum(parts[member]))))
    crew.close()
    return 1e-9 * array.nbytes / seconds


def cpu_flags() -> list[str]:
    """Those of the CPU's vector instructions that the products and kernels gain from."""
    features = llvmlite.binding.get_host_cpu_features()
    return [flag for flag in FLAGS if features.get(flag)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=usable_cpus())
    threads = parser.parse_args().threads
    print(f"cpu      {llvmlite.binding.get_host_cpu_name()}, {threads} threads, {' '.join(cpu_flags())}")
    for count in sorted({1, threads}):
        print(f"read     {read_gigabytes_per_second(count):6.1f} GB/s with {count} threads")
    for rows, gflops in product_gflops(threads):
        print(f"product  {gflops:6.0f} GFLOP/s fp32 at M = {rows}")


if __name__ == "__main__":
    main()
