"""The observer with a clock of our own, and a real server's metrics against what its clients counted."""

from itertools import pairwise

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.protocol import CycleStats, Estimates
from server.metrics import TOKEN_BUCKETS, Metrics
from server.observer import RequestObserver
from tests.server.fake_engine import CYCLE, ESTIMATES, TOKENS_PER_CYCLE, capabilities
from tests.server.harness import chat


def values(text: str) -> dict[str, float]:
    """Series to value, without our prefix and the label that all have."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f'{name}="{value}"' for name, value in sample.labels.items() if name != "model_name"]
            name = sample.name.removeprefix("specter_")
            found[f"{name}{{{','.join(labels)}}}" if labels else name] = sample.value
    return found


def test_times_of_a_request() -> None:
    metrics = Metrics("m")
    times = iter([0.0, 1.0, 3.0, 7.0, 8.0, 10.0, 11.0])
    observer = RequestObserver(metrics, lambda: next(times))
    observer.queued()
    observer.admitted()
    for num_tokens in (1, 3, 2):
        observer.tokens(num_tokens, num_prompt_tokens=10, max_model_len=32)
    assert values(generate_latest(metrics.registry).decode())["kv_cache_usage_perc"] == 0.5
    observer.finished("length")
    got = values(generate_latest(metrics.registry).decode())
    expected = {
        "request_queue_time_seconds_sum": 2,
        "request_prefill_time_seconds_sum": 4,
        "time_to_first_token_seconds_sum": 7,
        "request_decode_time_seconds_sum": 3,
        "inter_token_latency_seconds_sum": 3,
        "inter_token_latency_seconds_count": 2,
        "request_time_per_output_token_seconds_sum": 3 / 5,
        "e2e_request_latency_seconds_sum": 11,
        "prompt_tokens_total": 10,
        "generation_tokens_total": 6,
        'request_success_total{finished_reason="length"}': 1,
        'request_success_total{finished_reason="stop"}': 0,
        "kv_cache_usage_perc": 0,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)


def test_every_counter_of_a_cycle_is_shown() -> None:
    metrics = Metrics("m")
    metrics.cycle(CycleStats(*range(1, len(CycleStats.__struct_fields__) + 1)))
    got = values(generate_latest(metrics.registry).decode())
    expected = {
        "spec_decode_num_drafts_total": 1,
        "spec_decode_num_draft_tokens_total": 1,
        "spec_decode_num_accepted_tokens_total": 2,
        'spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 1,
        'cycle_phase_seconds_total{phase="draft"}': 3,
        'cycle_phase_seconds_total{phase="plan"}': 4,
        'cycle_phase_seconds_total{phase="transfer_wait"}': 5,
        'cycle_phase_seconds_total{phase="verify"}': 6,
        "expert_cache_hits_total": 7,
        "expert_cache_misses_total": 8,
        "expert_cache_evictions_total": 9,
        'expert_prefetches_total{outcome="used"}': 10,
        'expert_prefetches_total{outcome="wasted"}': 11,
        "expert_demand_fetches_total": 12,
        'expert_transfer_bytes_total{kind="prefetch"}': 13,
        'expert_transfer_bytes_total{kind="demand"}': 14,
        "expert_transfer_seconds_total": 15,
        "draft_length": 1,
    }
    assert {name: got[name] for name in expected} == expected


def governor_gauges(text: str) -> dict[str, float]:
    return {name: value for name, value in values(text).items() if name.startswith("governor_")}


def test_every_estimate_of_the_governor_is_shown() -> None:
    metrics = Metrics("m")
    observer = RequestObserver(metrics)
    shown = governor_gauges(generate_latest(metrics.registry).decode())
    assert len(shown) == len(Estimates.__struct_fields__)
    assert set(shown.values()) == {0.0}
    observer.estimates(Estimates(9, 9, 9, 9, 9, 9, 9))
    observer.estimates(
        Estimates(
            acceptance_rate=0.1,
            draft_seconds=0.2,
            verify_seconds=0.3,
            transfer_bytes=400.0,
            bandwidth=500.0,
            num_tokens=6.0,
            cycle_seconds=0.7,
        )
    )
    assert governor_gauges(generate_latest(metrics.registry).decode()) == {
        "governor_acceptance_rate": 0.1,
        "governor_draft_seconds_per_token": 0.2,
        "governor_verify_seconds": 0.3,
        "governor_transfer_bytes": 400.0,
        "governor_link_bandwidth_bytes_per_second": 500.0,
        "governor_cycle_tokens": 6.0,
        "governor_cycle_seconds": 0.7,
    }


def test_the_server_shows_what_the_last_decision_was_made_by(client: httpx.Client) -> None:
    """The prompt's first token and a cycle without a decision say nothing, and take nothing back."""
    client.post("/v1/chat/completions", json=chat("x" * 20))
    shown = governor_gauges(client.get("/metrics").text)
    assert shown["governor_acceptance_rate"] == ESTIMATES.acceptance_rate
    assert shown["governor_cycle_seconds"] == ESTIMATES.cycle_seconds


def test_where_the_model_is_is_shown() -> None:
    metrics = Metrics("m")
    metrics.engine_ready(capabilities())
    got = values(generate_latest(metrics.registry).decode())
    expected = {
        "expert_cache_slots": 5,
        "draft_length": 4,
        'expert_store_bytes{tier="host"}': 6_000,
        'expert_store_bytes{tier="disk"}': 10_000,
        'memory_bytes{tier="device"}': 1_005_000,
        'memory_bytes{tier="host"}': 6_000,
        'memory_bytes{tier="disk"}': 16_000,
        'link_bandwidth_bytes_per_second{tier="disk"}': 1.3e9,
    }
    assert {name: got[name] for name in expected} == expected
    # It was not measured.
    assert 'link_bandwidth_bytes_per_second{tier="host"}' not in got


def test_buckets_start_at_two_milliseconds() -> None:
    assert TOKEN_BUCKETS[0] == 0.002
    assert all(low < high for low, high in pairwise(TOKEN_BUCKETS))


def test_server_counts_what_its_clients_count(client: httpx.Client) -> None:
    before = values(client.get("/metrics").text)
    usages = []
    for i in range(3):
        usages.append(client.post("/v1/chat/completions", json=chat("x" * i)).json()["usage"])
    client.post("/v1/chat/completions", json=chat("x" * 5000))
    after = values(client.get("/metrics").text)
    num_cycles = sum(-(-usage["completion_tokens"] // TOKENS_PER_CYCLE) for usage in usages)
    expected = {
        "prompt_tokens_total": sum(usage["prompt_tokens"] for usage in usages),
        "generation_tokens_total": sum(usage["completion_tokens"] for usage in usages),
        'request_success_total{finished_reason="stop"}': 3,
        'admission_rejections_total{reason="context_length"}': 1,
        "time_to_first_token_seconds_count": 3,
        "request_time_per_output_token_seconds_count": 3,
        "inter_token_latency_seconds_count": num_cycles - 3,
        "spec_decode_num_accepted_tokens_total": num_cycles * CYCLE.num_accepted_tokens,
        'expert_transfer_bytes_total{kind="prefetch"}': num_cycles * CYCLE.prefetch_bytes,
    }
    assert {name: after[name] - before[name] for name in expected} == expected
    assert (after["expert_cache_slots"], after["num_requests_running"], after["num_requests_waiting"]) == (5, 0, 0)
