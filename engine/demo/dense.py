"""Load the dense chat model and its tokenizer from the GGUF file."""

import contextlib
import importlib.resources
import io
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM, TokenizersBackend

SEPARATOR = "\n---\n"


def load_dense(path: Path) -> tuple[LlamaForCausalLM, TokenizersBackend]:
    """The model of a GGUF file in float32, and its tokenizer with the chat template."""
    # transformers draws its own progress bars on stderr here, with no way to turn off that of the de-quantization.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = TokenizersBackend.from_pretrained(path.parent, gguf_file=path.name)
        model = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # The file names its pre-tokenizer ("smollm"), but transformers takes GPT-2's, which groups spaces before digits in
    # another way.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model.eval(), tokenizer


def calibration_prompts(tokenizer: TokenizersBackend) -> list[Tensor]:
    """The built-in dialogues as token ids [1, T], in the form in which the model will meet them."""
    text = importlib.resources.files("engine.demo").joinpath("calibration.txt").read_text(encoding="utf-8")
    prompts = []
    for dialogue in text.split(SEPARATOR):
        question, answer = dialogue.strip().split("\n", maxsplit=1)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        prompts.append(torch.tensor([tokenizer(rendered)["input_ids"]]))
    return prompts
