"""Download a small dense chat model, upcycle it, and keep the result in the cache directory."""

import importlib.resources
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM

from engine.demo import manifest
from engine.demo.checkpoint import write_shards
from engine.demo.dense import calibration_prompts, load_dense
from engine.demo.source import SMOLLM2, fetch, require_gguf
from engine.demo.upcycle import Recipe, frame_tensors, layer_tensors, mixtral_config, mlp_inputs
from engine.directory import ensure_directory
from engine.errors import PackError
from engine.protocol import Loading, OnProgress

DIRECTORY = Path("models", "smollm2-135m-upcycled-8x")
LAYERS_PER_SHARD = 5
# What the authors of SmolLM2 recommend; at temperature 1 a model of this size rambles.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def build_demo(cache: Path, progress: OnProgress) -> Path:
    """The directory of the demo model, in Hugging Face format; built first where `cache` does not hold it yet.

    Raises `ModelNotFoundError` where the dense model cannot be had, and `PackError` where the result cannot be written.
    """
    path = cache.expanduser() / DIRECTORY
    recipe = Recipe()
    origin = describe_origin(recipe)

    try:
        ensure_directory(
            path,
            is_intact=lambda directory: manifest.is_intact(directory, origin),
            build=lambda directory: _build(directory, recipe, origin, progress),
            waiting=lambda: progress(Loading("Waiting for another process that builds the demo model", 0, 0)),
        )
    except (OSError, SafetensorError) as error:
        raise PackError(
            f"The demo model (1.4 GB) cannot be written to {path}: {error}. Make room there, or choose another cache "
            "directory (SPECTER_CACHE or --cache)."
        ) from error
    return path


def _build(directory: Path, recipe: Recipe, origin: manifest.Origin, progress: OnProgress) -> None:
    require_gguf()
    download = directory / "download"
    download.mkdir()
    gguf = fetch(SMOLLM2, download, progress)
    progress(Loading("Loading the dense model", 0, 0))
    dense, tokenizer = load_dense(gguf)
    shutil.rmtree(download)
    tokenizer.save_pretrained(directory)
    write_model(directory, dense, calibration_prompts(tokenizer), recipe, progress)
    card = importlib.resources.files("engine.demo").joinpath("MODEL_CARD.md")
    (directory / "README.md").write_bytes(card.read_bytes())
    progress(Loading("Computing checksums", 0, 0))
    manifest.write(directory, origin)


def describe_origin(recipe: Recipe) -> manifest.Origin:
    """What the manifest says of a model of this recipe."""
    values = asdict(recipe) | {"dtype": str(recipe.dtype).removeprefix("torch.")}
    return manifest.Origin(source=SMOLLM2.requirement, source_sha256=SMOLLM2.sha256, **values)


def write_model(
    directory: Path, dense: LlamaForCausalLM, prompts: Sequence[Tensor], recipe: Recipe, progress: OnProgress
) -> None:
    """Write configuration and weights of the upcycled model; `prompts` [1, T] are what the routers are made from."""
    config = mixtral_config(dense.config, recipe)
    config.save_pretrained(directory)
    special = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**special, **SAMPLING).save_pretrained(directory)
    samples: list[list[Tensor]] = []
    for prompt in prompts:
        samples.append(mlp_inputs(dense, prompt))
        progress(Loading("Calibrating the routers", len(samples), len(prompts)))
    layer_samples = [torch.cat(layer) for layer in zip(*samples, strict=True)]
    num_shards = math.ceil(config.num_hidden_layers / LAYERS_PER_SHARD)
    write_shards(directory, _shards(dense, layer_samples, recipe, progress), num_shards)


def _shards(
    dense: LlamaForCausalLM, layer_samples: list[Tensor], recipe: Recipe, progress: OnProgress
) -> Iterator[dict[str, Tensor]]:
    shard = frame_tensors(dense, recipe)
    num_layers = len(layer_samples)
    for index, sample in enumerate(layer_samples):
        shard |= layer_tensors(dense, index, sample, recipe)
        progress(Loading("Upcycling the layers", index + 1, num_layers))
        if (index + 1) % LAYERS_PER_SHARD == 0 or index + 1 == num_layers:
            yield shard
            shard = {}
