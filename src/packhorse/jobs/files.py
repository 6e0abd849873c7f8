"""The files of one job, all beside its output, and the lock that gives them to one process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packhorse.errors import JobError


@dataclass(frozen=True, slots=True)
class JobFiles:
    """Paths. Which of them exist says where a job stands:

    OUT.job.json                      begun: what job it is (stays, as the record of how OUT was made)
    OUT.job.json, OUT.partial         under way: every finished result, in the order of finishing
    OUT.job.json, OUT                 complete (a leftover OUT.partial or OUT.sorting means nothing)
    OUT.input                         what came from standard input, until the job is complete
    OUT.lock                          a process is at work (or was killed: the lock itself goes with the process)
    """

    output: Path

    @property
    def sidecar(self) -> Path:
        return self._beside("job.json")

    @property
    def partial(self) -> Path:
        return self._beside("partial")

    @property
    def sorting(self) -> Path:
        return self._beside("sorting")

    @property
    def lock(self) -> Path:
        return self._beside("lock")

    @property
    def spool(self) -> Path:
        return self._beside("input")

    @property
    def new_spool(self) -> Path:
        return self._beside("input.new")

    def _beside(self, ending: str) -> Path:
        return self.output.with_name(f"{self.output.name}.{ending}")


def job_files(output: Path, input_path: Path | None) -> JobFiles:
    """Raises JobError when results cannot be written there or would overwrite the input."""
    if output.is_dir():
        raise JobError(f"{output} is a folder: give the output a file name.")
    if not output.parent.is_dir():
        raise JobError(f"{output.parent} does not exist: make the folder first.")
    files = JobFiles(output)
    ours = (output, files.partial, files.sidecar, files.sorting, files.lock, files.new_spool)
    if input_path is not None and any(_same_file(input_path, path) for path in ours):
        raise JobError(f"{input_path} is the input and would be overwritten: choose another output.")
    return files


def _same_file(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve() or (a.exists() and b.exists() and a.samefile(b))


@contextmanager
def exclusive(files: JobFiles) -> Iterator[None]:
    """Hold the job alone. Raises JobError, at once, when another process has it.

    The kernel drops the lock with the process, however it dies; only the empty file may stay behind.
    """
    fd = _lock(files)
    try:
        yield
    finally:
        files.lock.unlink(missing_ok=True)
        os.close(fd)


def _lock(files: JobFiles) -> int:
    while True:
        try:
            fd = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise JobError(f"{files.lock} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode(errors="replace").strip()
            os.close(fd)
            raise JobError(
                f"Another process{f' ({holder})' if holder else ''} is writing {files.output}: wait for it, or choose "
                "another output."
            ) from None
        except OSError as error:
            os.close(fd)
            raise JobError(f"{files.lock} cannot be locked on this file system: {error.strerror}.") from error
        if _is_still(fd, files.lock):
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            return fd
        os.close(fd)  # its last holder removed the file between our open and our lock


def _is_still(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a small file in one go: a reader, or a crash, finds the old content or the new one."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)
