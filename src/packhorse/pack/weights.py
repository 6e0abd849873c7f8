"""One file of external data that all segments share. Equal tensors, tied weights above all, are stored once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx_ir as ir

ALIGNMENT = 4096  # a page, so that the runtime can map each tensor
# Shapes and other small constants stay in the graph, where the runtime's own optimizations read them.
INLINE_BYTES = 1024


class WeightFile:
    """Appends tensors to one file; a context manager.

    `location` is what graphs record: a name relative to the folder of the graphs, so that the folder can be moved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.location = path.name
        self._file = path.open("xb")
        self._known: dict[bytes, tuple[int, int]] = {}

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def externalize(self, graph: ir.Graph) -> None:
        """Move every initializer of `graph` above INLINE_BYTES into the file."""
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.nbytes > INLINE_BYTES:
                value.const_value = self._store(tensor)

    def _store(self, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
        data = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data
        digest = hashlib.sha256(data).digest()
        if digest not in self._known:
            self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
            self._known[digest] = (self._file.tell(), data.nbytes)
            self._file.write(data)
        offset, length = self._known[digest]
        return ir.ExternalTensor(
            self.location,
            offset,
            length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape),
            name=str(tensor.name),
            base_dir=self.path.parent,
        )
