"""The step loop: requests in order, aborts, failures, counters; and that the draft's routes are what is prefetched."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from engine.assembly import assemble_core, open_parts, open_store
from engine.config import BenchConfig, DeviceName
from engine.device import Device, Event, open_device
from engine.experts.layout import ExpertId
from engine.experts.store import ExpertStore
from engine.loading import LoadedModel
from engine.protocol import (
    Failed,
    Finished,
    Prefill,
    SamplingParams,
    Submit,
    Tokens,
    ToServer,
    Traced,
    TraceEvent,
)
from engine.sampling import target_distribution
from engine.speculative.governor import FixedLength
from engine.speculative.quantized import PendingRoutes
from tests.engine.harness import GREEDY, RunningCore, changed, ignore_progress, load, running_core
from tests.engine.tiny import (
    VOCAB_SIZE,
    mixtral_config,
    random_prompt,
    reference_model,
    reference_tokens,
    save_checkpoint,
)

PROMPT = random_prompt(0, 7)

Reference = Callable[[list[int], int], list[int]]
"""`(prompt, number of tokens) -> tokens`, greedily."""


@pytest.fixture(scope="module")
def model(mixtral: Path, model_cache: Path, device: DeviceName) -> tuple[LoadedModel, BenchConfig]:
    return load(mixtral, model_cache, device=device)


@pytest.fixture
def reference(mixtral: Path, device: DeviceName) -> Reference:
    """What transformers continues a prompt with, in so many tokens."""
    return partial(reference_tokens, mixtral, ignore_eos=True, device=device)


@pytest.fixture
def running(model: tuple[LoadedModel, BenchConfig]) -> Iterator[RunningCore]:
    with running_core(*model, num_slots=6) as running:
        yield running


def submit(request_id: str, prompt: list[int], max_tokens: int = 12) -> Submit:
    return Submit(request_id, prompt, max_tokens, GREEDY, ignore_eos=True)


def test_requests_are_served_in_order_and_do_not_mix(running: RunningCore, reference: Reference) -> None:
    sent: list[ToServer] = []
    running.core.send = sent.append
    prompts = {"first": PROMPT, "second": random_prompt(1, 9)}
    for request_id, prompt in prompts.items():
        running.core.submit(submit(request_id, prompt))
    while running.core.has_work:
        running.core.step()
    for request_id, prompt in prompts.items():
        messages = [m for m in sent if isinstance(m, Tokens) and m.request_id == request_id]
        tokens = [token_id for message in messages for token_id in message.token_ids]
        assert tokens == reference(prompt, 12)
    ends = [m for m in sent if isinstance(m, Finished)]
    assert ends == [Finished("first", "length"), Finished("second", "length")]
    assert isinstance(sent[0], Prefill)


def test_what_was_counted_before_there_was_a_core_is_nobody_s(model: tuple[LoadedModel, BenchConfig]) -> None:
    loaded, config = model
    device = open_device(config.device)
    with (
        open_store(loaded.pack, 0, device, ignore_progress) as store,
        open_parts(loaded, config, store, 6, device) as parts,
    ):
        parts.transfers.visit(0, {0: [0], 1: [0]}, 1, lambda expert, record: None)
        before = parts.transfers.stats()
        assert before.transfer_wait_seconds > 0
        core = assemble_core(parts, config, FixedLength(loaded.description.choices.draft_length))
        stats = RunningCore(core, parts.transfers).generate(PROMPT, 12, ignore_eos=True).stats
        spent = parts.transfers.stats() - before
    assert all(getattr(stats, name) >= 0 for name in stats.__struct_fields__)
    assert stats.num_expert_misses == spent.num_expert_misses
    assert stats.demand_bytes == spent.demand_bytes


def test_an_aborted_request_ends_at_once_and_the_next_is_right(running: RunningCore, reference: Reference) -> None:
    sent: list[ToServer] = []
    running.core.send = sent.append
    running.core.submit(submit("running", PROMPT))
    running.core.submit(submit("queued", PROMPT))
    for _ in range(3):
        running.core.step()
    running.core.abort("running")
    running.core.abort("queued")
    running.core.abort("running")
    running.core.abort("unknown")
    assert sent[-2:] == [Finished("running", "abort"), Finished("queued", "abort")]
    assert not running.core.has_work
    assert running.generate(PROMPT, 12, ignore_eos=True).token_ids == reference(PROMPT, 12)


def test_an_abort_is_seen_between_prefill_chunks(model: tuple[LoadedModel, BenchConfig]) -> None:
    sent: list[ToServer] = []
    with running_core(*changed(*model, prefill_chunk_tokens=4), num_slots=6) as running:
        running.core.send = sent.append
        running.core.submit(submit("long", random_prompt(0, 40)))
        running.core.step()
        running.core.abort("long")
    assert [type(message) for message in sent] == [Prefill, Finished]
    assert isinstance(sent[0], Prefill)
    assert (sent[0].done, sent[0].total) == (4, 40)


def test_a_request_stops_at_the_end_of_sequence(model: tuple[LoadedModel, BenchConfig], reference: Reference) -> None:
    loaded, config = model
    tokens = reference(PROMPT, 12)
    end = next(index for index in range(3, 12) if tokens[index] not in tokens[:index])
    loaded = loaded._replace(eos_token_ids=frozenset({tokens[end]}))
    with running_core(loaded, config, 6) as running:
        reply = running.generate(PROMPT, 12)
        assert reply.token_ids == tokens[: end + 1]
        assert reply.end == Finished("request", "stop")
        assert running.generate(PROMPT, 12, ignore_eos=True).token_ids == tokens


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "kind", "message"),
    [
        (random_prompt(0, 256), 1, "ContextLengthError", "maximum context length is 256 tokens.*requested 256"),
        ([], 1, "RequestError", "no tokens"),
        ([5, VOCAB_SIZE], 1, "RequestError", f"token id {VOCAB_SIZE}.*0 to {VOCAB_SIZE - 1}"),
        ([5, -1], 1, "RequestError", "token id -1"),
        ([5], 0, "RequestError", "max_tokens is 0"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    running: RunningCore, prompt: list[int], max_tokens: int, kind: str, message: str
) -> None:
    reply = running.generate(prompt, max_tokens)
    assert isinstance(reply.end, Failed)
    assert len(reply.messages) == 1
    assert reply.end.kind == kind
    with pytest.raises(ValueError, match=message):
        raise ValueError(reply.end.message)


def test_max_tokens_is_cut_to_the_room_that_the_prompt_leaves(running: RunningCore, reference: Reference) -> None:
    prompt = random_prompt(0, 250)
    reply = running.generate(prompt, 1000, ignore_eos=True)
    assert reply.token_ids == reference(prompt, 6)
    assert reply.end == Finished("request", "length")


class RecordingStore:
    """Notes what is fetched; fails on request."""

    def __init__(self, store: ExpertStore, device: Device) -> None:
        self.store = store
        self.device = device
        """Whose copy queue the store uses, so that the transfers have to be ordered by it."""
        self.fetched: list[ExpertId] = []
        self.is_broken = False

    def is_divisible(self, expert: ExpertId) -> bool:
        return self.store.is_divisible(expert)

    def fetch(self, expert: ExpertId, destination: torch.Tensor, offset: int = 0) -> Event:
        self.fetched.append(expert)
        if self.is_broken:
            raise OSError(5, "Input/output error")
        return self.store.fetch(expert, destination, offset)

    def close(self) -> None:
        self.store.close()


@pytest.fixture
def store(model: tuple[LoadedModel, BenchConfig]) -> Iterator[RecordingStore]:
    device = open_device(model[1].device)
    with open_store(model[0].pack, 0, device, ignore_progress) as store:
        yield RecordingStore(store, device)


def test_a_read_error_fails_the_request_and_not_the_engine(
    model: tuple[LoadedModel, BenchConfig], store: RecordingStore, reference: Reference
) -> None:
    with running_core(*model, num_slots=3, device=store.device, store=store) as running:
        store.is_broken = True
        reply = running.generate(PROMPT, 12, ignore_eos=True)
        assert isinstance(reply.end, Failed)
        assert reply.end.kind == "TransferError"
        assert "Input/output error" in reply.end.message
        store.is_broken = False
        assert running.generate(PROMPT, 12, ignore_eos=True).token_ids == reference(PROMPT, 12)


def test_what_the_draft_routed_is_what_is_prefetched(
    model: tuple[LoadedModel, BenchConfig], store: RecordingStore
) -> None:
    loaded, config = model
    assert loaded.draft is not None
    assert isinstance(config.draft_length, int)
    pending: list[PendingRoutes] = []
    take_routes = loaded.draft.take_routes

    def record() -> PendingRoutes:
        pending.append(take_routes())
        return pending[-1]

    sent: list[ToServer] = []
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        # Prefill would prefetch what the routers say.
        patch.setattr(loaded.model, "routers", lambda top_k: None)
        running = stack.enter_context(
            running_core(loaded, config, loaded.pack.layout.num_experts, device=store.device, store=store)
        )
        patch.setattr(loaded.draft, "take_routes", record)
        running.core.send = sent.append
        running.core.submit(submit("request", [5]))
        running.core.step()
        resident = set(store.fetched)
        assert running.transfers.stats().num_demand_fetches == len(resident)
        running.core.step()
        fetched = store.fetched[len(resident) :]
    routed = {
        ExpertId(layer, expert)
        for routes in pending
        for layer, experts in enumerate(routes.read())
        for expert in experts.flatten().tolist()
    }
    assert len(pending) == config.draft_length + 1
    cycle = sent[-1]
    assert isinstance(cycle, Tokens)
    num_demanded = cycle.cycle.num_demand_fetches
    assert len(fetched) == len(set(fetched))
    assert routed - resident <= set(fetched)
    assert len(set(fetched) - routed) == num_demanded
    assert cycle.cycle.prefetch_bytes == len(routed - resident) * loaded.pack.layout.expert_bytes


def test_counters_add_up(model: tuple[LoadedModel, BenchConfig], store: RecordingStore) -> None:
    loaded, config = model
    with running_core(loaded, config, 5, device=store.device, store=store) as running:
        stats = running.generate(PROMPT, 30, ignore_eos=True).stats
        rest = running.transfers.stats()
    expert_bytes = loaded.pack.layout.expert_bytes
    # Prefetches that were under way when the request ended are counted afterwards.
    assert rest.prefetch_bytes + rest.demand_bytes == len(store.fetched) * expert_bytes
    assert stats.demand_bytes == stats.num_demand_fetches * expert_bytes
    num_prefetches = rest.prefetch_bytes // expert_bytes
    assert rest.num_prefetches_used + rest.num_prefetches_wasted <= num_prefetches
    assert rest.num_prefetches_used + rest.num_prefetches_wasted >= num_prefetches - 5
    assert rest.num_evictions >= len(store.fetched) - 5
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_expert_hits > 0
    assert stats.num_expert_misses >= stats.num_demand_fetches
    for name in ("draft_seconds", "plan_seconds", "verify_seconds", "transfer_seconds"):
        assert getattr(stats, name) > 0.0


@pytest.mark.parametrize("settings", [{"draft_weights": "qint2"}, {"draft": "ngram"}], ids=["quantized", "ngram"])
def test_sampling_with_a_draft_has_the_targets_distribution(
    tmp_path: Path, model_cache: Path, device: DeviceName, settings: dict[str, str]
) -> None:
    """Chi-square over the first three tokens, drawn under a draft so coarse that many tokens are rejected."""
    checkpoint = save_checkpoint(mixtral_config(num_layers=1, vocab_size=16), tmp_path / "one-layer")
    sampling = SamplingParams(temperature=1.5, top_k=2)
    prompt = [3, 4, 5]
    if settings.get("draft") == "ngram":
        prompt = _prompt_of_which_ngrams_are_accepted_at_times(checkpoint, sampling)
    expected = _exact_joint(checkpoint, prompt, sampling, num_tokens=3)
    num_trials = 400
    counts: Counter[tuple[int, ...]] = Counter()
    loaded, config = load(checkpoint, model_cache, device=device, draft_length=2, **settings)
    num_drafted = num_rejected = 0
    with running_core(loaded, config, 6) as running:
        for seed in range(num_trials):
            seeded = SamplingParams(temperature=1.5, top_k=2, seed=seed)
            reply = running.generate(prompt, 3, sampling=seeded, ignore_eos=True)
            counts[tuple(reply.token_ids)] += 1
            num_drafted += reply.stats.num_draft_tokens
            num_rejected += reply.stats.num_draft_tokens - reply.stats.num_accepted_tokens
    assert set(counts) <= set(expected)
    assert num_rejected > num_trials / 4
    assert num_rejected < num_drafted
    statistic = sum((counts[t] - num_trials * p) ** 2 / (num_trials * p) for t, p in expected.items())
    assert len(expected) == 8
    assert statistic < 24.3  # 0.1% point of chi-square with 7 degrees of freedom


def _prompt_of_which_ngrams_are_accepted_at_times(checkpoint: Path, sampling: SamplingParams) -> list[int]:
    """Whatever comes first, something has followed it and the token before; for one of the two, it may do so again."""
    for offset in range(16):
        prompt = [token for first in range(16) for token in (5, first, (first + offset) % 16)] + [5]
        joint = _exact_joint(checkpoint, prompt, sampling, num_tokens=2)
        if any(second == (first + offset) % 16 for first, second in joint):
            return prompt
    raise AssertionError("there is no such prompt")


def _exact_joint(
    checkpoint: Path, prompt: list[int], sampling: SamplingParams, num_tokens: int
) -> dict[tuple[int, ...], float]:
    model = reference_model(checkpoint)

    def next_probs(tokens: tuple[int, ...]) -> dict[int, float]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        probs = target_distribution(logits, sampling)
        return {int(token): float(probs[token]) for token in probs.nonzero().flatten()}

    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        joint = {
            (*tokens, token): probability * chance
            for tokens, probability in joint.items()
            for token, chance in next_probs(tokens).items()
        }
    return joint


def test_the_same_seed_gives_the_same_tokens(running: RunningCore) -> None:
    replies = [
        running.generate(PROMPT, 12, sampling=SamplingParams(temperature=1.0, seed=seed), ignore_eos=True).token_ids
        for seed in (1, 1, 2)
    ]
    assert replies[0] == replies[1] != replies[2]


class Passes(NamedTuple):
    """What a trace tells of the passes of one request."""

    num_tokens: list[int]
    """Of each verify pass, or chunk of the prompt, as its phase says."""
    routes: list[list[list[list[int]]]]
    """The same passes' layers: for each, the experts of each token."""


