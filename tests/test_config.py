from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packhorse.config import EngineConfig, load_config
from packhorse.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("max_num_seqs", [0, -1, 4097, "many", None, 1.5]),
        ("max_num_batched_tokens", [0, (1 << 20) + 1, None]),
        ("max_model_len", [0, -5, "long"]),
        ("block_size", [0, 257, 512, 3, 24, "x"]),
        ("num_blocks", [0, -1, "x"]),
        ("memory_utilization", [0, -0.1, 1.01, float("nan"), "half"]),
        ("threads", [0, 1025]),
        ("escape_control_tokens", ["perhaps", 3]),
    ],
)
def test_a_bad_value_is_refused_by_name(setting: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=setting) as refusal:
            EngineConfig(**{setting: value})
        assert refusal.value.param == setting
        assert str(value) in refusal.value.message


def test_values_on_the_boundary_are_accepted() -> None:
    for settings in (
        {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, "block_size": 1, "num_blocks": 1},
        {"max_num_seqs": 4096, "max_num_batched_tokens": 1 << 20, "block_size": 256, "memory_utilization": 1},
        {"max_model_len": None, "num_blocks": None, "threads": None},
    ):
        EngineConfig(**settings)


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seq is not a setting\. Settings: max_num_seqs, ") as refusal:
        EngineConfig(max_num_seq=4)
    assert refusal.value.param == "max_num_seq"


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(Exception, match="frozen"):
        EngineConfig().threads = 3  # type: ignore[misc]


def test_overrides_stand_over_the_file_and_none_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("max_num_seqs = 8\nthreads = 3\nescape_control_tokens = false\n", "utf-8")
    config = load_config({"max_num_seqs": 4, "threads": None, "block_size": None}, file)
    assert (config.max_num_seqs, config.threads, config.block_size) == (4, 3, 16)
    assert config.escape_control_tokens is False


def test_the_file_of_the_working_directory_is_read_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config({}) == EngineConfig()
    (tmp_path / "packhorse.toml").write_text("block_size = 32\n", "utf-8")
    assert load_config({}).block_size == 32
    (tmp_path / "other.toml").write_text("threads = 2\n", "utf-8")
    assert load_config({}, Path("other.toml")) == EngineConfig(threads=2)


@pytest.mark.parametrize("content", [b"max_num_seqs = ", b"\xff\xfe", b"= 3"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"settings\.toml cannot be read"):
        load_config({}, file)
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read"):
        load_config({}, tmp_path / "absent.toml")


def test_a_bad_setting_of_a_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    for line, name in (("max_seqs = 3", "max_seqs"), ("threads = 0", "threads"), ("[engine]\nthreads = 1", "engine")):
        file.write_text(line, "utf-8")
        with pytest.raises(ConfigError, match=name) as refusal:
            load_config({}, file)
        assert refusal.value.param == name
