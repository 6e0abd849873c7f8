"""Peak memory for activations of a 2,048-token step, whole and in micro-batches, each in a process of its own.

python -m benchmarks.activations [--tokens 2048]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

from packhorse.config import EngineConfig
from packhorse.loading import pack_folder
from packhorse.memory_budget import largest_step
from packhorse.pack.manifest import load_manifest
from packhorse.runner.micro_batch import MicroBatchRunner
from packhorse.runner.onnx_runner import OnnxRunner


def peak_mebibytes(folder: Path, tokens: int, micro_batch: int) -> float:
    """How much the process grows while the step runs, beyond weights, cache and a step of one block.

    The logits of the step's rows, which are a result and not an activation, are kept few: 16.
    """
    config = EngineConfig(max_num_batched_tokens=tokens, max_num_seqs=16)
    step = largest_step(load_manifest(folder), config)
    runner = MicroBatchRunner(OnnxRunner(folder, num_blocks=step.block_table.shape[1]), micro_batch)
    small = EngineConfig(max_num_batched_tokens=16, max_num_seqs=16)
    runner.run(largest_step(load_manifest(folder), small))
    before, block = _resident(), load_manifest(folder).kv_bytes_per_token()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    runner.run(step)
    return (_peak() - before - block * tokens) / 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak() -> int:
    """High-water mark of resident memory in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--only", type=int, metavar="MICRO_BATCH", help="measure one in this process")
    arguments = parser.parse_args()
    folder = pack_folder(arguments.model)
    if arguments.only:
        print(peak_mebibytes(folder, arguments.tokens, arguments.only))
        return
    peaks = {}
    for micro_batch in (1, 2, 4, 8):
        command = [sys.executable, "-m", "benchmarks.activations", "--model", str(folder)]
        command += ["--tokens", str(arguments.tokens), "--only", str(micro_batch)]
        peaks[micro_batch] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        ratio = peaks[1] / peaks[micro_batch]
        print(f"micro_batch {micro_batch}: {peaks[micro_batch]:.1f} MiB for activations, {ratio:.2f}x less")


if __name__ == "__main__":
    main()
