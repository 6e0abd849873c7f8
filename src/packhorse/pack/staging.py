"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packhorse.errors import PackError

_PARTIAL = ".partial"


def check_target(target: Path, *, force: bool) -> None:
    """Raise PackError when `target` may not be written: a pack is there and `force` is false, or something else is."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / "pack.json").is_file():
        raise PackError(f"{target} exists and is not a pack, so it is not replaced. Choose another folder.")
    if not force:
        raise PackError(f"{target} exists. Pass --force to replace it.")


@contextmanager
def staged(target: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name at the end, or disappears on any failure.

    Raises PackError when it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_PARTIAL, dir=target.parent))
    except OSError as error:
        raise PackError(f"{target} cannot be written: {error}") from error
    try:
        folder.chmod(0o755)
        yield folder
        _sync(folder)
        check_target(target, force=force)
        _take_name(folder, target)
    except OSError as error:
        raise PackError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_space(folder: Path, needed: int) -> None:
    """Raise PackError when the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PackError(f"The disk has {free >> 20} MiB free; the pack needs about {needed >> 20} MiB.")


def remove_leftovers(target: Path) -> None:
    """Remove what killed conversions to `target` left behind. Only for a caller that holds the lock on `target`."""
    for folder in target.parent.glob(f".{target.name}.*{_PARTIAL}"):
        shutil.rmtree(folder, ignore_errors=True)


def _take_name(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`. A pack that is there is moved aside first and removed last."""
    aside = folder.with_suffix(".replaced")
    if target.exists():
        target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    _sync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Bring everything in `folder` to the disk before its name makes it valid."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        _sync_directory(path)


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
