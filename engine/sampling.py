"""From logits to a token: pure functions, with the generator as an argument."""

from typing import NamedTuple

import torch

from engine.errors import RequestFailedError
from engine.protocol import SamplingParams


class Choice(NamedTuple):
    token_id: int
    probs: torch.Tensor
    """What the token was drawn from, [V]; the logits, if greedy."""
    confidence: float
    """The token's probability."""


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0.0


def require_finite(logits: torch.Tensor) -> None:
    """Raise `RequestFailedError` where no token can be told from the logits [..., V]: an argmax would make one up."""
    # The largest is NaN where any is; -inf alone is a model's way to exclude a token.
    if not logits.max(dim=-1).values.isfinite().all():
        raise RequestFailedError(
            "The model's logits are not finite: either its weights are damaged, or they overflow the type that it "
            "computes in; try --dtype float32 (or bfloat16)."
        )


def probability(logits: torch.Tensor, token_id: int) -> float:
    """Of the token, by the logits [V] as they are."""
    return float(torch.exp(logits[token_id] - logits.logsumexp(dim=-1)))


def target_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities float32 [..., V] of the next token: temperature, then top-k, top-p and min-p.

    `params` must not be greedy. At least one token always remains.
    """
    logits = logits.float()
    # Shifted so that the largest is 0: divided by any temperature that float32 can hold, it then stays 0.
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    limits = torch.finfo(torch.float32)
    probs = torch.softmax(shifted / min(max(params.temperature, limits.tiny), limits.max), dim=-1)
    if 0 < params.top_k < probs.shape[-1]:
        smallest = probs.topk(params.top_k, dim=-1).values[..., -1:]
        probs = _keep(probs, probs >= smallest)
    if params.top_p < 1.0:
        ordered, order = probs.sort(dim=-1, descending=True)
        # A token stays if those before it do not reach top_p by themselves; so the first always does.
        before = ordered.cumsum(dim=-1) - ordered
        keep = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, before < params.top_p)
        keep |= probs == ordered[..., :1]
        probs = _keep(probs, keep)
    if params.min_p > 0.0:
        probs = _keep(probs, probs >= params.min_p * probs.max(dim=-1, keepdim=True).values)
    return probs


def draw(probs: torch.Tensor, generator: torch.Generator) -> int:
    """A token from the (unnormalised) probabilities [V], on the generator's device."""
    return int(torch.multinomial(probs.to(generator.device), 1, generator=generator))


def _keep(probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = probs.masked_fill(~mask, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)
