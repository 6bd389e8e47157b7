from pathlib import Path

import msgspec
import pytest
import xxhash

from engine.errors import PackError
from engine.packing.manifest import (
    FORMAT_VERSION,
    DraftManifest,
    FileEntry,
    check_size,
    manifest_version,
    read_manifest,
    write_manifest,
)

MANIFEST = DraftManifest([FileEntry("000.safetensors", 10, 2**64 - 1), FileEntry("001.safetensors", 0, 0)])


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path, DraftManifest) == MANIFEST
    assert manifest_version(tmp_path) == FORMAT_VERSION == 2


def test_a_manifest_is_sealed_with_the_checksum_of_its_content(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    sealed = msgspec.json.decode((tmp_path / "manifest.json").read_bytes())
    assert list(sealed) == ["format_version", "checksum", "content"]
    content = msgspec.json.encode(MANIFEST)
    assert (tmp_path / "manifest.json").read_bytes().endswith(content + b"}")
    assert sealed["checksum"] == f"{xxhash.xxh3_64_intdigest(content):016x}"


def test_the_version_is_read_of_any_format(tmp_path: Path) -> None:
    assert manifest_version(tmp_path) is None
    assert manifest_version(tmp_path / "nowhere") is None
    (tmp_path / "manifest.json").write_text('{"format_version":1,"source":{},"layout":{"layers":[]}}')
    assert manifest_version(tmp_path) == 1
    (tmp_path / "manifest.json").write_text('{"what":"else","format_version":77}')
    assert manifest_version(tmp_path) == 77


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format_version":"2"}', '{"format_version":null}'])
def test_a_version_that_cannot_be_read_is_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(PackError, match=rf"^{tmp_path} has a damaged manifest \(.+\); delete {tmp_path} to make it"):
        manifest_version(tmp_path)


def test_a_manifest_that_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=rf"^{tmp_path} has a damaged manifest \(.*No such file.*\); delete {tmp_path}"):
        read_manifest(tmp_path, DraftManifest)


def test_a_changed_content_is_noticed(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    file = tmp_path / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"num_bytes":10', b'"num_bytes":11'))
    with pytest.raises(PackError, match=r"wrong checksum\); delete"):
        read_manifest(tmp_path, DraftManifest)


def test_a_size_is_checked_and_the_remedy_said(tmp_path: Path) -> None:
    file = tmp_path / "000.safetensors"
    with pytest.raises(PackError) as caught:
        check_size(file, 10)
    assert str(caught.value) == f"{file} is missing; delete {tmp_path} to make it anew."
    file.write_bytes(b"0123456789")
    check_size(file, 10)
    with pytest.raises(PackError) as caught:
        check_size(file, 11)
    assert str(caught.value) == f"{file} is 10 bytes long instead of 11; delete {tmp_path} to make it anew."
