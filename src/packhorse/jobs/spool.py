"""Standard input, kept beside the output: it is read twice, and a resumed job needs it again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import BinaryIO

from packhorse.errors import JobError
from packhorse.jobs.files import JobFiles

_CHUNK = 1 << 20


def is_stream(path: Path) -> bool:
    """Whether it can be read only once, like a pipe. Raises JobError for what cannot be read at all."""
    if not path.exists():
        raise JobError(f"{path} does not exist.")
    if path.is_dir():
        raise JobError(f"{path} is a folder, not a file of requests.")
    return not path.is_file()


def spool(path: Path | None, stdin: BinaryIO, files: JobFiles) -> Path:
    """Copy the stream (None: standard input) to a file and return it.

    When the stream is empty, what an earlier start kept is the input.
    """
    try:
        with files.new_spool.open("wb") as file:
            if path is None:
                shutil.copyfileobj(stdin, file, _CHUNK)
            else:
                with path.open("rb") as stream:
                    shutil.copyfileobj(stream, file, _CHUNK)
            empty = file.tell() == 0
    except OSError as error:
        raise JobError(
            f"{path or 'Standard input'} cannot be copied to {files.new_spool}: {error.strerror}."
        ) from error
    return files.spool if empty and files.spool.exists() else files.new_spool


def adopt(path: Path, files: JobFiles) -> Path:
    """The job begins or goes on with this spooled input: it takes the place of an earlier one."""
    if path == files.new_spool:
        path = path.replace(files.spool)
    return path


def drop_new(files: JobFiles) -> None:
    """The job does not go on with what was just spooled."""
    files.new_spool.unlink(missing_ok=True)
