"""A file of records and what it contains, for the tests of whatever reads one."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.experts.layout import ExpertId, ExpertLayout, LayerLayout
from engine.experts.records import RecordFile, checksum

LAYOUT = ExpertLayout(
    (
        LayerLayout.of({"up_proj": torch.empty(3, 40, 40)}, is_transposed=False),
        LayerLayout.of({"up_proj": torch.empty(5, 8, 8)}, is_transposed=False),
    )
)


@dataclass
class WrittenRecords:
    path: Path
    content: torch.Tensor
    """uint8 [num_experts, expert_bytes]"""

    def record(self, expert: ExpertId) -> torch.Tensor:
        return self.content[LAYOUT.record_index(expert)]

    def open(self) -> RecordFile:
        return RecordFile(self.path, LAYOUT, [checksum(record.numpy().data) for record in self.content])

    def damage(self, expert: ExpertId) -> None:
        """Flip one bit in the middle of the expert's record."""
        with self.path.open("r+b") as file:
            file.seek(LAYOUT.record_index(expert) * LAYOUT.expert_bytes + LAYOUT.expert_bytes // 2)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))


def write_records(directory: Path) -> WrittenRecords:
    """Records of random bytes, all different."""
    generator = torch.Generator().manual_seed(0)
    shape = (LAYOUT.num_experts, LAYOUT.expert_bytes)
    written = WrittenRecords(
        directory / "experts.bin", torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    )
    written.path.write_bytes(written.content.numpy().tobytes())
    return written