def passes_of(events: list[TraceEvent]) -> Passes:
    """Told apart by time alone."""
    phases = [event for event in events if event.track == "phase" and event.name in ("prefill", "verify")]
    layers = [event for event in events if event.track == "layer"]
    passes = Passes([], [])
    for phase in phases:
        end_seconds = phase.start_seconds + phase.seconds
        within = [layer for layer in layers if phase.start_seconds <= layer.start_seconds <= end_seconds]
        assert [layer.arguments["layer"] for layer in within] == list(range(len(within)))
        num_tokens = phase.arguments["tokens"]
        assert isinstance(num_tokens, int)
        passes.num_tokens.append(num_tokens)
        passes.routes.append([rows for layer in within if isinstance(rows := layer.arguments["routes"], list)])
    return passes


@pytest.mark.parametrize("draft", ["quantized", "ngram", "none"])
def test_a_trace_tells_the_routes_of_every_pass_before_the_request_ends(
    model: tuple[LoadedModel, BenchConfig], draft: str, reference: Reference
) -> None:
    prompt = PROMPT * 2
    with running_core(*changed(*model, trace=True, draft=draft, prefill_chunk_tokens=4), num_slots=6) as running:
        replies = [running.generate(prompt, 12, ignore_eos=True) for _ in range(2)]
    for reply in replies:
        traced, finished = reply.messages[-2:]
        assert isinstance(traced, Traced)
        assert isinstance(finished, Finished)
        assert reply.token_ids == reference(prompt, 12)
        assert not any(isinstance(message, Traced) for message in reply.messages[:-2])
        passes = passes_of(traced.events)
        cycles = [message.cycle for message in reply.messages if isinstance(message, Tokens)][1:]
        assert passes.num_tokens == [4, 4, 4, 2, *(1 + cycle.num_draft_tokens for cycle in cycles)]
        for num_tokens, layers in zip(passes.num_tokens, passes.routes, strict=True):
            assert len(layers) == 3
            assert all(len(rows) == num_tokens for rows in layers)
            assert all(len(set(row)) == 2 for rows in layers for row in rows)
        # What was visited, hit or missed, is what the routes say.
        num_visited = sum(
            len({expert for row in rows for expert in row}) for layers in passes.routes for rows in layers
        )
        assert num_visited == reply.stats.num_expert_hits + reply.stats.num_expert_misses
        told = [event.arguments for event in traced.events if event.track == "cycle"]
        assert [(event["drafted"], event["accepted"]) for event in told] == [
            (cycle.num_draft_tokens, cycle.num_accepted_tokens) for cycle in cycles
        ]
    # Routes do not depend on the run, nor on what happens to be resident.
    first, second = (
        passes_of(reply.messages[-2].events) for reply in replies if isinstance(reply.messages[-2], Traced)
    )
    assert first == second


def test_without_a_trace_nothing_is_told(running: RunningCore) -> None:
    reply = running.generate(PROMPT, 4)
    assert not any(isinstance(message, Traced) for message in reply.messages)


def test_an_aborted_request_is_traced_too(model: tuple[LoadedModel, BenchConfig]) -> None:
    sent: list[ToServer] = []
    with running_core(*changed(*model, trace=True), num_slots=6) as running:
        running.core.send = sent.append
        running.core.submit(submit("running", PROMPT))
        for _ in range(3):
            running.core.step()
        running.core.abort("running")
    assert isinstance(sent[-2], Traced)
    assert len(passes_of(sent[-2].events).num_tokens) == 3
    assert sent[-1] == Finished("running", "abort")
