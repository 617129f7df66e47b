"""Checks of every distribution, and random parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import kl_divergence

from lightning_rl.policies.distributions import Distribution

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def assert_equal_to_torch(pair: Callable[[int], tuple[Any, Any]], shape: tuple[int, ...]) -> None:
    """Compare log-probability, entropy and divergence, each of `shape`."""
    (ours, theirs), (ours2, theirs2) = pair(0), pair(5)
    torch.manual_seed(0)
    action: Tensor = theirs2.sample()
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action), **EXACT)
    torch.testing.assert_close(ours.entropy(), theirs.entropy(), **EXACT)
    torch.testing.assert_close(ours.kl(ours2), kl_divergence(theirs, theirs2), **EXACT)
    assert ours.log_prob(action).shape == ours.entropy().shape == ours.kl(ours2).shape == shape


def assert_samples_repeat(distribution: Distribution) -> None:
    """Check that samples depend on the given generator, and not on the global one."""
    before = torch.get_rng_state()
    first, again, other = (distribution.sample(generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())
