"""Router rows that spread tokens evenly over experts, without training and without a bias."""

import torch
from torch import Tensor


def router_rows(inputs: Tensor, num_experts: int, generator: torch.Generator) -> Tensor:
    """Rows [E, H] whose logits have mean 0 and variance 1 over `inputs` [N, H]; needs `E < H` and `E < N`.

    The rows are orthogonal to one another: they are a random rotation of the E leading principal directions of the
    inputs' part that is orthogonal to the mean input. Without the mean no expert has a head start; with the rotation no
    expert owns the strongest direction alone.
    """
    samples = inputs.double()
    mean_direction = torch.nn.functional.normalize(samples.mean(dim=0), dim=0)
    residuals = samples - torch.outer(samples @ mean_direction, mean_direction)
    _, directions = torch.linalg.eigh(residuals.T @ residuals)  # ascending, so the leading ones come last
    gaussian = torch.randn(num_experts, num_experts, generator=generator, dtype=torch.float64)
    rows: Tensor = torch.linalg.qr(gaussian).Q @ directions[:, -num_experts:].T  # [E, H]
    deviation = (residuals @ rows.T).square().mean(dim=0).sqrt()  # [E]
    return (rows / deviation[:, None]).to(inputs.dtype)
