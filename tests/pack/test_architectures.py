"""Every architecture converts by the same code and gives the logits that transformers gives.

`convert` itself compares with transformers and fails when they differ; the assertions here are about what it recorded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from packhorse.errors import ParityError, UnsupportedModel
from packhorse.pack import parity
from packhorse.pack.convert import convert
from packhorse.pack.manifest import Manifest
from tests.pack.numpy_runner import NumpyRunner
from tests.pack.tiny_models import ARCHITECTURES, tiny_model

WINDOWS = {
    "mistral": [8, 8],
    "gemma2": [8, 0],
    "gemma3_text": [8, 0],
    "phi3": [12, 12],
    "starcoder2": [8, 8],
    "gpt_oss": [8, 0],
}


@dataclass(frozen=True)
class Converted:
    model: Any
    folder: Path
    manifest: Manifest


def _convert(model: Any, folder: Path) -> Converted:
    model.save_pretrained(folder / "source")
    manifest = convert(folder / "source", folder / "pack", with_tokenizer=False)
    return Converted(model, folder / "pack", manifest)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Converted]:
    """The tiny model of an architecture and its pack, made once for this module."""
    return cache(lambda name: _convert(tiny_model(name), tmp_path_factory.mktemp(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_converts_with_the_same_logits(name: str, converted: Callable[[str], Converted]) -> None:
    manifest = converted(name).manifest
    layers = converted(name).model.config.num_hidden_layers
    assert manifest.parity.checks >= 8
    assert 0 < manifest.parity.max_abs_difference < parity.TOLERANCE * manifest.parity.max_logit
    assert [a.window for a in manifest.attention] == WINDOWS.get(name, [0] * layers)
    assert {a.softcap for a in manifest.attention} == ({5.0} if name == "gemma2" else {0.0})
    assert all((a.sinks is not None) == (name == "gpt_oss") for a in manifest.attention)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_an_independent_runner_that_reads_only_the_manifest_agrees(
    name: str, converted: Callable[[str], Converted]
) -> None:
    pack = converted(name)
    parity.check(pack.model, pack.folder, pack.manifest, NumpyRunner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "field", "wrong"),
    [("gemma2", "window", 0), ("gemma2", "softcap", 0.0), ("gemma2", "scale", 0.3), ("gpt_oss", "sinks", None)],
)
def test_parity_notices_a_wrong_attention_setting(
    name: str, field: str, wrong: object, converted: Callable[[str], Converted], tmp_path: Path
) -> None:
    """Otherwise the tests above would show little."""
    pack = converted(name)
    attention = tuple(a.model_copy(update={field: wrong}) for a in pack.manifest.attention)
    changed = pack.manifest.model_copy(update={"attention": attention})
    shutil.copytree(pack.folder, tmp_path / "pack")
    (tmp_path / "pack" / "pack.json").write_text(changed.model_dump_json())
    with pytest.raises(ParityError, match="does not reproduce its source"):
        parity.check(pack.model, tmp_path / "pack", changed, NumpyRunner)


def _from_config(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)


def test_falcon_with_alibi_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"FalconForCausalLM .*ALiBi"):
        _convert(tiny_model("falcon", alibi=True), tmp_path)


def test_a_model_that_calls_attention_in_its_own_way_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import BloomConfig

    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, seq_length=64)
    with pytest.raises(UnsupportedModel, match=r"BloomForCausalLM \(bloom\) cannot be cut"):
        _convert(_from_config(config), tmp_path)


def test_a_model_that_carries_a_state_is_refused_by_the_kind_of_its_layers(tmp_path: Path) -> None:
    from transformers import Lfm2Config

    config = Lfm2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    with pytest.raises(UnsupportedModel, match="layers of kind conv"):
        _convert(_from_config(config), tmp_path)


@pytest.mark.slow
def test_an_operator_without_an_onnx_form_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers.models.llama import modeling_llama

    class Strange(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(config.hidden_size, config.hidden_size)

        def forward(self, x: Any) -> Any:
            return torch.special.airy_ai(self.linear(x))

    monkeypatch.setattr(modeling_llama, "LlamaMLP", Strange)
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM \(llama\).*aten[.:]+special_airy_ai"):
        _convert(tiny_model("llama"), tmp_path)


_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 4.4, 4.8, 5.2],
    "original_max_position_embeddings": 64,
}
_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rope", "context_length"), [("phi3", _LONG_ROPE, 64), ("llama", _DYNAMIC_ROPE, 128)])
def test_a_rope_that_grows_is_promised_up_to_its_original_length(
    name: str, rope: dict[str, Any], context_length: int, tmp_path: Path
) -> None:
    """Beyond it such models change all frequencies, for every sequence of a batch at once."""
    changes = {"original_max_position_embeddings": 64, "sliding_window": None} if name == "phi3" else {}
    assert (
        _convert(tiny_model(name, rope_parameters=rope, **changes), tmp_path).manifest.context_length == context_length
    )
