"""How far a long write has come: a line per finished step, on the disk before the next step begins."""

import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from engine.directory import flush

H = TypeVar("H", bound=msgspec.Struct)
E = TypeVar("E")


class Journal(Generic[H, E]):
    """One line that says what is being written, then one entry per step. Mutable; one writer."""

    NAME = "journal"

    def __init__(self, directory: Path, header: type[H], entry: type[E]) -> None:
        self._file = directory / self.NAME
        self._header = header
        self._entry = entry

    def read(self) -> tuple[H, list[E]] | None:
        """What was written before; None where there is nothing to go on with. A torn last line is removed."""
        if not self._file.exists():
            return None
        content = self._file.read_bytes()
        os.truncate(self._file, content.rfind(b"\n") + 1)
        header, *entries = content.split(b"\n")[:-1] or [b""]
        try:
            return (
                msgspec.json.decode(header, type=self._header),
                [msgspec.json.decode(line, type=self._entry) for line in entries],
            )
        except msgspec.DecodeError:
            return None

    def begin(self, header: H) -> None:
        """Start over."""
        self._file.write_bytes(msgspec.json.encode(header) + b"\n")
        flush(self._file)
        flush(self._file.parent)

    def add(self, entry: E) -> None:
        """The step is done; what it wrote is on the disk already."""
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def end(cls, directory: Path) -> None:
        """Everything is written, and where it belongs: until then an interrupted run has nothing to do again."""
        if (directory / cls.NAME).exists():  # else the disk need not be one that can be written
            (directory / cls.NAME).unlink()
