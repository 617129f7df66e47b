"""The random numbers of samples."""

from collections.abc import Callable

import pytest
import torch
from gymnasium import spaces

from lightning_rl.policies.distributions import (
    Bernoulli,
    Beta,
    Bounds,
    Categorical,
    DiagonalGaussian,
    Distribution,
    SquashedGaussian,
)

LOGITS = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))

# Each distribution, and its samples as a function of the noise.
MAKERS: dict[str, tuple[Callable[[], Distribution], Callable[[torch.Tensor, torch.Generator], torch.Tensor]]] = {
    "categorical": (
        lambda: Categorical(LOGITS),
        lambda noise, generator: (LOGITS - noise.exponential_(generator=generator).log()).argmax(-1),
    ),
    "gaussian": (
        lambda: DiagonalGaussian(LOGITS, torch.full((5,), -0.5)),
        lambda noise, generator: LOGITS + torch.tensor(-0.5).exp() * noise.normal_(generator=generator),
    ),
    "bernoulli": (
        lambda: Bernoulli(LOGITS),
        lambda noise, generator: (noise.uniform_(generator=generator) < LOGITS.sigmoid()).to(torch.int8),
    ),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("inference", [True, False])
def test_each_sample_uses_one_draw_of_the_generator(kind: str, inference: bool) -> None:
    make, of_noise = MAKERS[kind]
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    with torch.inference_mode(inference):
        samples = [make().sample(generators[0]) for _ in range(3)]
        expected = [of_noise(torch.empty(LOGITS.shape), generators[1]) for _ in range(3)]
    assert all(map(torch.equal, samples, expected))
    assert len({tuple(sample.flatten().tolist()) for sample in samples}) > 1
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


BOUNDS = Bounds(spaces.Box(-1, 1, (3,)))


@pytest.mark.parametrize(("kind", "more"), [(Beta, (BOUNDS,)), (SquashedGaussian, (BOUNDS,)), (DiagonalGaussian, ())])
def test_samples_carry_no_gradient(kind: Callable[..., Distribution], more: tuple[object, ...]) -> None:
    parameters = [torch.full((2, 3), value, requires_grad=True) for value in (0.4, 0.6)]
    assert not kind(*parameters, *more).sample(torch.Generator().manual_seed(0)).requires_grad
