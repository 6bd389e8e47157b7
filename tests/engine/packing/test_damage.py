"""Files that are not what was written: said with the file and the way out, and never served."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.errors import PackError
from engine.packing import Pack, is_pack, pack_dtype
from engine.packing.manifest import FORMAT_VERSION
from tests.engine.packing.harness import QINT4, damage_said, draft_of, files, pack_of, read_experts, serve

DENSE = "dense-000.safetensors"
RECORDS = "experts.bin"
DRAFT = "draft-qint4-g32/001.safetensors"
MANIFESTS = ["manifest.json", "draft-qint4-g32/manifest.json"]


def flip(file: Path, offset: int, mask: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= mask
    file.write_bytes(content)


def test_a_pack_without_damage_is_served(own_pack: Path, whole_pack: Pack) -> None:
    serve(own_pack)
    assert files(own_pack) == files(whole_pack.directory)


@pytest.mark.parametrize("name", [DENSE, RECORDS, DRAFT])
@pytest.mark.parametrize("change", [-1, 1, -4096])
def test_a_file_of_another_size_is_noticed_before_it_is_read(own_pack: Path, name: str, change: int) -> None:
    file = own_pack / name
    size = file.stat().st_size
    os.truncate(file, size + change)
    assert f"{file} is {size + change} bytes long instead of {size}; delete" in damage_said(own_pack, file)
    with pytest.raises(PackError, match="bytes long instead of"):
        draft_of(pack_of(own_pack, own_pack))


@pytest.mark.parametrize("name", [DENSE, RECORDS, DRAFT, "manifest.json"])
def test_a_missing_file_is_noticed_before_anything_is_read(own_pack: Path, name: str) -> None:
    (own_pack / name).unlink()
    assert is_pack(own_pack)
    damage_said(own_pack, own_pack / name if name != DRAFT else own_pack / "draft-qint4-g32")
    with pytest.raises(PackError):
        draft_of(pack_of(own_pack, own_pack))


def test_a_draft_without_its_manifest_is_made_anew(own_pack: Path, whole_pack: Pack) -> None:
    (own_pack / "draft-qint4-g32" / "manifest.json").unlink()
    (own_pack / DRAFT).write_bytes(b"half")
    serve(own_pack)
    assert files(own_pack) == files(whole_pack.directory)


@pytest.mark.parametrize("name", [DENSE, DRAFT])
@pytest.mark.parametrize("place", [0.0, 0.01, 0.5, 0.999])
def test_every_byte_of_a_file_of_tensors_is_checked(own_pack: Path, name: str, place: float) -> None:
    file = own_pack / name
    flip(file, int(place * file.stat().st_size))
    assert f"{file} is damaged (wrong checksum); delete {file.parent} to make it anew." in damage_said(own_pack, file)


@pytest.mark.parametrize("place", [0.0, 0.5, 0.999])
def test_a_damaged_record_is_noticed_when_it_is_read(own_pack: Path, place: float) -> None:
    file = own_pack / RECORDS
    flip(file, int(place * file.stat().st_size))
    layer, expert = {0.0: (0, 0), 0.5: (1, 3), 0.999: (2, 5)}[place]
    pack = pack_of(own_pack, own_pack)
    with pytest.raises(PackError, match=rf"experts\.bin is damaged at expert {expert} of layer {layer}; delete"):
        read_experts(pack)
    damage_said(own_pack, file)


def test_no_draft_is_made_of_damaged_records(own_pack: Path) -> None:
    flip(own_pack / RECORDS, -1)
    pack = pack_of(own_pack, own_pack)
    spec = QINT4._replace(group_size=16)
    with pytest.raises(PackError, match="is damaged at expert 5 of layer 2"):
        draft_of(pack, spec)
    assert not [path for path in own_pack.glob("*draft-qint4-g16*") if path.is_dir()]


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("name", MANIFESTS)
def test_every_byte_of_a_manifest_is_checked(own_pack: Path, name: str, bit: int) -> None:
    manifest = own_pack / name
    content = manifest.read_bytes()
    pack = pack_of(own_pack, own_pack)
    is_drafts = name != "manifest.json"
    find: Callable[[], object] = (lambda: draft_of(pack)) if is_drafts else (lambda: pack_dtype(own_pack))
    version_digit = content.index(b":") + 1
    assert content[version_digit : version_digit + 1] == str(FORMAT_VERSION).encode()
    for offset in range(len(content)):
        if is_drafts and offset == version_digit:
            continue  # then the draft is made anew
        flip(manifest, offset, 1 << bit)
        with pytest.raises(PackError) as caught:
            find()
        assert str(manifest.parent) in str(caught.value)
        assert "\n" not in str(caught.value)
        manifest.write_bytes(content)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\x00", b"{}", b'{"format_version":2}', b'{"format_version":2,"checksum":"0"}'],
)
def test_a_damaged_manifest_is_one_sentence_with_the_way_out(checkpoint: Path, cache: Path, content: bytes) -> None:
    pack = pack_of(checkpoint, cache)
    (pack.directory / "manifest.json").write_bytes(content)
    for find in (lambda: pack_of(checkpoint, cache), lambda: pack_dtype(pack.directory)):
        with pytest.raises(PackError, match=r"has a damaged manifest \(.*\); delete .* to make it anew\.") as caught:
            find()
        assert str(pack.directory) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_a_truncated_manifest_is_said(own_pack: Path, cut: int) -> None:
    manifest = own_pack / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-cut])
    assert "damaged manifest" in damage_said(own_pack, own_pack)


def test_the_manifest_of_another_pack_does_not_fit(own_pack: Path, small_checkpoint: Path, cache: Path) -> None:
    other = pack_of(small_checkpoint, cache)
    (own_pack / "manifest.json").write_bytes((other.directory / "manifest.json").read_bytes())
    with pytest.raises(PackError, match="bytes long instead of"):
        pack_of(own_pack, cache)


@pytest.mark.parametrize("version", [1, 3])
def test_a_pack_of_another_format_without_its_source_is_said(own_pack: Path, version: int) -> None:
    manifest = own_pack / "manifest.json"
    content = msgspec.json.decode(manifest.read_bytes()) | {"format_version": version}
    manifest.write_bytes(msgspec.json.encode(content))
    find: Callable[[], object]
    for find in (lambda: pack_of(own_pack, own_pack), lambda: pack_dtype(own_pack)):
        with pytest.raises(PackError) as caught:
            find()
        assert str(caught.value) == (
            f"{own_pack} is a pack of format {version}, but this version of Specter reads format 2; "
            "pack the model again with specter pack."
        )


def test_damage_in_the_cache_is_said_and_not_repaired_in_silence(checkpoint: Path, cache: Path) -> None:
    pack = pack_of(checkpoint, cache)
    pack.records_path.unlink()
    with pytest.raises(PackError, match=r"experts\.bin is missing; delete .* to make it anew"):
        pack_of(checkpoint, cache)
