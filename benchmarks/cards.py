"""Machines to plan for, and what a model's passes take on them, told from the bytes that they read.

A pass reads the dense weights once and each visited expert once; a drafted token reads the dense weights and its
quantized experts. Arithmetic takes no time beside that, as there are few tokens, nor does the KV cache, which is short.
"""

from typing import NamedTuple

from engine.description import ModelDescription
from engine.profile import PassTimes
from engine.sizing import Choices

GB = 10**9


class Card(NamedTuple):
    """A GPU, by its data sheet."""

    name: str
    num_bytes: int
    bandwidth: float
    """Of its memory, bytes per second."""


class Link(NamedTuple):
    name: str
    bandwidth: float
    """Of copies from page-locked host memory, bytes per second."""


CARDS = (
    Card("RTX 4090", 24 * GB, 1.008e12),
    Card("RTX 5090", 32 * GB, 1.792e12),
    Card("RTX 6000 Ada", 48 * GB, 0.960e12),
)
LINKS = (Link("PCIe 4.0 x16", 24e9), Link("PCIe 5.0 x16", 48e9))

LAYER_SECONDS = 0.3e-3
"""Of launching the kernels of a layer, and of what they do between reads."""
EXPERT_SECONDS = 0.05e-3
"""Of launching those of an expert, on top."""


def pass_times(model: ModelDescription, choices: Choices, card: Card) -> PassTimes:
    """What a profile would measure on the card, for a model with these choices."""
    config, sizes = model.hf_config.get_text_config(), model.sizes
    needs = sizes.needs(choices)
    # A token reads one row of the embeddings, unless they are those of the output too.
    num_embeddings = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    pass_bytes = needs.dense - num_embeddings * choices.dtype.itemsize
    pass_seconds = pass_bytes / card.bandwidth + config.num_hidden_layers * LAYER_SECONDS
    visited = sum(min(model.skeleton.top_k, layer.num_experts) for layer in sizes.layout.layers)
    expert_seconds = sizes.expert_bytes / card.bandwidth + EXPERT_SECONDS
    draft_expert_seconds = needs.draft / sizes.num_experts / card.bandwidth + EXPERT_SECONDS
    return PassTimes(
        verify_seconds=(pass_seconds + visited * expert_seconds, pass_seconds + sizes.num_experts * expert_seconds),
        verify_experts=(visited, sizes.num_experts),
        draft_seconds=pass_seconds + visited * draft_expert_seconds if needs.draft else 0.0,
    )
