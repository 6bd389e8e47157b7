"""Numbers as people read them."""

import math

from pydantic import ByteSize


def size(num_bytes: float) -> str:
    return ByteSize(num_bytes).human_readable(decimal=True, separator=" ")


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """In the unit that says enough about a long wait, such as "40 s", "3 min" or "1 h 20 min"."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
