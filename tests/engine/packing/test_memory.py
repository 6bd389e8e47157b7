"""What packing holds in memory, measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import MixtralConfig

from engine.model.skeleton import meta_model

NUM_LAYERS = 6
SLACK_BYTES = 40 * 2**20
"""For conversions, buffers and the allocator: well below a layer."""

MEASURE = """
import json, sys
from pathlib import Path
import torch
from engine.kernels.quantization import QuantizationSpec
from engine.model.checkpoint import read_config
from engine.packing import ensure_draft, ensure_pack
from engine.resident import peak_memory, release_freed_memory
from tests.engine.test_resident import resident_bytes

torch.set_num_threads(1)
checkpoint, cache = Path(sys.argv[1]), Path(sys.argv[2])
config = read_config(checkpoint)
before_packing = resident_bytes()
with peak_memory() as packing:
    pack = ensure_pack(checkpoint, config, None, cache, 0, lambda message: None)
release_freed_memory()
before_quantizing = resident_bytes()
with peak_memory() as quantizing:
    ensure_draft(pack, QuantizationSpec("qint4", 64), 0, lambda message: None)
print(json.dumps([packing.num_bytes - before_packing, quantizing.num_bytes - before_quantizing]))
"""


@pytest.fixture
def sizes(tmp_path: Path) -> tuple[int, int]:
    """Bytes of the dense weights and of one layer's experts, of a checkpoint of six layers and 380 MB in all."""
    config = MixtralConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=1280,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=8,
        dtype=torch.bfloat16,
    )
    config.save_pretrained(tmp_path / "model")
    dense = {
        name: torch.zeros(tensor.shape, dtype=torch.bfloat16)
        for name, tensor in meta_model(config, torch.bfloat16).state_dict().items()
        if ".experts." not in name
    }
    save_file(dense, tmp_path / "model" / "model-dense.safetensors")
    weight_map = dict.fromkeys(dense, "model-dense.safetensors")
    matrix = torch.randn(1280, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    layer_bytes = 8 * 3 * matrix.nbytes
    for layer in range(NUM_LAYERS):
        experts = {
            f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w{i}.weight": (
                matrix.T if i == 2 else matrix
            ).clone(memory_format=torch.contiguous_format)
            for expert in range(8)
            for i in (1, 2, 3)
        }
        save_file(experts, tmp_path / "model" / f"model-{layer}.safetensors")
        weight_map |= dict.fromkeys(experts, f"model-{layer}.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(tensor.nbytes for tensor in dense.values()), layer_bytes


def test_packing_and_quantizing_hold_about_a_layer(tmp_path: Path, sizes: tuple[int, int]) -> None:
    dense_bytes, layer_bytes = sizes
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "model"), str(tmp_path / "cache")],
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    ).stdout
    packing, quantizing = json.loads(output)
    whole = dense_bytes + NUM_LAYERS * layer_bytes
    assert layer_bytes < packing < dense_bytes + 2 * layer_bytes + SLACK_BYTES < 0.6 * whole
    # Less in truth: an expert at a time, and what becomes of a layer.
    assert quantizing < 2 * layer_bytes + SLACK_BYTES
