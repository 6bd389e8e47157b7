"""How fast experts are moved: as fast as this machine can, or as slowly as beside a much faster device."""

from typing import NamedTuple

from pydantic import ByteSize, TypeAdapter, ValidationError

from engine.errors import ConfigError
from engine.protocol import Capabilities, ModelPlan
from server.formats import size

COLD_TOKEN_COMPUTES = 12.0
"""On the paced link a token without any resident expert takes this many times its computation, as on a GPU behind PCIe.

On a CPU, experts that come from a page cache or a fast disk are hardly slower than the computation, so that there is
little to hide, and nothing to learn about the machines that this is for.
"""
REAL, PACED, SET = "real", "paced", "set"


class LinkChoice(NamedTuple):
    """A link as it was asked for."""

    kind: str
    """`REAL`, `PACED`, or `SET`."""
    limit: int | None = None
    """Bytes per second, of `SET`."""


class Link(NamedTuple):
    kind: str
    limit: int | None
    """Bytes per second that engines are told to move experts at, at most; None: as fast as they go."""
    bandwidth: float | None
    """Bytes per second that experts can come at; None where that was not measured."""

    @classmethod
    def resolve(cls, choice: LinkChoice, capabilities: Capabilities) -> "Link":
        """With what follows from how fast the machine is."""
        measured = measured_bandwidth(capabilities.plan)
        limit = paced_bandwidth(capabilities) if choice.kind == PACED else choice.limit
        known = [bandwidth for bandwidth in (limit, measured) if bandwidth is not None]
        return cls(choice.kind, limit, min(known, default=None))

    def __str__(self) -> str:
        return f"{self.kind} link" if self.bandwidth is None else f"{self.kind} link of {size(self.bandwidth)}/s"


def default_links(quick: bool) -> list[LinkChoice]:
    return [LinkChoice(PACED)] if quick else [LinkChoice(REAL), LinkChoice(PACED)]


def parse_links(text: str) -> list[LinkChoice]:
    """The links of a list of "real", "paced" and bandwidths such as "1.5GB/s", each once."""
    return list(dict.fromkeys(_parse_link(word.strip()) for word in text.split(",")))


def _parse_link(word: str) -> LinkChoice:
    if word in (REAL, PACED):
        return LinkChoice(word)
    try:
        bandwidth = int(TypeAdapter(ByteSize).validate_python(word.removesuffix("/s")))
    except ValidationError:
        bandwidth = 0
    if bandwidth <= 0:
        raise ConfigError(f"Unknown link {word!r}; known are {REAL}, {PACED}, and bandwidths such as 1.5GB/s.")
    return LinkChoice(SET, bandwidth)


def paced_bandwidth(capabilities: Capabilities) -> int:
    """Bytes per second at which a cold token takes `COLD_TOKEN_COMPUTES` of its computation."""
    seconds = COLD_TOKEN_COMPUTES * capabilities.token_compute_seconds
    return max(1, round(capabilities.plan.cold_token_bytes / seconds))


def measured_bandwidth(plan: ModelPlan) -> float | None:
    """Of the tiers that experts are read from, side by side, if each expert is wanted as often as any other."""
    shares = {"host": plan.num_host_experts / plan.num_experts, "disk": plan.num_disk_experts / plan.num_experts}
    seconds = []
    for tier, bandwidth in plan.bandwidths.items():
        if share := shares.pop(tier, 0.0):
            seconds.append(share / bandwidth)
    if any(shares.values()) or not seconds:
        return None
    return 1 / max(seconds)
