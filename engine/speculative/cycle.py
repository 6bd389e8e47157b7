"""What is learnt from."""

from collections.abc import Sequence
from typing import NamedTuple


class Cycle(NamedTuple):
    """What was measured of one cycle."""

    confidences: Sequence[float]
    """Of each drafted token, by the drafter's own account."""
    num_accepted: int
    draft_seconds: float
    verify_seconds: float
    """Without waiting."""
    seconds: float
    """All of it."""
    transfer_bytes: float
    transfer_seconds: float
    """For which the link was busy."""
