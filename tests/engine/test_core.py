"""The step loop: requests in order, aborts, failures, counters; and that the draft's routes are what is prefetched."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.config import DeviceName, EngineConfig
from engine.device import Device, Event, open_device
from engine.experts.layout import ExpertId
from engine.experts.store import ExpertStore
from engine.loading import LoadedModel
from engine.protocol import Failed, Finished, Prefill, SamplingParams, Submit, Tokens, ToServer
from engine.sampling import target_distribution
from engine.speculative.draft import PendingRoutes
from tests.engine.harness import GREEDY, RunningCore, load, running_core
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
def model(mixtral: Path, model_cache: Path, device: DeviceName) -> tuple[LoadedModel, EngineConfig]:
    return load(mixtral, model_cache, device=device)


@pytest.fixture
def reference(mixtral: Path, device: DeviceName) -> Reference:
    """What transformers continues a prompt with, in so many tokens."""
    return partial(reference_tokens, mixtral, ignore_eos=True, device=device)


@pytest.fixture
def running(model: tuple[LoadedModel, EngineConfig]) -> Iterator[RunningCore]:
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


def test_an_abort_is_seen_between_prefill_chunks(model: tuple[LoadedModel, EngineConfig]) -> None:
    loaded, config = model
    sent: list[ToServer] = []
    with running_core(loaded, config.model_copy(update={"prefill_chunk_tokens": 4}), 6) as running:
        running.core.send = sent.append
        running.core.submit(submit("long", random_prompt(0, 40)))
        running.core.step()
        running.core.abort("long")
    assert [type(message) for message in sent] == [Prefill, Finished]
    assert isinstance(sent[0], Prefill)
    assert (sent[0].done, sent[0].total) == (4, 40)


def test_a_request_stops_at_the_end_of_sequence(model: tuple[LoadedModel, EngineConfig], reference: Reference) -> None:
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

    def fetch(self, expert: ExpertId, destination: torch.Tensor) -> Event:
        self.fetched.append(expert)
        if self.is_broken:
            raise OSError(5, "Input/output error")
        return self.store.fetch(expert, destination)

    def close(self) -> None:
        self.store.close()


@pytest.fixture
def store(model: tuple[LoadedModel, EngineConfig]) -> Iterator[RecordingStore]:
    from engine.build import open_store
    from tests.engine.harness import ignore_progress

    device = open_device(model[1].device)
    store = RecordingStore(open_store(model[0].pack, 0, device, ignore_progress), device)
    yield store
    store.close()


def test_a_read_error_fails_the_request_and_not_the_engine(
    model: tuple[LoadedModel, EngineConfig], store: RecordingStore, reference: Reference
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
    model: tuple[LoadedModel, EngineConfig], store: RecordingStore
) -> None:
    loaded, config = model
    assert loaded.draft is not None
    pending: list[PendingRoutes] = []
    take_routes = loaded.draft.take_routes

    def record() -> PendingRoutes:
        pending.append(take_routes())
        return pending[-1]

    sent: list[ToServer] = []
    with (
        pytest.MonkeyPatch.context() as patch,
        running_core(loaded, config, loaded.pack.layout.num_experts, device=store.device, store=store) as running,
    ):
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


def test_counters_add_up(model: tuple[LoadedModel, EngineConfig], store: RecordingStore) -> None:
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


def test_sampling_with_a_draft_has_the_targets_distribution(
    tmp_path: Path, model_cache: Path, device: DeviceName
) -> None:
    """Chi-square over the first three tokens, drawn under a draft so coarse that many tokens are rejected."""
    checkpoint = save_checkpoint(mixtral_config(num_layers=1, vocab_size=16), tmp_path / "one-layer")
    sampling = SamplingParams(temperature=1.5, top_k=2)
    prompt = [3, 4, 5]
    expected = _exact_joint(checkpoint, prompt, sampling, num_tokens=3)
    num_trials = 400
    counts: Counter[tuple[int, ...]] = Counter()
    loaded, config = load(checkpoint, model_cache, device=device, draft_weights="qint2", draft_length=2)
    num_rejected = 0
    with running_core(loaded, config, 6) as running:
        for seed in range(num_trials):
            seeded = SamplingParams(temperature=1.5, top_k=2, seed=seed)
            reply = running.generate(prompt, 3, sampling=seeded, ignore_eos=True)
            counts[tuple(reply.token_ids)] += 1
            num_rejected += reply.stats.num_draft_tokens - reply.stats.num_accepted_tokens
    assert set(counts) <= set(expected)
    assert num_rejected > num_trials / 4
    statistic = sum((counts[t] - num_trials * p) ** 2 / (num_trials * p) for t, p in expected.items())
    assert len(expected) == 8
    assert statistic < 24.3  # 0.1% point of chi-square with 7 degrees of freedom


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
