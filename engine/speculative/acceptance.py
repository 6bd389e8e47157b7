"""Which drafted tokens the target agrees with: pure functions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.sampling import draw


class Verdict(NamedTuple):
    token_ids: list[int]
    """The accepted drafted tokens and one of the target's own: recovered at the first disagreement, else a bonus."""
    num_accepted: int


def accept_greedy(draft_token_ids: Sequence[int], logits: torch.Tensor) -> Verdict:
    """Accept while the draft is the target's argmax. `logits` [k + 1, V] of the target, for k drafted tokens."""
    targets = logits.argmax(dim=-1).tolist()
    num_accepted = 0
    for drafted, target in zip(draft_token_ids, targets, strict=False):
        if drafted != target:
            break
        num_accepted += 1
    return Verdict(targets[: num_accepted + 1], num_accepted)


def accept_sampled(
    draft_token_ids: Sequence[int],
    draft_probs: Sequence[torch.Tensor],
    target_probs: torch.Tensor,
    generator: torch.Generator,
) -> Verdict:
    """Speculative sampling: the tokens are distributed as if drawn from the target one by one.

    Accept a drafted token x with probability min(1, p(x) / q(x)); at the first rejection draw from max(p - q, 0).
    `draft_probs` q, k times [V]; `target_probs` p [k + 1, V]. Source: Leviathan et al. 2023, section 2.3.
    """
    accepted: list[int] = []
    for position, (token_id, q) in enumerate(zip(draft_token_ids, draft_probs, strict=True)):
        p = target_probs[position]
        chance = torch.rand((), generator=generator, device=generator.device)
        # Multiplied out, so that q(x) == 0, which a draw can never give, needs no special case.
        if chance * q[token_id].to(chance.device) < p[token_id].to(chance.device):
            accepted.append(token_id)
            continue
        residual = (p - q).clamp_(min=0.0)
        # Where p and q agree up to rounding, nothing is left of their difference; then p itself is right.
        recovered = draw(residual if residual.sum() > 0 else p, generator)
        return Verdict([*accepted, recovered], position)
    return Verdict([*accepted, draw(target_probs[-1], generator)], len(accepted))
