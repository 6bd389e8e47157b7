import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.bench.modes import DEFAULT, MODES, QUICK, bench_config, mode_named, parse_modes


def test_every_default_mode_is_known() -> None:
    assert [mode_named(name).name for name in (*DEFAULT, *QUICK)] == [*DEFAULT, *QUICK]


def test_a_fixed_length_is_added_to_the_drafters_settings() -> None:
    assert mode_named("ngram-8").settings == {"draft": "ngram", "draft_length": 8}
    assert mode_named("specter-32").settings == {"draft": "quantized", "draft_length": 32}


@pytest.mark.parametrize("name", ["fast", "specter-0", "specter-33", "lru-4", "specter-", ""])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"known are on-demand, lru, .* from 1 to 32"):
        parse_modes(name)


def test_a_list_has_each_mode_once() -> None:
    assert [mode.name for mode in parse_modes("lru, auto,lru,")] == ["lru", "auto"]


def test_what_a_mode_does_not_set_is_the_default_and_not_the_users() -> None:
    shared = EngineConfig(draft="ngram", draft_length=7, cache_policy="lru", kv_dtype="float16")
    config = bench_config(shared, MODES["plain"], 10**9, 10**8)
    assert (config.draft, config.draft_length, config.cache_policy, config.prefetch) == (
        "none",
        "auto",
        "lookahead",
        True,
    )
    assert (config.kv_dtype, config.device_memory, config.link_bandwidth) == ("float16", 10**9, 10**8)
    config = bench_config(shared, MODES["on-demand"], 10**9, None)
    assert (config.cache_policy, config.prefetch, config.max_slots) == ("lru", False, 2)


def test_slow_modes_reply_with_fewer_tokens() -> None:
    lengths = {name: MODES[name].max_tokens(64) for name in ("lru", "on-demand", "accelerate")}
    assert lengths == {"lru": 64, "on-demand": 16, "accelerate": 8}
    assert [MODES["accelerate"].max_tokens(n) for n in (16, 3)] == [4, 3]
