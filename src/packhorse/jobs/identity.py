"""What makes two jobs the same: the input, the model, and the settings that change results."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from packhorse import __version__
from packhorse.errors import JobError
from packhorse.jobs.files import write_durably

SIDECAR_FORMAT = "packhorse-job"
SIDECAR_VERSION = 1


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """input_sha256: of its bytes. model: name and identity of the pack. settings: only those that change results."""

    input_sha256: str
    model: str
    model_identity: str
    settings: dict[str, Any]

    @property
    def job_id(self) -> str:
        """Twelve hex digits: equal jobs, equal ids."""
        return hashlib.sha256(orjson.dumps(asdict(self), option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]

    def differences(self, earlier: JobIdentity) -> list[str]:
        """What is not as it was in `earlier`, in words."""
        found = []
        if self.input_sha256 != earlier.input_sha256:
            found.append(f"the input (SHA-256 {earlier.input_sha256[:12]}… then, {self.input_sha256[:12]}… now)")
        if self.model_identity != earlier.model_identity:
            found.append(f"the model ({_model(earlier)} then, {_model(self)} now)")
        elif self.model != earlier.model:
            found.append(f"the model's name ({earlier.model} then, {self.model} now)")
        for name in sorted(self.settings.keys() | earlier.settings.keys()):
            then, now = earlier.settings.get(name), self.settings.get(name)
            if then != now:
                found.append(f"{name} ({_shown(then)} then, {_shown(now)} now)")
        return found


def _model(identity: JobIdentity) -> str:
    return f"{identity.model} {identity.model_identity[:12]}"


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def write_sidecar(path: Path, identity: JobIdentity, *, input_name: str, records: int) -> None:
    """Raises JobError when it cannot be written."""
    content = {
        "format": SIDECAR_FORMAT,
        "version": SIDECAR_VERSION,
        "packhorse": __version__,
        "job": identity.job_id,
        "input": {"name": input_name, "sha256": identity.input_sha256, "records": records},
        "model": {"name": identity.model, "identity": identity.model_identity},
        "settings": identity.settings,
    }
    try:
        write_durably(path, orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}.") from error


def read_sidecar(path: Path) -> JobIdentity | None:
    """The identity of the job that is under way or complete there; None when there is none.

    Raises JobError when the file is no such record.
    """
    try:
        content = orjson.loads(path.read_bytes())
        if content["format"] != SIDECAR_FORMAT or content["version"] != SIDECAR_VERSION:
            raise JobError(f"{path} is not of this version of Packhorse: --restart throws the job's results away.")
        return JobIdentity(
            input_sha256=content["input"]["sha256"],
            model=content["model"]["name"],
            model_identity=content["model"]["identity"],
            settings=content["settings"],
        )
    except FileNotFoundError:
        return None
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise JobError(
            f"{path} should say what job this is, but cannot be read ({error!r}): --restart throws its results away."
        ) from error
