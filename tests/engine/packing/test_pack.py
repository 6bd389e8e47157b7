import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from engine.errors import ModelNotFoundError, UnsupportedModelError
from engine.packing import find_records, is_pack, pack_dtype
from engine.protocol import Loading, OnProgress
from tests.engine.families import FAMILIES
from tests.engine.oracle import assert_dense_weights, assert_same_weights, experts_of, load_whole
from tests.engine.packing.harness import (
    QINT4,
    draft_of,
    files,
    names,
    pack_of,
    read_experts,
    written,
)
from tests.engine.tiny import VOCAB_SIZE, mixtral_config, save_checkpoint

ALL_IN_FLOAT32 = ["mixtral", "qwen3_moe"]


def messages_of(checkpoint: Path, cache: Path) -> list[Loading]:
    """What is said while the pack is looked for, and made where it has to be."""
    progress: list[Loading] = []
    pack_of(checkpoint, cache, progress.append)
    return progress


def why_anew(progress: list[Loading]) -> str:
    (stage,) = [message.stage for message in progress if message.stage.startswith("Packing anew")]
    return stage


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((name, torch.bfloat16) for name in FAMILIES), *((name, torch.float32) for name in ALL_IN_FLOAT32)],
)
def test_every_weight_is_restored_bit_for_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(FAMILIES[family](), tmp_path / family, dtype=dtype)
    whole, pack = load_whole(checkpoint), pack_of(checkpoint, tmp_path / "cache")
    assert pack.dtype is pack_dtype(pack.directory) is dtype
    assert_dense_weights(pack.dense_parts(), whole)
    expected = experts_of(whole)
    restored = read_experts(pack)
    assert len(restored) == len(expected)
    for layer, parameters in zip(restored, expected, strict=True):
        assert_same_weights(layer, parameters)


def test_a_pack_is_made_once(checkpoint: Path, cache: Path, layers_read: list[int]) -> None:
    pack = pack_of(checkpoint, cache)
    assert layers_read == [0, 1, 2]
    before = written(pack.directory)
    assert messages_of(checkpoint, cache) == []
    assert pack_of(checkpoint, cache) == pack
    assert written(pack.directory) == before
    assert layers_read == [0, 1, 2]


def test_a_pack_holds_what_is_needed_to_serve_it(checkpoint: Path, cache: Path) -> None:
    pack = pack_of(checkpoint, cache)
    small = {"config.json", "generation_config.json"}
    assert names(pack.directory) == {"manifest.json", "dense-000.safetensors", "experts.bin"} | small
    assert names(cache / "packs") == {pack.directory.name}
    assert pack.records_path.stat().st_size == pack.layout.num_experts * pack.layout.expert_bytes
    for name in small:
        assert (pack.directory / name).read_bytes() == (checkpoint / name).read_bytes()


def test_packs_of_one_checkpoint_are_the_same_to_the_byte(checkpoint: Path, tmp_path: Path) -> None:
    one, other = (pack_of(checkpoint, tmp_path / name) for name in "ab")
    assert files(one.directory) == files(other.directory)


def test_a_pack_is_served_by_itself(source: Path, cache: Path, layers_read: list[int]) -> None:
    pack = pack_of(source, cache)
    expected = read_experts(pack)
    moved = Path(shutil.move(pack.directory, cache / "elsewhere"))
    shutil.rmtree(source)
    shutil.rmtree(cache / "packs")
    layers_read.clear()
    progress: list[Loading] = []
    found = pack_of(moved, cache, progress.append)
    assert found.directory == moved
    assert found.manifest == pack.manifest
    for layer, parameters in zip(read_experts(found), expected, strict=True):
        assert_same_weights(layer, parameters)
    assert draft_of(found).directory.parent == moved
    assert (progress, layers_read, names(cache)) == ([], [], {"elsewhere"})


def test_a_pack_is_told_from_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    assert is_pack(pack_of(checkpoint, tmp_path).directory)
    assert not is_pack(checkpoint)
    assert not is_pack(tmp_path / "nowhere")
    shutil.copytree(checkpoint, tmp_path / "with-a-manifest")
    (tmp_path / "with-a-manifest" / "manifest.json").write_text("{}")
    assert not is_pack(tmp_path / "with-a-manifest")


def test_a_checkpoint_may_have_a_manifest_of_its_own(source: Path, cache: Path) -> None:
    (source / "manifest.json").write_text('{"not": "ours"}')
    pack = pack_of(source, cache)
    assert pack_of(source, cache) == pack
    assert messages_of(source, cache) == []


