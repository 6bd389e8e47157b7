"""The first passes of a loaded model: what a pass computes for, before anybody waits for one."""

from collections.abc import Callable

from engine.experts.transfer import ExpertTransfers
from engine.model.causal_lm import CausalLM
from engine.model.dispatch import ExpertsImplementation
from engine.phases import PhaseClock
from engine.profile import PassTimes
from engine.speculative.quantized import QuantizedExperts

NUM_TOKENS = 5
"""Of the longer pass."""
NUM_REPEATS = 2


def measure_passes(
    model: CausalLM,
    experts: ExpertsImplementation,
    transfers: ExpertTransfers,
    quantized: QuantizedExperts | None,
    vocab_size: int,
) -> PassTimes:
    """Run a few passes over arbitrary tokens; what they leave in the expert cache is as good as anything there."""
    cache = model.new_cache((NUM_REPEATS + 1) * (NUM_TOKENS + 2))
    tokens = [(7 * position + 3) % vocab_size for position in range(NUM_TOKENS)]

    def measure(run: Callable[[], object]) -> tuple[float, int]:
        """Seconds without waiting, and experts visited."""
        clock, before = PhaseClock(), transfers.stats()
        with clock.phase("pass"):
            run()
        spent = transfers.stats() - before
        return clock.seconds["pass"] - spent.transfer_wait_seconds, spent.num_expert_hits + spent.num_expert_misses

    def verify(num_tokens: int) -> tuple[float, int]:
        # Reading a number waits for the device.
        return measure(lambda: model.forward(tokens[:num_tokens], cache, experts).max().item())

    def best(num_tokens: int) -> tuple[float, int]:
        # Whatever else the machine does makes passes longer, never shorter.
        return min(verify(num_tokens) for _ in range(NUM_REPEATS))

    verify(1)  # the first pass allocates and compiles
    (one_seconds, one_experts), (most_seconds, most_experts) = best(1), best(NUM_TOKENS)
    draft_seconds = 0.0
    if quantized is not None:
        draft_experts = quantized

        def draft_token() -> None:
            model.forward(tokens[:1], cache, draft_experts)
            draft_experts.take_routes().read()

        measure(draft_token)
        draft_seconds, _ = min(measure(draft_token) for _ in range(NUM_REPEATS))
    return PassTimes((one_seconds, most_seconds), (one_experts, most_experts), draft_seconds)
