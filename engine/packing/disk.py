"""What can go wrong with the disk while a pack is written."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from engine.errors import PackError

SLACK_BYTES = 64 * 1024**2
"""For manifests, tokenizers and the file system's own needs."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of writing `path` into `PackError`."""
    try:
        yield
    except ConnectionError:
        raise  # the server is gone, which reporting progress found out
    except (OSError, SafetensorError) as error:
        raise PackError(
            f"{path} could not be written ({error}); free some space or choose another directory (--cache)."
        ) from error


def require_room(directory: Path, num_bytes: int, written_bytes: int) -> None:
    """Raise `PackError` where the disk of `directory` has no room for `num_bytes`, of which some are written."""
    needed = num_bytes + SLACK_BYTES - written_bytes
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise PackError(
            f"Packing needs {_gb(needed)} in {directory.parent}, but only {_gb(free)} are free there; free "
            f"{_gb(needed - free)} or choose another directory (--cache)."
        )


def size_of(directory: Path) -> int:
    """Bytes of all files below the directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
