import math

import pytest
import torch

from engine.errors import ContextLengthError, RequestError, RequestFailedError
from engine.protocol import SamplingParams, Submit
from engine.request import Request, fitting
from engine.speculative.draft import NO_DRAFT, Draft

EOS = frozenset({7, 9})
VOCAB_SIZE = 12
GREEDY = SamplingParams(temperature=0.0)


def make_request(
    max_tokens: int = 10, *, sampling: SamplingParams = GREEDY, ignore_eos: bool = False, prompt: tuple[int, ...] = (1,)
) -> Request:
    return Request(Submit("a", list(prompt), max_tokens, sampling, ignore_eos), EOS)


def draft_of(token_ids: list[int], probs: list[torch.Tensor]) -> Draft:
    return Draft(token_ids, probs, [1.0] * len(token_ids), is_planned=False)


def random_logits(seed: int, num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def test_a_new_request_has_all_its_tokens_before_it() -> None:
    request = make_request(3)
    assert request.finish_reason is None
    assert request.num_remaining_tokens == 3
    assert request.output_token_ids == []


def test_length_ends_a_request() -> None:
    request = make_request(3)
    assert request.append([1, 2]) == [1, 2]
    assert request.finish_reason is None
    assert request.num_remaining_tokens == 1
    assert request.append([3]) == [3]
    assert request.finish_reason == "length"


def test_tokens_beyond_the_length_are_dropped() -> None:
    request = make_request(3)
    assert request.append([1, 2, 3, 4, 5]) == [1, 2, 3]
    assert request.append([6]) == []
    assert request.output_token_ids == [1, 2, 3]


@pytest.mark.parametrize("eos", sorted(EOS))
def test_an_end_of_sequence_token_is_the_last(eos: int) -> None:
    request = make_request()
    assert request.append([1, eos, 2, 3]) == [1, eos]
    assert request.finish_reason == "stop"
    assert request.append([4]) == []
    assert request.output_token_ids == [1, eos]


def test_an_end_of_sequence_token_in_the_last_place_is_a_stop() -> None:
    request = make_request(2)
    request.append([1, 7])
    assert request.finish_reason == "stop"


def test_an_end_of_sequence_token_may_be_ignored() -> None:
    request = make_request(4, ignore_eos=True)
    assert request.append([1, 7, 9, 2, 3]) == [1, 7, 9, 2]
    assert request.finish_reason == "length"


def test_an_end_of_sequence_token_in_the_prompt_ends_nothing() -> None:
    assert make_request(prompt=(1, 7)).finish_reason is None


def test_greedy_chooses_the_argmax_and_judges_by_it() -> None:
    request = make_request()
    logits = random_logits(0, 3)
    best = logits.argmax(dim=-1).tolist()
    choice = request.choose(logits[0])
    assert choice.token_id == best[0]
    assert torch.equal(choice.probs, logits[0])
    assert choice.confidence == pytest.approx(float(logits[0].softmax(dim=-1)[best[0]]))
    assert request.judge(draft_of(best[:2], [logits[0], logits[1]]), logits).token_ids == best
    wrong = [best[0], (best[1] + 1) % VOCAB_SIZE]
    assert request.judge(draft_of(wrong, [logits[0], logits[1]]), logits).token_ids == best[:2]
    assert request.judge(NO_DRAFT, logits[:1]).token_ids == best[:1]


def test_choose_tells_what_it_drew_from() -> None:
    request = make_request(sampling=SamplingParams(temperature=0.7, top_k=3, seed=1))
    token_id, probs, confidence = request.choose(random_logits(0)[0])
    assert int((probs > 0).sum()) == 3
    assert float(probs.sum()) == pytest.approx(1.0)
    assert float(probs[token_id]) == confidence > 0


def test_the_filters_hold_for_the_targets_tokens_too() -> None:
    request = make_request(sampling=SamplingParams(top_k=1, seed=1))
    logits = random_logits(0, 2)
    best = logits.argmax(dim=-1).tolist()
    unwanted = torch.full((VOCAB_SIZE,), 1 / VOCAB_SIZE)
    for drafted in range(VOCAB_SIZE):
        verdict = request.judge(draft_of([drafted], [unwanted]), logits)
        assert verdict.token_ids == (best if drafted == best[0] else best[:1])


def tokens_of(request: Request) -> list[int]:
    """Ten cycles of a draft that is often wrong."""
    for seed in range(10):
        target = random_logits(seed, 3)
        draft = draft_of([], [])
        for row in target[:2]:
            token_id, probs, _ = request.choose(row + random_logits(seed + 100)[0])
            draft.token_ids.append(token_id)
            draft.probs.append(probs)
        request.append(request.judge(draft, target).token_ids)
    return request.output_token_ids


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
def test_a_seed_makes_sampling_reproducible(seed: int) -> None:
    sampling = SamplingParams(seed=seed)
    first, second = (tokens_of(make_request(100, sampling=sampling, ignore_eos=True)) for _ in range(2))
    assert first == second


def test_other_seeds_and_no_seed_give_other_tokens() -> None:
    outputs = [
        tuple(tokens_of(make_request(100, sampling=SamplingParams(seed=seed), ignore_eos=True)))
        for seed in (0, 1, None, None)
    ]
    assert len(set(outputs)) == 4


def test_a_seed_belongs_to_its_request_alone() -> None:
    alone = tokens_of(make_request(100, sampling=SamplingParams(seed=3), ignore_eos=True))
    torch.manual_seed(99)
    other = make_request(100, sampling=SamplingParams(seed=4), ignore_eos=True)
    other.choose(random_logits(0)[0])
    assert tokens_of(make_request(100, sampling=SamplingParams(seed=3), ignore_eos=True)) == alone


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_token_is_made_up_where_logits_are_not_finite(sampling: SamplingParams, value: float) -> None:
    request = make_request(sampling=sampling)
    logits = random_logits(0, 2)
    logits[1] = value
    with pytest.raises(RequestFailedError, match="not finite"):
        request.choose(logits[1])
    with pytest.raises(RequestFailedError, match="not finite"):
        request.judge(draft_of([3], [torch.full((VOCAB_SIZE,), 1 / VOCAB_SIZE)]), logits)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()])
def test_excluded_tokens_may_have_logits_of_minus_infinity(sampling: SamplingParams) -> None:
    logits = torch.full((VOCAB_SIZE,), -math.inf)
    logits[5] = 0.0
    assert make_request(sampling=sampling).choose(logits).token_id == 5


def test_a_request_gets_the_room_that_its_prompt_leaves() -> None:
    assert fitting(Submit("a", [1, 2], 5), 10, VOCAB_SIZE).max_tokens == 5
    assert fitting(Submit("a", [1, 2], 50), 10, VOCAB_SIZE).max_tokens == 8


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "says"),
    [
        ([1] * 10, 1, ContextLengthError, "maximum context length is 10 tokens"),
        ([], 1, RequestError, "no tokens"),
        ([1, VOCAB_SIZE], 1, RequestError, "token id 12; this model's ids go from 0 to 11"),
        ([-1], 1, RequestError, "token id -1"),
        ([1], 0, RequestError, "max_tokens is 0"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    prompt: list[int], max_tokens: int, error: type[RequestError], says: str
) -> None:
    with pytest.raises(error, match=says):
        fitting(Submit("a", prompt, max_tokens), 10, VOCAB_SIZE)
