"""Which settings would make a model fit that does not."""

from collections.abc import Callable

import torch

from engine.sizing import Choices, ModelSizes

MEGABYTE = 10**6
CONTEXT_STEP_TOKENS = 512
"""Shorter contexts are advised in such steps, and none shorter than one."""


def device_remedies(sizes: ModelSizes, choices: Choices, budget_bytes: int, free_bytes: int | None) -> list[str]:
    """Settings each of which would make the model fit; empty where nothing but a bigger device helps.

    `budget_bytes` is what the device may use, and `free_bytes` what it has; None where that is not known.
    """
    remedies = []
    least_bytes = sizes.needs(choices).total + sizes.expert_bytes
    if free_bytes is None:
        remedies.append(f"--device-memory {_size_between(least_bytes, least_bytes + MEGABYTE - 1)}")
    elif least_bytes <= free_bytes:
        enough_bytes = max(budget_bytes, least_bytes + MEGABYTE - 1)
        remedies.append(f"--device-memory {_size_between(least_bytes, min(enough_bytes, free_bytes))}")
    if free_bytes is None or budget_bytes <= free_bytes:  # or else slots would take what is saved
        remedies += _savings(sizes, choices, budget_bytes)
    if not remedies and free_bytes is not None:
        megabytes = free_bytes // MEGABYTE
        savings = _savings(sizes, choices, megabytes * MEGABYTE)
        remedies = [f"--device-memory {megabytes}MB {saving}" for saving in savings]
    return remedies


def _savings(sizes: ModelSizes, choices: Choices, room_bytes: int) -> list[str]:
    """What to do without, to fit a room that is too small for the choices as they are."""

    def fits(alternative: Choices) -> bool:
        return sizes.needs(alternative).total + sizes.expert_bytes <= room_bytes

    plain = choices.without_draft()
    halved = choices._replace(kv_dtype=torch.bfloat16)
    savings = []
    if sizes.has_convertible_kv and choices.kv_dtype.itemsize > halved.kv_dtype.itemsize and fits(halved):
        savings.append("--kv-dtype bfloat16")
    if fits(plain):
        savings.append("--draft none")
    if context := _longest_context(choices, fits):
        savings.append(f"--max-model-len {context}")
    elif not fits(plain) and (context := _longest_context(plain, fits)):
        savings.append(f"--draft none --max-model-len {context}")
    return savings


def _size_between(least_bytes: int, most_bytes: int) -> str:
    """The most of it in whole megabytes, or in bytes where it has none."""
    megabytes = most_bytes // MEGABYTE
    return f"{megabytes}MB" if megabytes * MEGABYTE >= least_bytes else f"{most_bytes}B"


def _longest_context(choices: Choices, fits: Callable[[Choices], bool]) -> int:
    """The longest context that fits, in whole steps; 0 where none does."""
    low, high = 0, choices.max_model_len // CONTEXT_STEP_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if fits(choices._replace(max_model_len=middle * CONTEXT_STEP_TOKENS)):
            low = middle
        else:
            high = middle - 1
    return low * CONTEXT_STEP_TOKENS
