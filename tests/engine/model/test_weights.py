import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from engine.errors import UnsupportedModelError
from engine.model import weights
from engine.model.checkpoint import read_config
from engine.model.tensor_files import weight_files
from engine.model.weights import checkpoint_dtype
from tests.engine.families import FAMILIES
from tests.engine.model.checkpoints import (
    EXPERT,
    assert_as_transformers_loads_it,
    changeable_mixtral,
    randomize,
    reader_of,
    set_config,
    split,
    store,
    stored,
)
from tests.engine.oracle import assert_dense_weights, assert_same_weights, experts_of, load_whole
from tests.engine.tiny import VOCAB_SIZE, mixtral_config, save_checkpoint


def read_all(checkpoint: Path) -> None:
    reader = reader_of(checkpoint)
    for _ in reader.dense_parts():
        pass
    for layer in range(len(reader.experts)):
        reader.layer(layer)


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return changeable_mixtral(tmp_path)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return randomize(save_checkpoint(mixtral_config(num_layers=1, is_tied=True), tmp_path / "tied"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_transformers_loads_it(family: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(FAMILIES[family](), tmp_path / family, dtype=torch.bfloat16)
    assert_as_transformers_loads_it(randomize(checkpoint))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v4"])
def test_weights_may_have_the_models_own_names(family: str, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(FAMILIES[family](), tmp_path / family, dtype=torch.bfloat16)
    store(checkpoint, {name: t.clone() for name, t in load_whole(checkpoint).state_dict().items()})
    assert_as_transformers_loads_it(randomize(checkpoint))


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_read_as_they_are(dtype: torch.dtype, family: str, tmp_path: Path) -> None:
    checkpoint = randomize(save_checkpoint(FAMILIES[family](), tmp_path / "model", dtype=dtype))
    assert reader_of(checkpoint).dtype is dtype
    assert_as_transformers_loads_it(checkpoint)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_shards_are_read_as_one_file(family: str, tmp_path: Path) -> None:
    single = randomize(save_checkpoint(FAMILIES[family](), tmp_path / "single", dtype=torch.bfloat16))
    load_whole(single).save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(weight_files(tmp_path / "shards")) > 3
    assert_as_transformers_loads_it(tmp_path / "shards")
    expected = experts_of(load_whole(single))
    for layer, parameters in enumerate(expected):
        assert_same_weights(reader_of(tmp_path / "shards").layer(layer), parameters)


def test_an_expert_may_be_spread_over_shards(mixtral: Path) -> None:
    file_of = split(mixtral)
    assert len({file_of[f"{EXPERT}.{projection}.weight"] for projection in ("w1", "w2", "w3")}) > 1
    assert_as_transformers_loads_it(mixtral)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_pickled_weights_are_read_too(mixtral: Path, is_sharded: bool) -> None:
    tensors = stored(mixtral)
    (mixtral / "model.safetensors").unlink()
    if is_sharded:
        file_of = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(tensors)}
        for file in set(file_of.values()):
            torch.save({name: tensors[name] for name in tensors if file_of[name] == file}, mixtral / file)
        index = json.dumps({"metadata": {}, "weight_map": file_of})
        (mixtral / "pytorch_model.bin.index.json").write_text(index)
    else:
        torch.save(tensors, mixtral / "pytorch_model.bin")
    assert len(weight_files(mixtral)) == 1 + is_sharded
    assert_as_transformers_loads_it(mixtral)


def test_the_layers_can_be_read_in_any_order(mixtral: Path) -> None:
    expected, reader = experts_of(load_whole(mixtral)), reader_of(mixtral)
    for layer in (2, 0, 2, 1):
        assert_same_weights(reader.layer(layer), expected[layer])


def test_nothing_that_was_read_stays_in_the_model(mixtral: Path) -> None:
    reader = reader_of(mixtral)
    parts = reader.dense_parts()
    first = next(parts)
    assert all(tensor.is_meta for tensor in reader._model.state_dict().values())
    reader.layer(1)
    assert all(tensor.is_meta for tensor in reader._model.state_dict().values())
    assert not any(tensor.is_meta for tensor in first.values())


def test_dense_weights_come_in_parts_of_about_the_given_size(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {name: tensor.nbytes for name, tensor in stored(mixtral).items() if "experts" not in name}
    monkeypatch.setattr(weights, "PART_BYTES", 20_000)
    parts = [sum(tensor.nbytes for tensor in part.values()) for part in reader_of(mixtral).dense_parts()]
    assert len(parts) > 2
    assert max(parts) < 20_000 + max(sizes.values())
    assert sum(parts) == sum(sizes.values()) == reader_of(mixtral).dense_bytes
    assert_dense_weights(reader_of(mixtral).dense_parts(), load_whole(mixtral))


@pytest.mark.parametrize("names", [["embed"], ["head"], ["embed", "head"]])
def test_of_tied_weights_one_is_enough(tied: Path, names: list[str]) -> None:
    tensors = stored(tied)
    embeddings = tensors.pop("model.embed_tokens.weight")
    assert "lm_head.weight" not in tensors
    stored_as = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
    store(tied, tensors | {stored_as[name]: embeddings.clone() for name in names})
    assert_as_transformers_loads_it(tied)


def test_tied_weights_that_differ_are_both_read(tied: Path) -> None:
    store(tied, stored(tied) | {"lm_head.weight": torch.randn(VOCAB_SIZE, 64)})
    whole = load_whole(tied)
    assert not torch.equal(whole.get_parameter("lm_head.weight"), whole.get_parameter("model.embed_tokens.weight"))
    assert_dense_weights(reader_of(tied).dense_parts(), whole)


def test_without_either_of_the_tied_weights_it_is_refused(tied: Path) -> None:
    tensors = stored(tied)
    del tensors["model.embed_tokens.weight"]
    store(tied, tensors)
    with pytest.raises(UnsupportedModelError, match=r"lacks: .*model\.embed_tokens\.weight"):
        read_all(tied)


@pytest.mark.parametrize(
    "name", ["model.extra.weight", "model.layers.7.block_sparse_moe.experts.0.w1.weight", "rotary_emb.inv_freq"]
)
def test_a_tensor_that_the_model_does_not_know_is_left_out(mixtral: Path, name: str) -> None:
    store(mixtral, stored(mixtral) | {name: torch.ones(96, 64)})
    assert_as_transformers_loads_it(mixtral)


def remove(checkpoint: Path, part: str) -> None:
    tensors = stored(checkpoint)
    kept = {name: tensor for name, tensor in tensors.items() if part not in name}
    assert len(kept) < len(tensors)
    store(checkpoint, kept)


def refusal(checkpoint: Path) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        read_all(checkpoint)
    message = str(caught.value)
    assert "\n" not in message
    assert "MixtralForCausalLM" in message
    return message


def test_dense_weights_that_are_missing_are_named(mixtral: Path) -> None:
    remove(mixtral, "layers.1.input_layernorm")
    assert "lacks: model.layers.1.input_layernorm.weight." in refusal(mixtral)
    remove(mixtral, "layernorm")
    assert refusal(mixtral).endswith("layernorm.weight and 1 more.")


def test_missing_dense_weights_are_noticed_by_the_end_of_the_dense_parts(mixtral: Path) -> None:
    remove(mixtral, "lm_head")
    with pytest.raises(UnsupportedModelError, match=r"lacks: lm_head\.weight\."):
        list(reader_of(mixtral).dense_parts())


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (f"{EXPERT}.", r"layers\.1\..*gate_up_proj is \[5, 192, 64\] instead of \[6, 192, 64\]"),
        (f"{EXPERT}.w2", r"layers\.1\..*down_proj is \[5, 64, 96\] instead of \[6, 64, 96\]"),
        (f"{EXPERT}.w1", r"layers\.1\..*gate_up_proj: Sizes of tensors must match"),
        ("layers.1.block_sparse_moe.experts.", r"lacks: model\.layers\.1\.mlp\.experts\.down_proj, "),
    ],
)
def test_experts_that_are_missing_are_named(mixtral: Path, part: str, message: str) -> None:
    remove(mixtral, part)
    with pytest.raises(UnsupportedModelError, match=message):
        reader_of(mixtral).layer(1)
    reader_of(mixtral).layer(0)
    assert "layers.1" in refusal(mixtral)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.norm.weight", "model.norm.weight is [32] instead of [64]"),
        (f"{EXPERT}.w2.weight", "model.layers.1.mlp.experts.down_proj: stack expects each tensor to be equal size"),
    ],
)
def test_weights_of_another_shape_are_named(mixtral: Path, name: str, message: str) -> None:
    tensors = stored(mixtral)
    tensors[name] = tensors[name][:32].clone()
    store(mixtral, tensors)
    assert message in refusal(mixtral)


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no experts"):
        reader_of(save_checkpoint(config, tmp_path / "llama"))


