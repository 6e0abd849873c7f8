"""Every architecture converts by the same code and gives the logits that transformers gives.

`convert` itself compares with transformers and fails when they differ; the assertions here are about what it recorded.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from packhorse.errors import UnsupportedModel
from packhorse.pack import parity
from packhorse.pack.convert import convert
from packhorse.pack.manifest import Manifest
from tests.pack.numpy_runner import NumpyRunner
from tests.pack.tiny_models import ARCHITECTURES, tiny_model

WINDOWS = {
    "mistral": [8, 8],
    "gemma2": [8, 0],
    "gemma3_text": [8, 8, 8, 8, 8, 0],
    "phi3": [12, 12],
    "starcoder2": [8, 8],
    "gpt_oss": [8, 0],
}


def _convert(model: Any, tmp_path: Path) -> Manifest:
    model.save_pretrained(tmp_path / "source")
    return convert(tmp_path / "source", tmp_path / "pack", with_tokenizer=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_converts_with_the_same_logits(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    manifest = _convert(model, tmp_path)
    assert manifest.parity.checks >= 8
    assert 0 < manifest.parity.max_abs_difference < parity.TOLERANCE * manifest.parity.max_logit
    assert [a.window for a in manifest.attention] == WINDOWS.get(name, [0] * model.config.num_hidden_layers)
    assert {a.softcap for a in manifest.attention} == ({5.0} if name == "gemma2" else {0.0})
    assert all((a.sinks is not None) == (name == "gpt_oss") for a in manifest.attention)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_an_independent_runner_that_reads_only_the_manifest_agrees(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    manifest = _convert(model, tmp_path)
    parity.check(model, tmp_path / "pack", manifest, NumpyRunner)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["window", "softcap", "scale", "sinks"])
def test_parity_notices_a_wrong_attention_setting(field: str, tmp_path: Path) -> None:
    """Otherwise the tests above would show little."""
    wrong = {"window": 0, "softcap": 0.0, "scale": 0.3, "sinks": None}[field]
    model = tiny_model("gpt_oss" if field == "sinks" else "gemma2")
    manifest = _convert(model, tmp_path)
    attention = tuple(a.model_copy(update={field: wrong}) for a in manifest.attention)
    changed = manifest.model_copy(update={"attention": attention})
    (tmp_path / "pack" / "pack.json").write_text(changed.model_dump_json())
    with pytest.raises(parity.ParityError, match="does not reproduce its source"):
        parity.check(model, tmp_path / "pack", manifest, NumpyRunner)


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


@pytest.mark.slow
def test_positions_beyond_the_original_length_of_a_long_rope_are_not_promised(tmp_path: Path) -> None:
    """Such models change all frequencies there, for a whole sequence at once."""
    factors = [1.0 + 0.1 * i for i in range(4)]
    model = tiny_model(
        "phi3",
        sliding_window=None,
        max_position_embeddings=128,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": factors,
            "long_factor": [f * 4 for f in factors],
            "original_max_position_embeddings": 64,
        },
    )
    assert _convert(model, tmp_path).context_length == 64
    shutil.rmtree(tmp_path / "pack")
