"""What a pass takes on the meta device is what it takes on a real one."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.model import meta_pass
from engine.model.dispatch import EXPERTS_IMPLEMENTATION
from engine.model.kv_cache import KvCache
from engine.model.meta_pass import MetaPass, PassMemory, measure_pass
from engine.model.skeleton import meta_model
from tests.engine.families import FAMILIES
from tests.engine.tiny import mixtral_config

NUM_TOKENS = 16
MAX_CONTEXT = 240


def measured(config: PreTrainedConfig, *, on_cpu: bool = False) -> PassMemory:
    return measure_pass(meta_model(config, torch.float32), NUM_TOKENS, MAX_CONTEXT, on_cpu=on_cpu)


class RealPass(MetaPass):
    """The same pass over real tensors."""

    def __call__(self, cache: KvCache, num_tokens: int) -> None:
        inputs = torch.zeros(1, num_tokens, dtype=torch.long)
        with torch.no_grad(), self._dispatch.using(self._compute):
            self._model(input_ids=inputs, cache=cache.transformers_cache, use_cache=True, logits_to_keep=1)


def really_measured(config: PreTrainedConfig, context: int) -> int:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation=EXPERTS_IMPLEMENTATION
    )
    run, cache = RealPass(model.eval()), KvCache(config, context)
    run(cache, context)
    cache.drop(NUM_TOKENS)
    storages, peaks = meta_pass._LiveStorages(), [0]

    def end_layer() -> None:
        peaks.append(storages.take_peak() - storages.live_bytes(meta_pass._states(cache)))

    run = RealPass(model, end_layer=end_layer)
    with storages:
        run(cache, NUM_TOKENS)
        end_layer()
    return max(peaks)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("context", [NUM_TOKENS, MAX_CONTEXT])
def test_a_pass_takes_what_it_takes_for_real(name: str, context: int) -> None:
    config = FAMILIES[name]()
    # Real attention returns some numbers besides its result, and a real model reads some.
    assert measured(config, on_cpu=True).at(context) == pytest.approx(really_measured(config, context), rel=0.15)


def test_nothing_of_the_dispatch_or_of_torch_is_left_changed() -> None:
    attention = torch.nn.functional.scaled_dot_product_attention
    measured(mixtral_config())
    assert torch.nn.functional.scaled_dot_product_attention is attention
    assert torch.zeros(3).sum().item() == 0
    assert torch.ones(3).sum().item() == 3


def test_memory_grows_with_the_context() -> None:
    memory = measured(mixtral_config())
    config = mixtral_config()
    # At least the keys or the values, repeated for all heads because there is a mask.
    repeated = config.hidden_size * 4
    assert memory.bytes_per_token >= repeated
    assert memory.at(MAX_CONTEXT) - memory.at(NUM_TOKENS) == pytest.approx(
        memory.bytes_per_token * (MAX_CONTEXT - NUM_TOKENS), abs=1
    )
    assert memory.at(1) == memory.at(NUM_TOKENS) == memory.least_bytes


def test_attention_that_is_not_fused_takes_its_scores() -> None:
    config = FAMILIES["gpt_oss"]()
    scores = config.num_attention_heads * NUM_TOKENS * 4
    assert measured(config).bytes_per_token > scores
    # Values of another size than keys have no fused kernel on a CPU.
    config = FAMILIES["deepseek_v3"]()
    assert measured(config, on_cpu=True).bytes_per_token > measured(config).bytes_per_token


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v2"])
def test_a_few_layers_tell_what_all_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = FAMILIES[name]()
    whole = measured(config)
    monkeypatch.setattr(meta_pass, "NUM_MEASURED_LAYERS", 2)
    assert measured(config) == whole


def test_a_context_shorter_than_a_pass_is_one_pass() -> None:
    model = meta_model(mixtral_config(), torch.float32)
    memory = measure_pass(model, 512, 32, on_cpu=True)
    assert memory == PassMemory(32, memory.least_bytes, 0.0)
    assert memory.least_bytes < measure_pass(model, 64, 64, on_cpu=True).least_bytes
