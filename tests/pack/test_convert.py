"""What `convert` promises about the folder it makes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.errors import PackError, PackhorseError, ParityError, SourceError
from packhorse.pack import convert as conversion
from packhorse.pack import export, parity, staging
from packhorse.pack.convert import convert, convert_cached, home
from packhorse.pack.manifest import load_manifest
from tests.pack.conftest import CHAT_TEMPLATE, MakeSource, word_tokenizer
from tests.pack.numpy_runner import NumpyRunner
from tests.pack.tiny_models import tiny_model


def _logits(pack: Path) -> np.ndarray:
    cache = parity._Cache(1, 1)
    return NumpyRunner(pack, cache.num_blocks).run(cache.batch([0], [[5, 6, 7]], [0], rows="all"))


# What is in a pack


def test_every_file_is_listed_with_its_size_and_hash(tiny_pack: Path) -> None:
    manifest = load_manifest(tiny_pack)
    there = {p.relative_to(tiny_pack).as_posix() for p in tiny_pack.rglob("*") if p.is_file()}
    assert {f.file for f in manifest.files} == there - {"pack.json"}
    for record in manifest.files:
        content = (tiny_pack / record.file).read_bytes()
        assert (record.bytes, record.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_tokenizer_template_and_generation_config_come_along(tiny_pack: Path) -> None:
    from tokenizers import Tokenizer

    manifest = load_manifest(tiny_pack)
    assert manifest.tokenizer is not None
    assert manifest.tokenizer.vocab_size == 256
    assert Tokenizer.from_file(str(tiny_pack / "tokenizer.json")).encode("w7 <turn> w9").ids == [7, 3, 9]
    assert (tiny_pack / str(manifest.chat_template)).read_text() == CHAT_TEMPLATE
    assert json.loads((tiny_pack / "generation_config.json").read_text())["eos_token_id"] == 2


def test_tied_weights_are_stored_once(tiny_pack: Path) -> None:
    model = tiny_model("llama_tied")
    parameters = sum(p.numel() for p in model.parameters()) * 4  # tied ones are listed once
    stored = (tiny_pack / "segments" / "weights.bin").stat().st_size
    table = model.get_input_embeddings().weight.numel() * 4
    pages = 4096 * 16
    assert stored < parameters + pages
    assert stored < parameters + table, "the embedding is there twice"


def test_every_segment_is_standard_onnx(tiny_pack: Path) -> None:
    import onnx

    for segment in load_manifest(tiny_pack).segments:
        onnx.checker.check_model(tiny_pack / segment.file, full_check=True)
        graph = onnx.load(tiny_pack / segment.file, load_external_data=False)
        assert [(o.domain, o.version) for o in graph.opset_import] == [("", 23)]


def test_no_file_tells_where_it_was_made(tiny_pack: Path) -> None:
    made_in = str(tiny_pack.parent).encode()
    for path in tiny_pack.rglob("*"):
        if path.is_file():
            assert made_in not in path.read_bytes(), path.name


def test_a_pack_holds_no_pickle(tiny_pack: Path) -> None:
    assert {p.suffix for p in tiny_pack.rglob("*") if p.is_file()} <= {".json", ".onnx", ".bin", ".jinja"}
    assert (tiny_pack / "segments" / "weights.bin").read_bytes()[:2] != b"\x80\x04"


def test_a_pack_can_be_moved_and_read_from_another_folder(
    tiny_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _logits(tiny_pack)
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(tiny_pack, moved)
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(_logits(Path("elsewhere/renamed")), before)


def test_a_pack_without_its_weights_names_the_missing_file(tiny_pack: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_pack, copy)
    (copy / "segments" / "weights.bin").unlink()
    with pytest.raises(PackError, match=r"segments/weights\.bin"):
        load_manifest(copy)


@pytest.mark.slow
def test_the_same_source_gives_the_same_pack(make_source: MakeSource, tmp_path: Path) -> None:
    source = make_source()
    first, second = (convert(source, tmp_path / name) for name in ("one", "two"))
    assert first.identity == second.identity


@pytest.mark.slow
def test_eos_ids_are_the_union_of_all_settings(make_source: MakeSource, tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        model.generation_config.eos_token_id = [2, 3]

    source = make_source(tokenizer=word_tokenizer(eos="w9"), edit=edit)
    assert convert(source, tmp_path / "pack").eos_token_ids == (2, 3, 9)


@pytest.mark.slow
def test_the_context_length_is_the_models_not_the_tokenizers(make_source: MakeSource, tmp_path: Path) -> None:
    source = make_source()
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": int(1e30)}))
    assert convert(source, tmp_path / "pack").context_length == 128


@pytest.mark.slow
def test_progress_rises_to_one(make_source: MakeSource, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    convert(make_source(), tmp_path / "pack", progress=lambda stage, fraction: seen.append((stage, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert seen[-1] == ("done", 1.0)
    assert [stage for stage, _ in seen] == ["find", "load", "export", "rewrite", "write", "check", "done"]


# Whole or not at all


def test_a_pack_is_not_overwritten_without_force(tiny_pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    shutil.copytree(tiny_pack, out)
    with pytest.raises(PackError, match="--force"):
        convert(tmp_path / "source", out)
    assert load_manifest(out) == load_manifest(tiny_pack)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_not_a_pack_is_never_replaced(force: bool, tmp_path: Path) -> None:
    out = tmp_path / "photos"
    out.mkdir()
    (out / "one.jpg").write_bytes(b"precious")
    with pytest.raises(PackError, match="not a pack"):
        convert(tmp_path / "source", out, force=force)
    assert (out / "one.jpg").read_bytes() == b"precious"


@pytest.mark.slow
def test_force_replaces_a_pack_and_leaves_nothing_else(
    make_source: MakeSource, tiny_pack: Path, tmp_path: Path
) -> None:
    out = tmp_path / "pack"
    shutil.copytree(tiny_pack, out)
    (out / "old").write_text("of the former pack")
    convert(make_source("gpt2"), out, force=True)
    assert load_manifest(out).architecture == "GPT2LMHeadModel"
    assert not (out / "old").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"source", "pack"}


@pytest.mark.parametrize("broken", ["export.export", "parity.check", "staging._sync"])
def test_a_failure_leaves_nothing_behind(
    broken: str, make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk on fire")

    module, name = broken.split(".")
    monkeypatch.setattr({"export": export, "parity": parity, "staging": staging}[module], name, fail)
    with pytest.raises(PackError, match="disk on fire"):
        convert(make_source(), tmp_path / "out" / "pack")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failed_replacement_keeps_the_former_pack(
    make_source: MakeSource, tiny_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pack"
    shutil.copytree(tiny_pack, out)

    def differs(*_: object) -> None:
        raise ParityError("differs")

    monkeypatch.setattr(parity, "check", differs)
    with pytest.raises(ParityError, match="differs"):
        convert(make_source(), out, force=True)
    assert load_manifest(out) == load_manifest(tiny_pack)
    assert {p.name for p in tmp_path.iterdir()} == {"source", "pack"}


def test_a_weight_that_changed_on_the_way_fails_and_writes_nothing(
    make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = export.export

    def export_then_change(model: Any, context_length: int) -> Any:
        graph = original(model, context_length)
        weight = model.model.layers[1].mlp.down_proj.weight
        weight.data = weight.data.clone()  # the graph keeps the old storage
        weight.data[3, 5] += 0.05
        return graph

    monkeypatch.setattr(export, "export", export_then_change)
    with pytest.raises(ParityError, match="does not reproduce its source"):
        convert(make_source(), tmp_path / "pack")
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


def test_a_full_disk_is_noticed_before_anything_is_written(
    make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1 << 20))
    monkeypatch.setattr(export, "export", lambda *_: pytest.fail("went on without space"))
    with pytest.raises(PackError, match=r"1 MiB free; the pack needs about 64 MiB"):
        convert(make_source(), tmp_path / "pack")
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


# The cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACKHORSE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def conversions(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The targets that `convert` was called with; it copies a pack that is there, after a moment for others to come."""
    targets: list[Path] = []
    arrived = threading.Barrier(2)

    def copy(_source: object, out: Path, **_: object) -> None:
        targets.append(out)
        try:
            arrived.wait(timeout=0.2)  # a second conversion would meet the first here
        except threading.BrokenBarrierError:
            shutil.copytree(tiny_pack, out, dirs_exist_ok=True)

    monkeypatch.setattr(conversion, "convert", copy)
    return targets


