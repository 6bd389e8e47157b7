"""The small files that make a pack complete: configuration, tokenizer, chat template, licence."""

import filecmp
import shutil
from pathlib import Path

from engine.packing.manifest import MANIFEST

COPIED_PATTERNS = ("*.json", "*.jinja", "tokenizer*", "*.model", "*.txt", "LICENSE*", "README.md")
MAX_COPIED_BYTES = 64 * 1024**2


def copy_small_files(model_path: Path, directory: Path) -> None:
    """Copy those that the pack does not have as they are now; whoever reads one meanwhile gets the old or the new."""
    for file in {file for pattern in COPIED_PATTERNS for file in model_path.glob(pattern) if _is_copied(file)}:
        copy = directory / file.name
        if copy.exists() and filecmp.cmp(file, copy):
            continue
        partial = directory / f".{file.name}.partial"
        shutil.copy2(file, partial)
        partial.replace(copy)


def _is_copied(file: Path) -> bool:
    is_of_weights = file.name.endswith(".index.json") or file.name == MANIFEST
    return file.is_file() and not is_of_weights and file.stat().st_size <= MAX_COPIED_BYTES
