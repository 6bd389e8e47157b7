import pytest
import torch

from engine.sampling import draw
from engine.speculative.acceptance import Verdict, accept_greedy, accept_sampled

VOCAB_SIZE = 8
NUM_TRIALS = 1500


def logits_for(*token_ids: int) -> torch.Tensor:
    """Target logits [len, V] whose argmax is these tokens."""
    return torch.nn.functional.one_hot(torch.tensor(token_ids), VOCAB_SIZE).float()


@pytest.mark.parametrize(
    ("drafted", "targets", "expected"),
    [
        ([], [4], Verdict([4], 0)),
        ([1, 2, 3], [1, 2, 3, 4], Verdict([1, 2, 3, 4], 3)),
        ([1, 2, 3], [0, 2, 3, 4], Verdict([0], 0)),
        ([1, 2, 3], [1, 0, 3, 4], Verdict([1, 0], 1)),
        ([1, 2, 3], [1, 2, 0, 4], Verdict([1, 2, 0], 2)),
    ],
)
def test_greedy_accepts_up_to_the_first_disagreement(drafted: list[int], targets: list[int], expected: Verdict) -> None:
    assert accept_greedy(drafted, logits_for(*targets)) == expected


class World:
    """A target and a draft in which the next token depends on the last one: a row per last token, and one to start."""

    def __init__(self, target: torch.Tensor, draft: torch.Tensor) -> None:
        self.target = target
        self.draft = draft

    def two_tokens(self, generator: torch.Generator, num_drafted: int) -> tuple[int, int]:
        """The first two tokens that cycles of draft and acceptance decide on."""
        decided: list[int] = []
        while len(decided) < 2:
            state = decided[-1] if decided else VOCAB_SIZE
            states, drafted = [state], []
            for _ in range(num_drafted):
                drafted.append(draw(self.draft[states[-1]], generator))
                states.append(drafted[-1])
            verdict = accept_sampled(drafted, [self.draft[s] for s in states[:-1]], self.target[states], generator)
            assert verdict.token_ids[: verdict.num_accepted] == drafted[: verdict.num_accepted]
            assert len(verdict.token_ids) == verdict.num_accepted + 1
            decided += verdict.token_ids
        return decided[0], decided[1]


