"""What is compared: ways to serve one model with the same memory."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.config import MAX_DRAFT_LENGTH, BenchConfig, EngineConfig
from engine.errors import ConfigError

ENGINE = "engine.process"
PEER = "engine.peers.accelerate"
SLOW_SHARE = 1 / 4
MIN_TOKENS = 4


class Mode(NamedTuple):
    name: str
    settings: Mapping[str, Any]
    """Of `BenchConfig`, beside those that all modes share."""
    module: str = ENGINE
    """What runs as the engine process."""
    token_share: float = 1.0
    """Slow modes give shorter replies: what is measured is per token."""

    @property
    def is_peer(self) -> bool:
        return self.module != ENGINE

    @property
    def is_slow(self) -> bool:
        return self.token_share < 1

    def max_tokens(self, num_tokens: int) -> int:
        """Length of its replies where those of the fast modes have `num_tokens`."""
        return min(num_tokens, max(MIN_TOKENS, round(num_tokens * self.token_share)))


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            "on-demand",
            {"draft": "none", "cache_policy": "lru", "prefetch": False, "max_slots": 2},
            token_share=SLOW_SHARE,
        ),
        Mode("lru", {"draft": "none", "cache_policy": "lru", "prefetch": False}),
        Mode("plain", {"draft": "none"}),
        Mode("ngram", {"draft": "ngram"}),
        Mode("specter", {"draft": "quantized"}),
        Mode("auto", {"draft": "auto"}),
        # Its tokens take so long that fewer of them tell as much.
        Mode("accelerate", {"draft": "none"}, module=PEER, token_share=SLOW_SHARE / 2),
    )
}
DEFAULT = ("on-demand", "lru", "plain", "ngram", "specter", "specter-4", "auto", "accelerate")
QUICK = ("on-demand", "lru", "specter", "auto", "accelerate")
REFERENCE = "lru"
"""Whose output the others' is compared with, where it takes part, and which is asked how fast the machine is."""

FIXED_LENGTH = re.compile(r"(specter|ngram)-([0-9]{1,2})")
SHARED = ("draft", "draft_length", "cache_policy")
"""Settings that are a mode's own: where it sets none, the default counts, not the user's."""


def mode_named(name: str) -> Mode:
    """A mode of the table, or `specter-K` and `ngram-K`: that drafter with K tokens in each cycle."""
    if name in MODES:
        return MODES[name]
    match = FIXED_LENGTH.fullmatch(name)
    if match and 1 <= int(match[2]) <= MAX_DRAFT_LENGTH:
        drafter = MODES[match[1]]
        return drafter._replace(name=name, settings={**drafter.settings, "draft_length": int(match[2])})
    raise ConfigError(
        f"Unknown mode {name!r}; known are {', '.join(MODES)}, and specter-K and ngram-K with a draft length K from 1 "
        f"to {MAX_DRAFT_LENGTH}."
    )


def parse_modes(text: str) -> list[Mode]:
    """The modes of a list such as "lru,specter-4", each once."""
    names = [name.strip() for name in text.split(",")]
    return [mode_named(name) for name in dict.fromkeys(name for name in names if name)] or [mode_named(text)]


def bench_config(
    shared: EngineConfig, mode: Mode, budget_bytes: int, link_bandwidth: int | None, trace: bool = False
) -> BenchConfig:
    """The settings of the mode's engine."""
    kept = {name: value for name, value in dict(shared).items() if name not in SHARED}
    return BenchConfig.model_validate(
        {
            **kept,
            **mode.settings,
            "device_memory": budget_bytes,
            "link_bandwidth": link_bandwidth,
            "trace": trace,
        }
    )
