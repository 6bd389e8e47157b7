"""The file of full-precision experts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
import xxhash

from engine.direct_io import DirectFile
from engine.errors import PackError
from engine.experts.layout import ExpertId, ExpertLayout


class RecordFile:
    """All records, in the order of `ExpertLayout.experts()`; may be read from several threads.

    Stateful: remembers which records it has compared with their checksums. `close` it.
    """

    def __init__(self, path: Path, layout: ExpertLayout, checksums: Sequence[int]) -> None:
        """`checksums` [num_experts] are those of the records as they were written. Raises `PackError`, `OSError`."""
        assert len(checksums) == layout.num_experts
        size, expected = path.stat().st_size, layout.num_experts * layout.expert_bytes
        if size != expected:
            raise PackError(
                f"{path} has {size} bytes instead of {expected}; delete its directory to pack the model anew."
            )
        self.expert_bytes = layout.expert_bytes
        self._path = path
        self._layout = layout
        self._checksums = checksums
        self._checked: set[ExpertId] = set()
        self._file = DirectFile(path)

    def is_checked(self, expert: ExpertId) -> bool:
        """Whether the record has been read and found intact; only then may it be read in parts."""
        return expert in self._checked

    def read(self, expert: ExpertId, destination: torch.Tensor, offset: int = 0) -> None:
        """Fill `destination`, uint8 [n] in host memory, its start aligned to a page, from `offset` bytes on.

        Raises `OSError`, and `PackError` where the first read of a record finds other content than was written; a
        damaged record is noticed again by each later read.
        """
        content = destination.numpy().data
        assert self.is_checked(expert) or content.nbytes == self.expert_bytes
        index = self._layout.record_index(expert)
        self._file.read(index * self.expert_bytes + offset, content)
        # Once is enough: this is for what has happened to the file since it was written, not for a failing disk.
        if expert not in self._checked:
            if checksum(content) != self._checksums[index]:
                raise PackError(
                    f"{self._path} is damaged at expert {expert.expert} of layer {expert.layer}; "
                    "delete its directory to pack the model anew."
                )
            self._checked.add(expert)

    def close(self) -> None:
        """No read may be running or follow. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def checksum(content: memoryview) -> int:
    """XXH3, 64 bits: as fast as memory, and other threads run meanwhile. Tells damage, not intent."""
    return xxhash.xxh3_64_intdigest(content)
