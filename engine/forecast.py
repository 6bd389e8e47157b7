"""What decoding a token is expected to move, from sizes alone.

Assumed is that routing is uniform and independent from token to token: U(n) = E (1 - (1 - K/E)^n) distinct experts per
layer over n tokens, of which as many are resident as there are slots for. Real routing is more local, so a cache does
better; what the bench measures counts. With acceptance rate a, a cycle of k drafted tokens yields
A = (1 - a^(k+1)) / (1 - a) tokens.
"""

from collections.abc import Sequence

from engine.protocol import Forecast

ACCEPTANCE_RATE = 0.8
"""Of tokens that quantized experts draft."""
NGRAM_ACCEPTANCE_RATE = 0.4
"""Of tokens that followed the same ones before; it depends on the text."""


def accepted_tokens(draft_length: int, acceptance_rate: float = ACCEPTANCE_RATE) -> float:
    """Tokens per cycle, with the recovered or bonus token."""
    return sum(acceptance_rate**i for i in range(draft_length + 1))


def distinct_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Experts of a layer that some of the tokens are routed to."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def forecast(
    experts_per_layer: Sequence[int],
    top_k: int,
    expert_bytes: int,
    *,
    draft_length: int,
    num_slots: int,
    num_host_experts: int,
) -> Forecast:
    """Bytes per output token; `experts_per_layer` counts the experts of each mixture-of-experts layer."""
    num_experts = sum(experts_per_layer)
    visited = sum(distinct_experts(count, min(top_k, count), draft_length + 1) for count in experts_per_layer)
    missed_bytes = visited * (1 - num_slots / num_experts) * expert_bytes / accepted_tokens(draft_length)
    host_share = num_host_experts / num_experts
    return Forecast(draft_length, num_slots, missed_bytes * host_share, missed_bytes * (1 - host_share))
