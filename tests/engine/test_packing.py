import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import GptOssConfig, LlamaConfig

from engine.device import empty_pages
from engine.errors import PackError, UnsupportedModelError
from engine.experts.layout import ExpertId
from engine.kernels.quantization import QuantizationSpec, QuantizedStack, dequantize, quantize
from engine.model.checkpoint import dense_state, expert_parameters, experts_modules, load_whole
from engine.packing import Pack, ensure_draft, ensure_pack
from engine.protocol import Loading, OnProgress
from tests.engine.harness import ignore_progress
from tests.engine.tiny import mixtral_config, qwen3_moe_config, save_checkpoint

QINT4 = QuantizationSpec("qint4", 32)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def checkpoint(request: pytest.FixtureRequest, architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = mixtral_config() if architecture == "mixtral" else qwen3_moe_config()
    path = tmp_path_factory.mktemp("checkpoints") / f"{architecture}-{request.param}"
    return save_checkpoint(config, path, dtype=getattr(torch, request.param))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small checkpoint of the test's own."""
    return save_checkpoint(mixtral_config(num_layers=1), tmp_path / "model", dtype=torch.bfloat16)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def pack_of(source: Path, cache: Path) -> Pack:
    return ensure_pack(source, cache, ignore_progress)


def packs_in(cache: Path) -> list[Path]:
    return [path for path in (cache / "packs").iterdir() if path.suffix != ".lock"]


def identities(directory: Path) -> dict[str, tuple[int, int]]:
    """What changes when a file is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}


def first_expert(pack: Pack) -> torch.Tensor:
    record = empty_pages(1, pack.layout.expert_bytes)[0]
    with pack.open_records() as records:
        records.read(ExpertId(0, 0), record)
    return pack.layout.views(0, record)["gate_up_proj"]


def checkpoint_experts(source: Path) -> torch.Tensor:
    (module,) = [module for _, module in experts_modules(load_whole(source))]
    return expert_parameters(module)["gate_up_proj"]


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writing further than this into a file is an OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_expert_and_every_dense_weight_is_restored_bit_for_bit(checkpoint: Path, cache: Path) -> None:
    pack = pack_of(checkpoint, cache)
    model = load_whole(checkpoint)
    modules = [module for _, module in experts_modules(model)]
    assert [layer.num_experts for layer in pack.layout.layers] == [
        expert_parameters(module)["down_proj"].shape[0] for module in modules
    ]
    record = empty_pages(1, pack.layout.expert_bytes)[0]
    with pack.open_records() as records:
        for expert in pack.layout.experts():
            records.read(expert, record)
            weights = pack.layout.views(expert.layer, record)
            parameters = expert_parameters(modules[expert.layer])
            assert weights.keys() == parameters.keys()
            for name, weight in weights.items():
                assert weight.dtype == parameters[name].dtype
                assert torch.equal(weight, parameters[name][expert.expert])
    dense, expected = load_file(pack.dense_file), dense_state(model)
    assert dense.keys() == expected.keys()
    for name, weight in dense.items():
        assert weight.dtype == expected[name].dtype
        assert torch.equal(weight, expected[name])


def test_a_pack_is_made_once(source: Path, cache: Path) -> None:
    pack = pack_of(source, cache)
    ensure_draft(pack, QINT4, ignore_progress)
    before = identities(pack.directory)
    progress: list[Loading] = []
    again = ensure_pack(source, cache, progress.append)
    assert again == pack
    assert ensure_draft(again, QINT4, progress.append) == pack.draft_file(QINT4)
    assert identities(pack.directory) == before
    assert set(before) == {"manifest.json", "dense.safetensors", "experts.bin", "draft-qint4-g32.safetensors"}
    assert progress == []


def test_nothing_but_the_pack_is_left_in_the_cache(source: Path, cache: Path) -> None:
    pack = pack_of(source, cache)
    assert packs_in(cache) == [pack.directory]


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json"])
def test_a_changed_checkpoint_is_packed_anew(source: Path, cache: Path, changed: str) -> None:
    pack = pack_of(source, cache)
    draft = ensure_draft(pack, QINT4, ignore_progress)
    old = first_expert(pack).clone()
    if changed == "model.safetensors":
        save_checkpoint(mixtral_config(num_layers=1), source, seed=1, dtype=torch.bfloat16)
    else:
        os.utime(source / changed)
    before = identities(pack.directory)
    again = pack_of(source, cache)
    assert again.directory == pack.directory
    assert identities(pack.directory)["experts.bin"] != before["experts.bin"]
    assert torch.equal(first_expert(again), old) == (changed == "config.json")
    # A draft of the old weights is not for the new ones.
    assert not draft.exists()
    assert packs_in(cache) == [pack.directory]


def test_a_changed_checkpoint_of_pickled_weights_is_packed_anew(source: Path, cache: Path) -> None:
    weights = source / "model.safetensors"
    state = load_file(weights)
    weights.unlink()
    torch.save(state, source / "pytorch_model.bin")
    pack_of(source, cache)
    torch.save({name: 2 * weight for name, weight in state.items()}, source / "pytorch_model.bin")
    assert torch.equal(first_expert(pack_of(source, cache)), checkpoint_experts(source)[0])


def test_models_of_the_same_name_have_packs_of_their_own(tmp_path: Path, cache: Path) -> None:
    config = mixtral_config(num_layers=1)
    packs = [
        pack_of(save_checkpoint(config, tmp_path / folder / "model", seed=i), cache) for i, folder in enumerate("ab")
    ]
    assert packs[0].directory != packs[1].directory
    assert not torch.equal(first_expert(packs[0]), first_expert(packs[1]))


def test_a_relative_path_leads_to_the_same_pack(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = pack_of(source, cache)
    monkeypatch.chdir(source.parent)
    progress: list[Loading] = []
    assert ensure_pack(Path(source.name), cache, progress.append) == pack
    assert progress == []


class Interrupted(BaseException):
    """As Ctrl-C or a kill would end it."""


def test_an_interrupted_pack_is_never_served(source: Path, cache: Path) -> None:
    def interrupt(message: Loading) -> None:
        if message.stage == "Packing experts" and message.done == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        ensure_pack(source, cache, interrupt)
    assert packs_in(cache) == []
    pack = pack_of(source, cache)
    assert torch.equal(first_expert(pack), checkpoint_experts(source)[0])


def test_what_a_killed_process_left_is_not_served_either(source: Path, cache: Path) -> None:
    # The directory is complete but for its last file, and under its temporary name.
    pack = pack_of(source, cache)
    (pack.directory / "manifest.json").unlink()
    pack.directory.rename(pack.directory.with_name(f".{pack.directory.name}.partial"))
    again = pack_of(source, cache)
    assert packs_in(cache) == [again.directory]
    assert (again.directory / "manifest.json").exists()
    assert torch.equal(first_expert(again), checkpoint_experts(source)[0])


def test_a_pack_without_a_manifest_is_made_anew(source: Path, cache: Path) -> None:
    pack = pack_of(source, cache)
    (pack.directory / "manifest.json").unlink()
    (pack.directory / "experts.bin").write_bytes(b"half")
    assert torch.equal(first_expert(pack_of(source, cache)), checkpoint_experts(source)[0])


@pytest.mark.parametrize("content", [b"", b"{", b'{"format_version": 1}', b"\xff\x00", b"[]"])
def test_a_damaged_manifest_is_one_sentence_with_the_way_out(source: Path, cache: Path, content: bytes) -> None:
    pack = pack_of(source, cache)
    (pack.directory / "manifest.json").write_bytes(content)
    with pytest.raises(PackError, match=r"has a damaged manifest .*; delete that directory to pack anew\.") as caught:
        pack_of(source, cache)
    assert str(pack.directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pack_of_another_format_is_made_anew(source: Path, cache: Path) -> None:
    pack = pack_of(source, cache)
    manifest = pack.directory / "manifest.json"
    content = msgspec.json.decode(manifest.read_bytes())
    content["format_version"] += 1
    manifest.write_bytes(msgspec.json.encode(content))
    pack_of(source, cache)
    assert msgspec.json.decode(manifest.read_bytes())["format_version"] == content["format_version"] - 1


@pytest.mark.parametrize("limit", [1000, 200_000])
def test_a_full_disk_is_said_and_leaves_nothing_behind(source: Path, cache: Path, limit: int) -> None:
    # The first limit stops the dense weights, the second the experts.
    with largest_file(limit), pytest.raises(PackError, match=r"could not be written .*; free some space") as caught:
        pack_of(source, cache)
    assert "\n" not in str(caught.value)
    assert packs_in(cache) == []
    pack_of(source, cache)


def test_a_full_disk_leaves_the_old_pack_as_it_was(source: Path, cache: Path) -> None:
    pack = pack_of(source, cache)
    before = identities(pack.directory)
    os.utime(source / "config.json")
    with largest_file(1000), pytest.raises(PackError):
        pack_of(source, cache)
    assert identities(pack.directory) == before


def test_a_full_disk_while_quantizing_leaves_no_draft(source: Path, cache: Path) -> None:
    pack = pack_of(source, cache)
    before = identities(pack.directory)
    with largest_file(1000), pytest.raises(PackError, match="could not be written"):
        ensure_draft(pack, QINT4, ignore_progress)
    assert identities(pack.directory) == before
    assert ensure_draft(pack, QINT4, ignore_progress).exists()


def test_a_cache_that_cannot_be_written_is_said(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()  # a file where a directory should be
    with pytest.raises(PackError, match=r"could not be written .*choose another --cache"):
        pack_of(source, tmp_path / "cache")


def test_a_server_that_is_gone_is_no_full_disk(source: Path, cache: Path) -> None:
    def report(message: Loading) -> None:
        if message.done:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        ensure_pack(source, cache, report)
    assert packs_in(cache) == []


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


def test_of_two_processes_that_want_a_pack_one_makes_it(source: Path, cache: Path) -> None:
    assert_one_waits_for_the_other(lambda on_progress: ensure_pack(source, cache, on_progress))


def test_of_two_processes_that_want_a_draft_one_makes_it(source: Path, cache: Path) -> None:
    pack = pack_of(source, cache)
    assert_one_waits_for_the_other(lambda on_progress: ensure_draft(pack, QINT4, on_progress))


def test_a_dense_model_is_refused_before_anything_is_written(tmp_path: Path, cache: Path) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        pack_of(save_checkpoint(config, tmp_path / "llama"), cache)
    assert packs_in(cache) == []


def test_records_of_the_wrong_size_are_refused(source: Path, cache: Path) -> None:
    pack = pack_of(source, cache)
    os.truncate(pack.directory / "experts.bin", 4096)
    with pytest.raises(PackError, match="instead of"):
        pack_of(source, cache).open_records()
    with pytest.raises(PackError, match="instead of"):
        ensure_draft(pack, QINT4, ignore_progress)


def test_drafts_of_several_precisions_lie_side_by_side(source: Path, cache: Path) -> None:
    pack = pack_of(source, cache)
    specs = [QINT4, QuantizationSpec("qint4", 16), QuantizationSpec("qint2", 32), QuantizationSpec("qint8", 32)]
    files = [ensure_draft(pack, spec, ignore_progress) for spec in specs]
    assert len(set(files)) == len(specs)
    assert all(file.exists() for file in files)
    # For the 8-bit types the group size says nothing.
    assert ensure_draft(pack, QuantizationSpec("qint8", 64), ignore_progress) == files[-1]


def test_a_draft_is_the_experts_quantized(checkpoint: Path, cache: Path) -> None:
    pack = pack_of(checkpoint, cache)
    tensors = load_file(ensure_draft(pack, QuantizationSpec("qint8", 0), ignore_progress))
    parameters = [expert_parameters(module) for _, module in experts_modules(load_whole(checkpoint))]
    assert len(tensors) == 3 * sum(len(layer) for layer in parameters)
    for layer, weights in enumerate(parameters):
        for name, weight in weights.items():
            stack = QuantizedStack(*(tensors[f"{layer}.{name}.{part}"] for part in QuantizedStack._fields))
            for expert, matrix in enumerate(weight):
                restored = dequantize(stack, expert, QuantizationSpec("qint8", 0), matrix.shape)
                assert bool((restored - matrix).abs().max() < 0.01 * matrix.abs().max())


def test_transposed_matrices_are_quantized_along_their_inputs(tmp_path: Path, cache: Path) -> None:
    config = GptOssConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    checkpoint = save_checkpoint(config, tmp_path / "gpt-oss")
    pack = pack_of(checkpoint, cache)
    (layout,) = pack.layout.layers
    assert layout.is_transposed
    (module,) = [module for _, module in experts_modules(load_whole(checkpoint))]
    tensors = load_file(ensure_draft(pack, QINT4, ignore_progress))
    parameters = {name: parameter.detach() for name, parameter in expert_parameters(module).items()}
    assert {tensor.name for tensor in layout.tensors} == parameters.keys()
    for name, parameter in parameters.items():
        if name.endswith("_bias"):
            assert torch.equal(tensors[f"0.{name}"], parameter)
            continue
        expected = quantize(parameter.transpose(1, 2), QINT4)
        for part, tensor in expected._asdict().items():
            assert torch.equal(tensors[f"0.{name}.{part}"], tensor)


def test_progress_counts_up_to_its_total(source: Path, cache: Path) -> None:
    progress: list[Loading] = []
    pack = ensure_pack(source, cache, progress.append)
    ensure_draft(pack, QINT4, progress.append)
    by_stage: dict[str, list[Loading]] = {}
    for message in progress:
        by_stage.setdefault(message.stage, []).append(message)
    assert list(by_stage) == ["Loading the checkpoint", "Packing experts", "Quantizing experts to qint4-g32"]
    assert [message.done for message in by_stage["Packing experts"]] == [1, 2, 3, 4, 5, 6]
    for messages in list(by_stage.values())[1:]:
        assert messages[-1].done == messages[-1].total
