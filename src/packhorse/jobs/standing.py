"""Where a job stands, read from which of its files exist, and the few steps that change it."""

from __future__ import annotations

from enum import Enum

from packhorse.errors import JobError
from packhorse.jobs.files import JobFiles, sync_folder
from packhorse.jobs.identity import JobIdentity, read_sidecar


class Standing(Enum):
    NEW = "nothing is done, or all of it is to be thrown away"
    UNDER_WAY = "some of it is done"
    COMPLETE = "the output is there"


def standing(files: JobFiles, identity: JobIdentity, *, restart: bool) -> Standing:
    """Raises JobError when the files there belong to another job, or to nobody we know."""
    if files.output.exists() and not files.sidecar.exists():
        raise JobError(
            f"{files.output} exists, and without {files.sidecar.name} beside it nobody knows what it is: "
            "remove it or choose another output."
        )
    if restart:
        return Standing.NEW
    started = files.partial.exists() and files.partial.stat().st_size > 0
    earlier = read_sidecar(files.sidecar)
    if earlier is None and started:
        raise JobError(
            f"{files.partial} holds results, and without {files.sidecar.name} nobody knows of what job: "
            "give --restart to throw them away, or choose another output."
        )
    if earlier is None or not (started or files.output.exists()):
        return Standing.NEW
    differences = identity.differences(earlier)
    if differences:
        raise JobError(_refusal(files, differences), code="job_differs")
    return Standing.COMPLETE if files.output.exists() else Standing.UNDER_WAY


def _refusal(files: JobFiles, differences: list[str]) -> str:
    held = files.output if files.output.exists() else files.partial
    return "\n".join(
        [
            f"{held} holds results of another job. What differs:",
            *(f"  {difference}" for difference in differences),
            "Run it as it was begun to go on, choose another output, or give --restart to throw those results away.",
        ]
    )


def discard(files: JobFiles) -> None:
    """Throw away what an earlier job left. The sidecar goes last: while it is there, the rest is known to be ours."""
    for path in (files.output, files.partial, files.sorting, files.sidecar):
        path.unlink(missing_ok=True)


def tidy(files: JobFiles) -> None:
    """A job killed between its last two steps is complete, but for what it had no time to remove."""
    for path in (files.partial, files.sorting, files.spool):
        path.unlink(missing_ok=True)


def reopen(files: JobFiles) -> None:
    """A complete job goes on, to run failed lines again: its output is a journal once more."""
    files.output.replace(files.partial)
    sync_folder(files.output.parent)
