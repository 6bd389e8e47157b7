"""What a model does with a short text on this machine: routes, drafts and times, from which others are predicted.

The text is the model's own, sampled from its first token on.
"""

import itertools
from collections.abc import Callable, Sequence

import msgspec
import torch

from engine.experts.planner import Routes
from engine.model.causal_lm import CausalLM
from engine.model.dispatch import ExpertsImplementation, ExpertsModule
from engine.model.routers import NextRouters
from engine.protocol import SamplingParams
from engine.sampling import draw, probability, target_distribution
from engine.speculative.lookahead import DEPTH
from engine.speculative.quantized import QuantizedExperts

NUM_TOKENS = 80
SAMPLING = SamplingParams(temperature=0.6)
"""At which the model is about as predictable as in the replies that people ask it for."""


class ProfiledToken(msgspec.Struct, frozen=True, array_like=True):
    """One token of the text."""

    routes: list[list[int]]
    """The experts that the full-precision model visits for it, [L][K]."""
    draft_routes: list[list[int]]
    """Those that the draft's routers name for it; empty where there was no draft."""
    is_drafted: bool
    """Whether the draft proposes, after what is before the token, what the full-precision model finds most probable."""
    confidence: float
    """The draft's own probability of what it proposes there."""
    guesses: list[list[list[int]]]
    """[L][up to `DEPTH`][K]: what the routers of the layers that follow each one would choose.

    See `NextRouters.choices`. Empty where the model's routers cannot be told.
    """


class PassTimes(msgspec.Struct, frozen=True):
    """Seconds of compute, without waiting for experts."""

    verify_seconds: tuple[float, float]
    """Of a full-precision pass over one token, and of one over several."""
    verify_experts: tuple[int, int]
    """The experts that these visited."""
    draft_seconds: float
    """Of one drafted token; 0 without a quantized draft."""

    def least(self, other: "PassTimes") -> "PassTimes":
        """What is best of both: whatever else a machine does makes passes longer, never shorter."""
        verify = tuple(map(min, self.verify_seconds, other.verify_seconds))
        drafts = [times.draft_seconds for times in (self, other) if times.draft_seconds]
        return PassTimes((verify[0], verify[1]), self.verify_experts, min(drafts, default=0.0))


class Profile(msgspec.Struct, frozen=True, tag="profile-2"):
    """The tag says which version of the format it is."""

    tokens: list[ProfiledToken]
    times: PassTimes


class _Recorder:
    """Experts implementation that leaves the work to another one, and notes routes and guesses of a pass. Mutable."""

    def __init__(self, experts: ExpertsImplementation, routers: NextRouters | None) -> None:
        self._experts = experts
        self._routers = routers
        self._routes: list[torch.Tensor] = []
        self._guesses: list[list[list[int]]] = []

    def __call__(
        self,
        module: ExpertsModule,
        layer: int,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        self._routes.append(top_k_index)
        if self._routers is not None:
            last = self._routers.num_layers - 1
            self._guesses.append(
                [
                    self._routers.choices(layer, ahead, hidden_states)[0].tolist()
                    for ahead in range(1, min(DEPTH, last - layer) + 1)
                ]
            )
        return self._experts(module, layer, hidden_states, top_k_index, top_k_weights)

    def take(self) -> tuple[Routes, list[list[list[int]]]]:
        taken = self._routes, self._guesses
        self._routes, self._guesses = [], []
        return taken


def record_profile(
    model: CausalLM,
    experts: ExpertsImplementation,
    quantized: QuantizedExperts | None,
    routers: NextRouters | None,
    first_token_id: int,
    max_model_len: int,
    on_token: Callable[[int], None],
) -> list[ProfiledToken]:
    """Let the model write `NUM_TOKENS` tokens, or what the context holds; `on_token(count)` reports how many."""
    recorder = _Recorder(experts, routers)
    cache = model.new_cache(max_model_len)
    generator = torch.Generator().manual_seed(0)
    token_id = first_token_id
    proposal: tuple[bool, float] = (False, 0.0)
    tokens: list[ProfiledToken] = []
    for _ in itertools.repeat(None, min(NUM_TOKENS, max_model_len - 1)):
        draft_routes: Sequence[torch.Tensor] = []
        draft_logits: torch.Tensor | None = None
        if quantized is not None:
            draft_logits = model.forward([token_id], cache, quantized)[-1]
            draft_routes = quantized.take_routes().read()
            cache.drop(1)
        logits = model.forward([token_id], cache, recorder)[-1]
        cache.drop(0)
        routes, guesses = recorder.take()
        tokens.append(ProfiledToken(_of_one(routes), _of_one(draft_routes), *proposal, guesses))
        if draft_logits is not None:
            proposed = int(draft_logits.argmax())
            proposal = (proposed == int(logits.argmax()), probability(draft_logits, proposed))
        token_id = draw(target_distribution(logits, SAMPLING), generator)
        on_token(len(tokens))
    return tokens


def _of_one(routes: Routes) -> list[list[int]]:
    """Of a pass over one token."""
    return [experts[0].tolist() for experts in routes]