def test_the_records_are_found_without_looking_into_the_pack(checkpoint: Path, cache: Path) -> None:
    assert find_records(checkpoint, cache) is None
    pack = pack_of(checkpoint, cache)
    assert find_records(checkpoint, cache) == find_records(pack.directory, cache) == pack.records_path
    (pack.directory / "manifest.json").write_text('{"format_version":99}')
    assert find_records(checkpoint, cache) == pack.records_path
    pack.records_path.unlink()
    assert find_records(checkpoint, cache) is None


def change_weights(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    save_file({name: 2 * t for name, t in tensors.items()}, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json"])
def test_a_changed_checkpoint_is_packed_anew_and_it_is_said_why(source: Path, cache: Path, changed: str) -> None:
    pack = pack_of(source, cache)
    draft = draft_of(pack)
    old = read_experts(pack)[0]["down_proj"]
    if changed == "config.json":
        os.utime(source / changed)
    else:
        change_weights(source)
    assert why_anew(messages_of(source, cache)) == f"Packing anew, because {changed} changed"
    again = pack_of(source, cache)
    assert again.directory == pack.directory
    assert torch.equal(read_experts(again)[0]["down_proj"], old if changed == "config.json" else 2 * old)
    # A draft of the old weights is not for the new ones.
    assert not draft.directory.exists()
    assert names(cache / "packs") == {pack.directory.name}
    assert messages_of(source, cache) == []


def test_a_changed_checkpoint_of_pickled_weights_is_packed_anew(source: Path, cache: Path) -> None:
    weights = source / "model.safetensors"
    state = load_file(weights)
    weights.unlink()
    torch.save(state, source / "pytorch_model.bin")
    old = read_experts(pack_of(source, cache))[0]["down_proj"]
    torch.save({name: 2 * weight for name, weight in state.items()}, source / "pytorch_model.bin")
    assert why_anew(messages_of(source, cache)) == "Packing anew, because pytorch_model.bin changed"
    assert torch.equal(read_experts(pack_of(source, cache))[0]["down_proj"], 2 * old)


def test_weights_in_other_files_are_packed_anew(source: Path, cache: Path) -> None:
    pack_of(source, cache)
    model = load_whole(source)
    (source / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="200KB")
    assert why_anew(messages_of(source, cache)).endswith(".safetensors changed")
    assert_same_weights(read_experts(pack_of(source, cache))[2], experts_of(model)[2])


def test_a_changed_tokenizer_is_copied_and_nothing_is_packed_anew(source: Path, cache: Path) -> None:
    (source / "tokenizer.json").write_text("old")
    pack = pack_of(source, cache)
    before = written(pack.directory)
    (source / "tokenizer.json").write_text("new")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    assert messages_of(source, cache) == []
    assert (pack.directory / "tokenizer.json").read_text() == "new"
    assert (pack.directory / "chat_template.jinja").read_text() == "{{ messages }}"
    after = written(pack.directory)
    assert {name for name in after if before.get(name) != after[name]} == {"tokenizer.json", "chat_template.jinja"}


@pytest.mark.parametrize("version", [1, 3, 99])
def test_a_pack_of_another_format_is_made_anew_and_it_is_said(checkpoint: Path, cache: Path, version: int) -> None:
    pack = pack_of(checkpoint, cache)
    # Version 1 had no checksum, and its fields at the top.
    content = {"format_version": version, "source": {"config.json": [1, 2]}, "layout": {"layers": []}}
    (pack.directory / "manifest.json").write_bytes(msgspec.json.encode(content))
    assert why_anew(messages_of(checkpoint, cache)) == (f"Packing anew, because the pack is of format {version}, not 2")
    assert pack_of(checkpoint, cache) == pack


def test_a_pack_of_version_1_is_replaced_as_a_whole(checkpoint: Path, cache: Path) -> None:
    pack = pack_of(checkpoint, cache)
    (pack.directory / "dense-000.safetensors").rename(pack.directory / "dense.safetensors")
    (pack.directory / "draft-qint4-g32.safetensors").write_bytes(b"quantized")
    (pack.directory / "manifest.json").write_text('{"format_version":1,"source":{},"layout":{"layers":[]}}')
    pack_of(checkpoint, cache)
    assert not names(pack.directory) & {"dense.safetensors", "draft-qint4-g32.safetensors"}


def test_a_pack_without_a_manifest_is_made_anew(checkpoint: Path, cache: Path) -> None:
    pack = pack_of(checkpoint, cache)
    (pack.directory / "manifest.json").unlink()
    pack.records_path.write_bytes(b"half")
    assert pack_of(checkpoint, cache) == pack
    assert_same_weights(read_experts(pack)[0], experts_of(load_whole(checkpoint))[0])


def test_models_of_the_same_name_have_packs_of_their_own(tmp_path: Path, cache: Path) -> None:
    config = mixtral_config(num_layers=1)
    packs = [
        pack_of(save_checkpoint(config, tmp_path / folder / "model", seed=seed), cache)
        for seed, folder in enumerate("ab")
    ]
    assert packs[0].directory != packs[1].directory
    weights = [read_experts(pack)[0]["down_proj"] for pack in packs]
    assert not torch.equal(*weights)


def test_a_relative_path_leads_to_the_same_pack(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = pack_of(checkpoint, cache)
    monkeypatch.chdir(checkpoint.parent)
    assert messages_of(Path(checkpoint.name), cache) == []
    assert pack_of(Path(checkpoint.name), cache) == pack


def test_a_dense_model_is_refused_before_anything_is_written(tmp_path: Path, cache: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        pack_of(save_checkpoint(config, tmp_path / "llama"), cache)
    assert names(cache / "packs") == set()


@pytest.mark.parametrize(("part", "read"), [("lm_head", []), ("layers.1.block_sparse_moe.experts.2.", [0, 1])])
def test_a_checkpoint_that_lacks_weights_is_refused(
    source: Path, cache: Path, layers_read: list[int], part: str, read: list[int]
) -> None:
    tensors = {name: t for name, t in load_file(source / "model.safetensors").items() if part not in name}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="MixtralForCausalLM"):
        pack_of(source, cache)
    # Of dense weights it is known before the first expert.
    assert layers_read == read
    assert names(cache / "packs") == set()


def test_a_checkpoint_without_weights_is_refused(source: Path, cache: Path) -> None:
    (source / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="has no weights"):
        pack_of(source, cache)
    assert names(cache / "packs") == set()


def assert_one_waits_for_the_other(ensure: Callable[[OnProgress], object]) -> None:
    working, may_go_on, waits = threading.Event(), threading.Event(), threading.Event()
    stages: list[str] = []

    def first(message: Loading) -> None:
        working.set()
        assert may_go_on.wait(10)

    def second(message: Loading) -> None:
        stages.append(message.stage)
        waits.set()

    with ThreadPoolExecutor() as pool:
        made = pool.submit(ensure, first)
        assert working.wait(10)
        waited = pool.submit(ensure, second)
        assert waits.wait(10)
        may_go_on.set()
        assert waited.result(10) == made.result(10)
    assert stages == ["Waiting for another process that packs this model"]


def test_of_two_processes_that_want_a_pack_one_makes_it(checkpoint: Path, cache: Path, layers_read: list[int]) -> None:
    assert_one_waits_for_the_other(lambda on_progress: pack_of(checkpoint, cache, on_progress))
    assert layers_read == [0, 1, 2]


def test_of_two_processes_that_want_a_draft_one_makes_it(checkpoint: Path, cache: Path) -> None:
    pack = pack_of(checkpoint, cache)
    assert_one_waits_for_the_other(lambda on_progress: draft_of(pack, QINT4, on_progress))


def by_stage(progress: list[Loading]) -> dict[str, list[int]]:
    done: dict[str, list[int]] = {}
    for message in progress:
        done.setdefault(message.stage, []).append(message.done)
    return done


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_progress_counts_up_to_its_total(source: Path, cache: Path, dtype: torch.dtype) -> None:
    if dtype is torch.float32:  # while the configuration says that it is converted to bfloat16
        tensors = {name: t.float() for name, t in load_file(source / "model.safetensors").items()}
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    progress: list[Loading] = []
    pack = pack_of(source, cache, progress.append)
    draft_of(pack, QINT4, progress.append)
    done = by_stage(progress)
    assert list(done) == ["Packing dense weights", "Packing experts", "Quantizing experts to qint4-g32"]
    dense_bytes = sum(tensor.nbytes for part in pack.dense_parts() for tensor in part.values())
    assert done["Packing dense weights"] == [0, dense_bytes]
    assert done["Packing experts"] == list(range(1, 19))
    assert done["Quantizing experts to qint4-g32"] == [0, 1, 2, 3]
    ends = {message.stage: message.total for message in progress}
    assert [messages[-1] for messages in done.values()] == list(ends.values())


def test_the_peak_of_memory_is_logged(checkpoint: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    draft_of(pack_of(checkpoint, cache))
    packed, quantized = (record.message for record in caplog.records if record.name.startswith("engine.packing"))
    assert packed.startswith(f"packed {checkpoint}: memory peaked at ")
    assert quantized.startswith("quantized the experts to qint4-g32: memory peaked at ")
