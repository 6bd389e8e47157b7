"""Profiles of a packed model, which lie beside it: one per machine, type and draft."""

import logging
import os
import tempfile
from pathlib import Path

import msgspec
import xxhash

from engine.profile import Profile

logger = logging.getLogger(__name__)

DIRECTORY = "profiles"


def read_profile(pack_directory: Path, subject: str) -> Profile | None:
    """The profile of the `subject`, a machine with its settings; None where there is none that can be read."""
    try:
        return msgspec.msgpack.decode(_path(pack_directory, subject).read_bytes(), type=Profile)
    except (OSError, msgspec.DecodeError):  # it is made again, which takes a minute
        return None


def write_profile(pack_directory: Path, subject: str, profile: Profile) -> None:
    """Keep the profile; where the directory cannot be written to, that is logged and nothing else."""
    path = _path(pack_directory, subject)
    try:
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.msgpack.encode(profile))
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("the profile cannot be kept in %s (%s), so the next start makes it again", path.parent, error)


def _path(pack_directory: Path, subject: str) -> Path:
    return pack_directory / DIRECTORY / f"{xxhash.xxh3_64_hexdigest(subject.encode())}.msgpack"
