"""The prompts: a mixed set, since what a drafter and a cache are worth depends on the text.

The one of kind "code" is HumanEval/0 of https://github.com/openai/human-eval (Chen et al. 2021, arXiv:2107.03374),
copyright (c) OpenAI (https://openai.com), under the MIT licence. The others are our own.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

from server.bench.long_prompt import long_prompt

if TYPE_CHECKING:
    # Importing it takes seconds, in which an engine can start.
    from server.tokenizer import Tokenizer

Kind = Literal["chat", "prose", "code", "long"]


class Prompt(NamedTuple):
    name: str
    kind: Kind
    text: str
    """What the user says."""


class TokenizedPrompt(NamedTuple):
    name: str
    kind: Kind
    token_ids: list[int]


HAS_CLOSE_ELEMENTS = '''\
from typing import List


def has_close_elements(numbers: List[float], threshold: float) -> bool:
    """ Check if in given list of numbers, are any two numbers closer to each other than
    given threshold.
    >>> has_close_elements([1.0, 2.0, 3.0], 0.5)
    False
    >>> has_close_elements([1.0, 2.8, 3.0, 4.0, 5.0, 2.0], 0.3)
    True
    """
'''
PROMPTS = (
    Prompt("chat", "chat", "Explain how a bicycle stays upright, for a curious child."),
    Prompt("code", "code", f"Complete this Python function:\n\n{HAS_CLOSE_ELEMENTS}"),
    Prompt("prose", "prose", "Write a short story about a lighthouse keeper who finds a letter after a storm."),
    Prompt("long", "long", long_prompt()),
)
NUM_QUICK = 2
WARM_UP = Prompt("warm-up", "chat", "Name a colour.")


def tokenized(prompt: Prompt, tokenizer: "Tokenizer") -> TokenizedPrompt:
    """As `specter serve` does it for a chat; where the model has no chat template, the text alone."""
    from server.tokenizer import TemplateRefusedError

    try:
        token_ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}], {})
    except TemplateRefusedError:
        token_ids = tokenizer.encode(prompt.text)
    return TokenizedPrompt(prompt.name, prompt.kind, token_ids)


def fitting(
    prompts: list[TokenizedPrompt], max_tokens: int, max_model_len: int
) -> tuple[list[TokenizedPrompt], list[str]]:
    """The prompts that leave room for a reply, and a sentence about each other one."""
    fits = [prompt for prompt in prompts if len(prompt.token_ids) + max_tokens <= max_model_len]
    notes = [
        f"The prompt '{prompt.name}' is left out: its {len(prompt.token_ids)} tokens and {max_tokens} of reply do not "
        f"fit the context of {max_model_len}."
        for prompt in prompts
        if prompt not in fits
    ]
    return fits, notes
