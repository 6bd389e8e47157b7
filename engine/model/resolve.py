"""From what the user calls a model to a directory that holds it."""

from pathlib import Path

from huggingface_hub import snapshot_download

from engine.errors import ModelNotFoundError, first_line
from engine.protocol import Loading, OnProgress

CONFIGURATION = ["*.json"]
EVERYTHING = [*CONFIGURATION, "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]


def resolve_model(name: str, cache: Path, on_progress: OnProgress) -> Path:
    """A local directory as it is; what is not plainly a path is a hub id, which is downloaded into the cache directory.

    Raises `ModelNotFoundError`.
    """
    return _resolve(name, cache, EVERYTHING, on_progress)


def resolve_configuration(name: str, cache: Path, on_progress: OnProgress) -> Path:
    """As `resolve_model`, but of a hub id only the small files are sure to be there."""
    return _resolve(name, cache, CONFIGURATION, on_progress)


def _resolve(name: str, cache: Path, patterns: list[str], on_progress: OnProgress) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelNotFoundError(
            f"Model '{name}' is a file; give the directory that holds config.json and the weights."
        )
    if name.startswith(("/", "./", "../", "~")):
        raise ModelNotFoundError(f"Model '{name}' is not a directory here; check the path.")
    on_progress(Loading(f"Downloading {name}", 0, 0))
    try:
        return Path(snapshot_download(name, cache_dir=cache / "hub", allow_patterns=patterns))
    except Exception as error:  # its own errors, those of its HTTP client, and of the disk
        raise ModelNotFoundError(
            f"Model '{name}' is not a directory here, and the hub could not give it ({first_line(error)}); "
            "check the path or the id, or use 'demo'."
        ) from error
