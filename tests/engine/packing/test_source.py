import os
import shutil
from pathlib import Path

import pytest
import torch

from engine.packing.source import Source, pack_name
from engine.protocol import Loading
from tests.engine.packing.harness import draft_of, names, pack_of, read_experts
from tests.engine.tiny import mixtral_config, save_checkpoint


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A model in the layout of the hub's cache, without snapshots yet."""
    directory = tmp_path / "hub" / "models--someone--tiny"
    (directory / "blobs").mkdir(parents=True)
    return directory


def add_snapshot(hub: Path, revision: str, contents: Path) -> Path:
    """Files are links to blobs, which revisions share where their contents are the same."""
    snapshot = hub / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for file in contents.iterdir():
        blob = hub / "blobs" / f"{file.name}-{hash(file.read_bytes())}"
        if not blob.exists():
            shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    return snapshot


def checkpoint_of(directory: Path, seed: int) -> Path:
    return save_checkpoint(mixtral_config(num_layers=1), directory, seed=seed, dtype=torch.bfloat16)


def test_a_source_is_its_configuration_and_weights(source: Path) -> None:
    (source / "tokenizer.json").write_text("{}")
    (source / "consolidated.safetensors").write_bytes(b"other weights")
    found = Source.of(source)
    assert (found.path, found.revision) == (str(source), None)
    assert found.files.keys() == {"config.json", "model.safetensors"}
    status = (source / "model.safetensors").stat()
    assert found.files["model.safetensors"] == (status.st_size, status.st_mtime_ns)


def test_of_shards_all_count_and_a_missing_one_too(source: Path) -> None:
    index = '{"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors","c":"model-1.safetensors"}}'
    (source / "model.safetensors.index.json").write_text(index)
    (source / "model.safetensors").rename(source / "model-1.safetensors")
    before = Source.of(source)
    assert before.files.keys() == {"config.json", "model-1.safetensors"}
    (source / "model-2.safetensors").write_bytes(b"downloaded")
    assert before.changes(Source.of(source)) == ["model-2.safetensors"]


def test_changes_are_named_in_order(source: Path) -> None:
    before = Source.of(source)
    assert before.changes(Source.of(source)) == []
    os.utime(source / "model.safetensors")
    os.utime(source / "config.json")
    assert before.changes(Source.of(source)) == ["config.json", "model.safetensors"]
    (source / "model.safetensors").unlink()
    assert "model.safetensors" in before.changes(Source.of(source))


def test_a_name_says_which_model_it_is_and_is_its_paths_own(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "model", tmp_path / "b" / "model", tmp_path / "a" / "other"]
    packs = [pack_name(path) for path in paths]
    assert len(set(packs)) == 3
    assert [name.rpartition("-")[0] for name in packs] == ["model", "model", "other"]
    assert pack_name(tmp_path / "b" / ".." / "a" / "model") == packs[0]
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert pack_name(tmp_path / "link" / "model") == packs[0]


def test_the_revisions_of_a_model_from_the_hub_share_a_name(hub: Path) -> None:
    one, other = pack_name(hub / "snapshots" / "abc"), pack_name(hub / "snapshots" / "def")
    assert one == other
    assert one.startswith("someone--tiny-")
    elsewhere = hub.parent / "models--someone--other" / "snapshots" / "abc"
    assert pack_name(elsewhere) != one


def test_a_folder_called_snapshots_is_no_hub(tmp_path: Path) -> None:
    one, other = tmp_path / "snapshots" / "one", tmp_path / "snapshots" / "other"
    assert pack_name(one) != pack_name(other)
    assert pack_name(one).startswith("one-")


def test_a_new_revision_replaces_the_pack(hub: Path, cache: Path, tmp_path: Path) -> None:
    first = add_snapshot(hub, "abc", checkpoint_of(tmp_path / "v1", seed=0))
    old = pack_of(first, cache)
    draft_of(old)
    weights = read_experts(old)[0]["down_proj"]
    assert (old.manifest.source.path, old.manifest.source.revision) == (str(hub), "abc")
    second = add_snapshot(hub, "def", checkpoint_of(tmp_path / "v2", seed=1))
    progress: list[Loading] = []
    new = pack_of(second, cache, progress.append)
    assert progress[0].stage == "Packing anew, because model.safetensors changed"
    assert new.directory == old.directory
    assert new.manifest.source.revision == "def"
    assert not torch.equal(read_experts(new)[0]["down_proj"], weights)
    assert names(cache / "packs") == {new.directory.name}
    assert not list(new.directory.glob("draft-*"))


def test_a_new_revision_with_the_same_weights_keeps_the_pack(
    hub: Path, cache: Path, tmp_path: Path, layers_read: list[int]
) -> None:
    contents = checkpoint_of(tmp_path / "v1", seed=0)
    (contents / "chat_template.jinja").write_text("old")
    pack_of(add_snapshot(hub, "abc", contents), cache)
    (contents / "chat_template.jinja").write_text("new")
    layers_read.clear()
    pack = pack_of(add_snapshot(hub, "def", contents), cache)
    assert layers_read == []
    assert (pack.directory / "chat_template.jinja").read_text() == "new"
