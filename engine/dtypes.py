"""torch's types and their names, as configurations and manifests write them."""

import torch


def torch_dtype(name: str) -> torch.dtype:
    """The type called `name`, such as "bfloat16"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
