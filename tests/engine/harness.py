"""An engine core in the test's own process, with as many slots as the test wants."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine.build import assemble_core, open_store, open_transfers
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.description import describe_model
from engine.device import Device, open_device
from engine.experts.store import ExpertStore
from engine.experts.transfer import ExpertTransfers
from engine.loading import LoadedModel, load_model
from engine.phases import PhaseClock
from engine.protocol import CycleStats, Failed, Finished, Prefill, SamplingParams, Submit, Tokens, ToServer

GREEDY = SamplingParams(temperature=0.0)


def ignore_progress(message: object) -> None:
    """For loads whose progress is not what the test is about."""


def load(checkpoint: Path, cache: Path, **settings: object) -> tuple[LoadedModel, EngineConfig]:
    """Load a checkpoint, onto the CPU by default, to compute in float32; `settings` are those of `EngineConfig`."""
    defaults = {"device": "cpu", "dtype": "float32", "draft_group_size": 32}
    config = EngineConfig.model_validate({"model": str(checkpoint), "cache": cache, **defaults, **settings})
    device = open_device(config.device)
    model = describe_model(config, checkpoint, device.torch_device)
    return load_model(config, model, device, PhaseClock(), ignore_progress), config


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
    config: EngineConfig,
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
            store = open_store(loaded.pack, num_host_experts, device, ignore_progress)
            stack.callback(store.close)
        transfers = open_transfers(loaded, num_slots, store, device)
        stack.callback(transfers.close)
        yield RunningCore(assemble_core(loaded, transfers, config), transfers)
        transfers.check_integrity()
