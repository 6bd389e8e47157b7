"""The checkpoint that a pack is made from: which one it is, and whether it has changed."""

import hashlib
from pathlib import Path

import msgspec

from engine.model.tensor_files import weight_files


class Source(msgspec.Struct, frozen=True):
    path: str
    revision: str | None
    """The commit, where the checkpoint is a snapshot from the hub."""
    files: dict[str, tuple[int, int]]
    """Size and modification time in nanoseconds of its configuration and each file of weights."""

    @classmethod
    def of(cls, model_path: Path) -> "Source":
        files = [model_path / "config.json", *weight_files(model_path)]
        path, revision = _identity(model_path)
        return cls(str(path), revision, {file.name: _stamp(file) for file in files if file.exists()})

    def changes(self, newer: "Source") -> list[str]:
        """The files in which the checkpoint is not what it was."""
        names = sorted(self.files.keys() | newer.files.keys())
        return [name for name in names if self.files.get(name) != newer.files.get(name)]


def pack_name(model_path: Path) -> str:
    """Name of the model's pack in the cache: the same for all revisions of a model, so that a new one replaces it."""
    path, _ = _identity(model_path)
    key = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    return f"{path.name.removeprefix('models--')}-{key}"


def _identity(model_path: Path) -> tuple[Path, str | None]:
    """The model's directory and revision; a snapshot from the hub is `models--ORG--NAME/snapshots/REVISION`."""
    path = model_path.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent, path.name
    return path, None


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