def random_rows(seed: int, sharpness: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(sharpness * torch.randn(VOCAB_SIZE + 1, VOCAB_SIZE, generator=generator), dim=-1)


def only(rows: torch.Tensor, tokens: slice) -> torch.Tensor:
    kept = torch.zeros_like(rows)
    kept[:, tokens] = rows[:, tokens]
    return kept / kept.sum(dim=-1, keepdim=True)


WORLDS = {
    "unlike": World(random_rows(1), random_rows(2)),
    "alike": World(random_rows(3), torch.softmax(random_rows(3).log() + 0.3 * random_rows(4).log(), dim=-1)),
    "equal": World(random_rows(5), random_rows(5)),
    "disjoint": World(only(random_rows(6), slice(0, 4)), only(random_rows(7), slice(4, 8))),
    "overlapping": World(only(random_rows(8), slice(0, 5)), only(random_rows(9), slice(3, 8))),
    "certain draft": World(random_rows(10), torch.eye(VOCAB_SIZE)[random_rows(11).argmax(dim=-1)]),
    "certain target": World(torch.eye(VOCAB_SIZE)[random_rows(12).argmax(dim=-1)], random_rows(13)),
}


def chance_of_deviation(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's chi-square test: how probable it is that draws from `probs` deviate as much as `counts`, or more."""
    expected = probs.double() * counts.sum()
    assert int(counts[expected == 0].sum()) == 0, "a token that the target never gives"
    small = expected < 5  # too rare to be compared one by one
    observed = torch.cat([counts[~small], counts[small].sum().view(1)]).double()
    expected = torch.cat([expected[~small], expected[small].sum().view(1)])
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


def count(world: World, num_drafted: int) -> torch.Tensor:
    """How often each pair of first tokens came up, [V, V]."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.int64)
    for _ in range(NUM_TRIALS):
        counts[world.two_tokens(generator, num_drafted)] += 1
    return counts


# One drafted token shows acceptance, recovery and bonus; the second of two shows them further on.
@pytest.mark.parametrize(("name", "num_drafted"), [*((name, 1) for name in WORLDS), ("unlike", 2), ("overlapping", 2)])
def test_tokens_are_distributed_as_the_target_alone_would_draw_them(name: str, num_drafted: int) -> None:
    world = WORLDS[name]
    counts = count(world, num_drafted)
    first = world.target[VOCAB_SIZE]
    assert chance_of_deviation(counts.sum(dim=1), first) > 1e-3
    joint = first.unsqueeze(1) * world.target[:VOCAB_SIZE]
    assert chance_of_deviation(counts.flatten(), joint.flatten()) > 1e-3


def test_the_test_would_notice_the_draft_showing_through() -> None:
    world = WORLDS["unlike"]
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    for _ in range(NUM_TRIALS):
        drafted = draw(world.draft[VOCAB_SIZE], generator)
        chance = world.target[VOCAB_SIZE, drafted] / world.draft[VOCAB_SIZE, drafted]
        accepted = bool(torch.rand((), generator=generator) < chance)
        # The mistake: after a rejection, the target itself instead of what it has over the draft.
        counts[drafted if accepted else draw(world.target[VOCAB_SIZE], generator)] += 1
    assert chance_of_deviation(counts, world.target[VOCAB_SIZE]) < 1e-4


def test_equal_distributions_accept_everything() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = random_rows(5)[:4]
    for _ in range(200):
        drafted = [draw(row, generator) for row in rows[:3]]
        verdict = accept_sampled(drafted, list(rows[:3]), rows, generator)
        assert verdict.num_accepted == 3
        assert verdict.token_ids[:3] == drafted


def test_disjoint_supports_accept_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    world = WORLDS["disjoint"]
    for _ in range(50):
        drafted = draw(world.draft[0], generator)
        verdict = accept_sampled([drafted], [world.draft[0]], world.target[:2], generator)
        assert verdict.num_accepted == 0
        assert float(world.target[0, verdict.token_ids[0]]) > 0


def test_a_rejection_that_leaves_nothing_of_the_difference_draws_from_the_target() -> None:
    # Rounding can make the target nowhere more probable than the draft; a factor shows it more often.
    generator = torch.Generator().manual_seed(0)
    p = only(random_rows(1), slice(0, 4))[0]
    verdicts = [accept_sampled([0], [p], torch.stack([p / 2, p]), generator) for _ in range(50)]
    recovered = [verdict.token_ids[0] for verdict in verdicts if verdict.num_accepted == 0]
    assert recovered
    assert all(float(p[token_id]) > 0 for token_id in recovered)


def test_the_rate_of_acceptance_is_the_overlap() -> None:
    # Leviathan et al. 2023, theorem 3.5: the chance to accept is the sum of min(p, q).
    generator = torch.Generator().manual_seed(0)
    p, q = random_rows(1)[0], random_rows(2)[0]
    accepted = sum(
        accept_sampled([draw(q, generator)], [q], torch.stack([p, p]), generator).num_accepted
        for _ in range(NUM_TRIALS)
    )
    overlap = float(torch.minimum(p, q).sum())
    deviation = (overlap * (1 - overlap) * NUM_TRIALS) ** 0.5
    assert accepted == pytest.approx(overlap * NUM_TRIALS, abs=4 * deviation)


def test_without_a_draft_the_token_is_drawn_from_the_target() -> None:
    target = torch.eye(VOCAB_SIZE)[3:4]
    assert accept_sampled([], [], target, torch.Generator()) == Verdict([3], 0)


def test_the_same_seed_gives_the_same_verdict() -> None:
    world = WORLDS["unlike"]
    pairs = [
        [world.two_tokens(generator, 2) for _ in range(20)]
        for generator in (torch.Generator().manual_seed(7), torch.Generator().manual_seed(7))
    ]
    assert pairs[0] == pairs[1]