def test_a_source_is_converted_once(make_source: MakeSource, cache: Path, conversions: list[Path]) -> None:
    source = make_source()
    first, second = convert_cached(source), convert_cached(source)
    assert first == second
    assert first.is_relative_to(cache)
    assert conversions == [first]


@pytest.mark.usefixtures("cache")
def test_another_content_under_the_same_name_is_converted_again(
    make_source: MakeSource, conversions: list[Path]
) -> None:
    source = make_source()
    first = convert_cached(source)
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert convert_cached(source) != first
    assert len(conversions) == 2


@pytest.mark.usefixtures("cache")
def test_two_at_once_convert_once(make_source: MakeSource, conversions: list[Path]) -> None:
    source = make_source()
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(convert_cached(source))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert found == [conversions[0]] * 2


@pytest.mark.usefixtures("cache")
def test_a_damaged_pack_in_the_cache_is_made_again(make_source: MakeSource, conversions: list[Path]) -> None:
    source = make_source()
    pack = convert_cached(source)
    (pack / "segments" / "weights.bin").unlink()
    assert convert_cached(source) == pack
    assert len(conversions) == 2


def test_a_pack_is_its_own_cache(tiny_pack: Path, cache: Path) -> None:
    assert convert_cached(tiny_pack) == tiny_pack
    assert not cache.exists()


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACKHORSE_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert home() == tmp_path / "packhorse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home() == Path.home() / ".cache" / "packhorse"


# What a user may lack


def test_missing_libraries_are_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    with pytest.raises(SourceError, match=r"needs onnx_ir.*pip install 'packhorse\[convert\]'"):
        convert(tmp_path / "source", tmp_path / "pack")


def test_the_room_of_packs_opens_without_torch() -> None:
    code = (
        "import sys, packhorse.pack.manifest, packhorse.pack.convert, packhorse.pack.source, packhorse.cli.convert\n"
        "heavy = {'torch', 'transformers', 'onnx_ir', 'onnx', 'onnxruntime', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


def test_a_missing_tokenizer_is_an_error_unless_asked_for(make_source: MakeSource, tmp_path: Path) -> None:
    source = make_source(tokenizer=None)
    with pytest.raises(PackhorseError, match="tokenizer"):
        convert(source, tmp_path / "pack")
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


def test_the_summary_tells_the_difference_the_size_and_the_time(tiny_pack: Path) -> None:
    from packhorse.cli.convert import summary

    manifest = load_manifest(tiny_pack)
    text = "\n".join(summary(manifest, tiny_pack, 12.3))
    assert "12 s" in text
    assert f"{manifest.parity.max_abs_difference:.2g}" in text
    assert "MB" in text