@pytest.mark.parametrize(
    ("in_config", "in_file", "expected"),
    [
        ("float32", torch.bfloat16, torch.float32),
        ("bfloat16", torch.float32, torch.bfloat16),
        (None, torch.bfloat16, torch.bfloat16),
        (None, torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_the_type_is_the_configurations_or_else_that_of_the_weights(
    tmp_path: Path, family: str, in_config: str | None, in_file: torch.dtype, expected: torch.dtype
) -> None:
    checkpoint = randomize(save_checkpoint(FAMILIES[family](), tmp_path / "model", dtype=in_file))
    set_config(checkpoint, dtype=in_config)
    assert checkpoint_dtype(read_config(checkpoint), checkpoint) is expected
    assert_as_transformers_loads_it(checkpoint)
    reader = reader_of(checkpoint)
    assert reader.dense_bytes == sum(t.nbytes for part in reader.dense_parts() for t in part.values())


def test_of_several_types_it_is_not_that_of_most_weights(mixtral: Path) -> None:
    set_config(mixtral, dtype=None)
    # The file begins with the wider types.
    store(mixtral, {name: t.float() if name == "lm_head.weight" else t for name, t in stored(mixtral).items()})
    assert reader_of(mixtral).dtype is torch.float32
    assert_as_transformers_loads_it(mixtral)


def test_a_checkpoint_without_floating_point_weights_counts_as_float32(mixtral: Path) -> None:
    set_config(mixtral, dtype=None)
    store(mixtral, {"x": torch.zeros(1, dtype=torch.int64)})
    assert checkpoint_dtype(read_config(mixtral), mixtral) is torch.float32
