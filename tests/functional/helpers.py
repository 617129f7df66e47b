"""Random inputs and comparisons that the tests of this folder share."""

from collections.abc import Callable

import torch
from torch import Tensor

EXACT = {"rtol": 1e-12, "atol": 1e-12}
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 100]


def trajectory(steps: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random rows, in the order of the arguments; inside an episode, next_values[t] is values[t + 1]."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values, finals = torch.randn(3, steps, *shape, generator=generator, dtype=torch.float64)
    terminated, truncated = torch.rand(2, steps, *shape, generator=generator) < 0.15
    ends = terminated | truncated
    next_values = torch.where(ends, finals, torch.cat([values[1:], finals[-1:]]))
    rows = {
        "rewards": rewards,
        "values": values,
        "next_values": next_values,
        "discounts": 0.97 * (1 - terminated.double()),
        "traces": 0.9 * (1 - ends.double()),
    }
    return {name: row.to(dtype) for name, row in rows.items()}


def without(rows: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: row for name, row in rows.items() if name not in names}


def log_rhos_like(x: Tensor) -> Tensor:
    return 0.7 * torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=x.dtype)


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    at = at.detach().requires_grad_()
    (result,) = torch.autograd.grad(function(at).sum(), at)
    return result


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual: Tensor, expected: list[float] | Tensor) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), equal_nan=True)
