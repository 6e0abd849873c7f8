from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packhorse.cli.settings import default_text
from packhorse.config import EngineConfig, ServerConfig, load_config, load_server_config
from packhorse.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("max_num_seqs", [0, -1, 4097, "many", None, 1.5]),
        ("max_num_batched_tokens", [0, (1 << 20) + 1, None]),
        ("max_model_len", [0, -5, "long"]),
        ("block_size", [0, 1, 8, 24, 272, "x"]),
        ("num_blocks", [0, -1, "x"]),
        ("memory_utilization", [0, -0.1, 1.01, float("nan"), "half"]),
        ("threads", [0, 1025]),
        ("escape_control_tokens", ["perhaps", 3]),
        ("policy", ["best", "Static", None]),
        ("batch_size", [0, 4097, None]),
        ("max_wait_ms", [-1, float("inf"), "long"]),
        ("length_buckets", [64, "64,x", [64, 64], [256, 64], "256,64", [0, 5], ""]),
        ("micro_batch", [0, 1025]),
        ("target_ttft_ms", [0, -1]),
        ("target_itl_ms", [0, -1]),
        ("max_decode_stall", [1, 0.5, float("inf")]),
        ("priority_seconds", [0, float("inf")]),
        ("warmup_requests", [-1, 4097]),
        ("kv_dtype", ["fp16", "int8"]),
        ("precision", ["fp16", "bf16"]),
        ("use_triton", [True, "perhaps"]),
        ("model_path", [3]),
    ],
)
def test_a_bad_value_is_refused_by_name(setting: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=setting) as refusal:
            EngineConfig(**{setting: value})
        assert refusal.value.param == setting
        assert str(value) in refusal.value.message or not isinstance(value, (int, float))


def test_values_on_the_boundary_are_accepted() -> None:
    for settings in (
        {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, "block_size": 16, "num_blocks": 1},
        {"max_num_seqs": 4096, "max_num_batched_tokens": 1 << 20, "block_size": 256, "memory_utilization": 1},
        {"max_model_len": None, "num_blocks": None, "threads": None},
        {"block_size": 48, "max_wait_ms": 0, "warmup_requests": 0, "length_buckets": None},
        {"policy": "static", "batch_size": 64, "max_num_seqs": 64},
    ):
        EngineConfig(**settings)


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"max_num_seq is not a setting\. Settings: model_path, .*, use_triton\."
    ) as refusal:
        EngineConfig(max_num_seq=4)
    assert refusal.value.param == "max_num_seq"


@pytest.mark.parametrize(
    ("setting", "there_is"),
    [
        ("policy", "'continuous', 'dynamic' or 'static'"),
        ("kv_dtype", "it must be 'fp32'"),
        ("precision", "it must be 'fp32'"),
        ("block_size", "multiple of 16"),
        ("use_triton", "not there yet"),
    ],
)
def test_a_refusal_says_what_there_is(setting: str, there_is: str) -> None:
    value: Any = {"block_size": 24, "use_triton": True}.get(setting, "other")
    with pytest.raises(ConfigError, match=there_is):
        EngineConfig(**{setting: value})


def test_a_batch_that_could_never_fill_is_refused() -> None:
    for policy in ("static", "dynamic"):
        with pytest.raises(ConfigError, match=r"batch_size \(9\) is more than max_num_seqs \(8\)") as refusal:
            EngineConfig(policy=policy, batch_size=9, max_num_seqs=8)
        assert refusal.value.param == "batch_size"
    EngineConfig(batch_size=9, max_num_seqs=8)


@pytest.mark.parametrize("buckets", ["64,256,1024", " 64, 256 ,1024", [64, 256, 1024], (64, 256, 1024)])
def test_buckets_are_a_list_or_a_text_with_commas(buckets: Any) -> None:
    assert EngineConfig(length_buckets=buckets).length_buckets == (64, 256, 1024)


def test_every_setting_is_described() -> None:
    for name, field in (*EngineConfig.model_fields.items(), *ServerConfig.model_fields.items()):
        assert field.description, name
        assert field.description.endswith("."), name


def test_the_page_of_settings_has_every_one_with_its_default_and_meaning_and_no_other() -> None:
    page = Path(__file__).parents[1] / "docs" / "settings.md"
    shown = [line for line in page.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert shown == [
        f"| `{name}` | {default_text(field.default) or '–'} | {field.description} |"
        for settings in (EngineConfig, ServerConfig)
        for name, field in settings.model_fields.items()
    ]


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(Exception, match="frozen"):
        EngineConfig().threads = 3  # type: ignore[misc]


def test_overrides_stand_over_the_file_and_none_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    lines = ("max_num_seqs = 8", "threads = 3", "escape_control_tokens = false", 'policy = "static"', "batch_size = 2")
    file.write_text("\n".join([*lines, "length_buckets = [64, 256]"]), "utf-8")
    config = load_config({"max_num_seqs": 4, "threads": None, "block_size": None}, file)
    assert (config.max_num_seqs, config.threads, config.block_size) == (4, 3, 16)
    assert config.escape_control_tokens is False
    assert (config.policy, config.batch_size, config.length_buckets) == ("static", 2, (64, 256))


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


def test_a_servers_settings_stand_in_a_table_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('threads = 3\n[server]\nport = 9\nserved_model_name = "a"\napi_key = ["k", "l"]\n', "utf-8")
    assert load_config({}, file) == EngineConfig(threads=3)
    found = load_server_config({"host": "::1", "port": None}, file)
    assert found == ServerConfig(port=9, host="::1", served_model_name=("a",), api_key=("k", "l"))
    assert load_server_config({"port": 10, "api_key": ["m"]}, file).port == 10
    for line, name in (("[server]\nports = 3", "ports"), ("[server]\nport = -1", "port"), ("server = 3", "server")):
        file.write_text(line, "utf-8")
        with pytest.raises(ConfigError, match=name) as refusal:
            load_server_config({}, file)
        assert refusal.value.param == name


def test_two_settings_never_share_a_name() -> None:
    assert not EngineConfig.model_fields.keys() & ServerConfig.model_fields.keys()
