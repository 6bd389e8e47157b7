"""An engine core in the test's own process, with as many slots as the test wants."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine.assembly import assemble_core, open_parts, open_store
from engine.choice import draft_control
from engine.config import MAX_DRAFT_LENGTH, BenchConfig
from engine.core import EngineCore
from engine.description import _choices, describe_model
from engine.device import Device, open_device
from engine.experts.store import ExpertStore
from engine.experts.transfer import ExpertTransfers
from engine.loading import LoadedModel, load_model
from engine.phases import PhaseClock
from engine.protocol import CycleStats, Failed, Finished, Prefill, SamplingParams, Submit, Tokens, ToServer
from engine.speculative.governor import NUM_CONFIDENCE_BINS, Expectation

EXPECTATION = Expectation(
    acceptance_rate=0.8,
    acceptance_by_confidence=[0.8] * NUM_CONFIDENCE_BINS,
    draft_seconds=1e-3,
    pass_experts=[10.0 * (1 - 0.8**num_tokens) for num_tokens in range(1, MAX_DRAFT_LENGTH + 2)],
    verify_seconds=(1e-3, 3e-3),
    transfer_bytes=(1e4, 3e4),
    bandwidth=1e8,
)
"""Of the governor, before it has seen anything."""
GREEDY = SamplingParams(temperature=0.0)


def ignore_progress(message: object) -> None:
    """For loads whose progress is not what the test is about."""


def load(checkpoint: Path, cache: Path, **settings: object) -> tuple[LoadedModel, BenchConfig]:
    """Load a checkpoint, onto the CPU by default, to compute in float32; `settings` are those of `BenchConfig`."""
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "draft": "quantized",
        "draft_length": 4,
        "draft_group_size": 32,
    }
    config = BenchConfig.model_validate({"model": str(checkpoint), "cache": cache, **defaults, **settings})
    device = open_device(config.device)
    model = describe_model(config, checkpoint, device.torch_device)
    return load_model(config, model, device, PhaseClock(), ignore_progress), config


def changed(loaded: LoadedModel, config: BenchConfig, **settings: object) -> tuple[LoadedModel, BenchConfig]:
    """The loaded model with other settings, which may leave out its draft and change nothing else that is loaded."""
    config = BenchConfig.model_validate(config.model_dump() | settings)
    model = loaded.description
    torch_device = open_device(config.device).torch_device
    choices = _choices(config, model.hf_config, model.skeleton.dtype, torch_device)
    assert choices.draft in (None, model.choices.draft)
    draft = loaded.draft if choices.draft else None
    return loaded._replace(description=model._replace(choices=choices), draft=draft), config


@dataclass
class Reply:
    """Everything that the core sent for one request."""

    messages: list[ToServer] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for message in self.messages if isinstance(message, Tokens) for token_id in message.token_ids]

    @property
    def end(self) -> ToServer:
        return self.messages[-1]

    @property
    def stats(self) -> CycleStats:
        """Sum over prefill and all cycles."""
        total = CycleStats()
        for message in self.messages:
            if isinstance(message, Prefill | Tokens):
                total = total + message.cycle
        return total


@dataclass
class RunningCore:
    core: EngineCore
    transfers: ExpertTransfers

    def generate(
        self, prompt: list[int], max_tokens: int, *, sampling: SamplingParams = GREEDY, ignore_eos: bool = False
    ) -> Reply:
        """Serve one request to its end."""
        reply = Reply()
        self.core.send = reply.messages.append
        self.core.submit(Submit("request", prompt, max_tokens, sampling, ignore_eos))
        while self.core.has_work:
            self.core.step()
        assert isinstance(reply.end, Finished | Failed)
        return reply


@contextmanager
def running_core(
    loaded: LoadedModel,
    config: BenchConfig,
    num_slots: int,
    *,
    device: Device | None = None,
    store: ExpertStore | None = None,
    num_host_experts: int = 0,
) -> Iterator[RunningCore]:
    """A core with `num_slots` slots and its transfer threads; the slots' invariants are checked at the end.

    Without a `device` it runs on the one that the configuration names; without a `store`, so many experts are in host
    memory and the others on disk.
    """
    device = device or open_device(config.device)
    with ExitStack() as stack:
        if store is None:
            store = stack.enter_context(open_store(loaded.pack, num_host_experts, device, ignore_progress))
        parts = stack.enter_context(open_parts(loaded, config, store, num_slots, device))
        control = draft_control(config, loaded.description.choices, EXPECTATION)
        yield RunningCore(assemble_core(parts, config, control), parts.transfers)
        parts.transfers.check_integrity()
