import pytest
import torch

from engine.kernels.quantization import unpack_integers


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """quanto's operator would compile an extension; `test_unpacking_undoes_packing` shows that ours is the same."""
    monkeypatch.setattr(torch.ops.quanto, "unpack", unpack_integers)
