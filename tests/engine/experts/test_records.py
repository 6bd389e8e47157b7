import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.device import empty_pages
from engine.errors import PackError
from engine.experts import records
from engine.experts.layout import ExpertId
from engine.experts.records import RecordFile, checksum
from tests.engine.experts.files import LAYOUT, WrittenRecords, write_records


@pytest.fixture
def written(tmp_path: Path) -> WrittenRecords:
    return write_records(tmp_path)


def read(file: RecordFile, expert: ExpertId) -> torch.Tensor:
    record = empty_pages(1, LAYOUT.expert_bytes)[0]
    file.read(expert, record)
    return record


def test_every_record_is_read_to_the_byte(written: WrittenRecords) -> None:
    with written.open() as file:
        assert file.expert_bytes == LAYOUT.expert_bytes
        # Not in order, so that the offsets matter.
        for expert in reversed(list(LAYOUT.experts())):
            assert torch.equal(read(file, expert), written.record(expert))


def test_several_threads_read_at_once(written: WrittenRecords) -> None:
    experts = list(LAYOUT.experts()) * 10
    with written.open() as file, ThreadPoolExecutor(8) as threads:
        for expert, record in zip(experts, threads.map(lambda expert: read(file, expert), experts), strict=True):
            assert torch.equal(record, written.record(expert))


@pytest.mark.parametrize("change", [-1, -4096, 1])
def test_a_file_of_the_wrong_size_is_refused(written: WrittenRecords, change: int) -> None:
    size = written.path.stat().st_size
    os.truncate(written.path, size + change)
    with pytest.raises(PackError, match=rf"experts\.bin has {size + change} bytes instead of {size}; delete its"):
        written.open()


def test_a_damaged_record_is_named_by_each_read_of_it(written: WrittenRecords) -> None:
    damaged = ExpertId(1, 2)
    written.damage(damaged)
    with written.open() as file:
        for expert in LAYOUT.experts():
            if expert != damaged:
                assert torch.equal(read(file, expert), written.record(expert))
        for _ in range(2):
            with pytest.raises(PackError) as caught:
                read(file, damaged)
            assert str(caught.value) == (
                f"{written.path} is damaged at expert 2 of layer 1; delete its directory to pack the model anew."
            )


def test_a_damaged_padding_is_noticed_too(written: WrittenRecords) -> None:
    content = written.content.clone()
    content[-1, -1] ^= 1
    written.path.write_bytes(content.numpy().tobytes())
    with written.open() as file, pytest.raises(PackError, match="expert 4 of layer 1"):
        read(file, ExpertId(1, 4))


def test_records_in_each_others_place_are_noticed(written: WrittenRecords) -> None:
    written.path.write_bytes(written.content.flip(0).contiguous().numpy().tobytes())
    with written.open() as file:
        for expert in LAYOUT.experts():
            with pytest.raises(PackError, match=f"expert {expert.expert} of layer {expert.layer}"):
                read(file, expert)


def test_a_record_is_checked_on_its_first_read_only(written: WrittenRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []

    def counting_checksum(content: memoryview) -> int:
        checked.append(len(content))
        return checksum(content)

    monkeypatch.setattr(records, "checksum", counting_checksum)
    with written.open() as file:
        for expert in [ExpertId(0, 0), ExpertId(1, 0), ExpertId(0, 0), ExpertId(1, 0), ExpertId(0, 1)]:
            read(file, expert)
    assert checked == 3 * [LAYOUT.expert_bytes]


def test_a_file_cut_under_the_reader_is_an_os_error(written: WrittenRecords) -> None:
    with written.open() as file:
        os.truncate(written.path, 4 * LAYOUT.expert_bytes + 4096)
        read(file, ExpertId(1, 0))
        with pytest.raises(OSError, match=rf"ends at byte {4 * LAYOUT.expert_bytes + 4096}"):
            read(file, ExpertId(1, 1))


def test_close_is_idempotent_and_closes_the_file(written: WrittenRecords) -> None:
    num_descriptors = len(os.listdir("/proc/self/fd"))
    file = written.open()
    assert len(os.listdir("/proc/self/fd")) == num_descriptors + 1
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


def test_checksums_stay_what_they_are_in_the_packs_that_were_written() -> None:
    assert checksum(memoryview(b"specter")) == 0x2BE87E49BE6AEFA7
