"""The tensors of a checkpoint by name, in whatever files, each read when it is wanted."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from engine.errors import ModelNotFoundError, first_line


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    """The file of each tensor."""


def weight_files(model_path: Path) -> list[Path]:
    """The files that transformers reads the weights from; empty where there are none."""
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if (model_path / single).exists():
            return [model_path / single]
        if (model_path / index).exists():
            with _reading(model_path):
                weight_map = msgspec.json.decode((model_path / index).read_bytes(), type=_Index).weight_map
            return [model_path / name for name in sorted(set(weight_map.values()))]
    return []


@dataclass(frozen=True)
class _Unread:
    """A tensor that is read, as a whole, when it is indexed. safetensors' own slices hold it twice for a moment."""

    file: safe_open
    name: str

    def __getitem__(self, everything: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.file.get_tensor(self.name)  # type: ignore[no-untyped-call]
        return tensor


class TensorFiles:
    """A checkpoint's tensors by name, in whatever files."""

    def __init__(self, model_path: Path) -> None:
        """Raises `ModelNotFoundError` where a file is missing or damaged."""
        self._model_path = model_path
        self._file_of: dict[str, Path] = {}
        self._num_weights_of: dict[str, int] = {}
        self.first_dtype: torch.dtype | None = None
        """The type of the first floating-point tensor, which transformers takes for that of all; None without one."""
        with _reading(model_path):
            for file in weight_files(model_path):
                for name, tensor in _mapped(file).items():
                    self._file_of[name] = file
                    self._num_weights_of[name] = tensor.numel()
                    if self.first_dtype is None and tensor.is_floating_point():
                        self.first_dtype = tensor.dtype

    @property
    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def num_weights(self, names: Iterable[str]) -> int:
        return sum(self._num_weights_of[name] for name in names)

    @contextmanager
    def opened(self, names: Iterable[str]) -> Iterator[dict[str, _Unread | torch.Tensor]]:
        """The tensors, of which each is read when it is indexed (`tensor[...]`), within the block.

        Raises `ModelNotFoundError`.
        """
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        with ExitStack() as stack:
            tensors: dict[str, _Unread | torch.Tensor] = {}
            with _reading(self._model_path):
                for file, wanted in by_file.items():
                    tensors.update(_unread(file, wanted, stack))
            yield tensors


@contextmanager
def _reading(model_path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, UnpicklingError, SafetensorError, msgspec.DecodeError) as error:
        raise ModelNotFoundError(f"{model_path} has weights that cannot be read ({first_line(error)}).") from error


def _mapped(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, of which nothing but the header is read until they are used."""
    if file.suffix != ".safetensors":
        return dict(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - it is no dict


def _unread(file: Path, names: list[str], stack: ExitStack) -> Mapping[str, _Unread | torch.Tensor]:
    if file.suffix != ".safetensors":
        mapped = _mapped(file)
        return {name: mapped[name] for name in names}
    # Read, not mapped: the pages of a mapping would count as this process's memory.
    tensors = stack.enter_context(safe_open(file, "pt", backend="pread"))
    return {name: _Unread(tensors, name) for name in names}
