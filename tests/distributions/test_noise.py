"""Noise that is drawn for several steps at once."""

from collections.abc import Callable

import pytest
import torch

from lightning_rl.distributions import (
    Bernoulli,
    BlockGenerator,
    Categorical,
    DiagonalGaussian,
    Distribution,
    drawn_ahead,
)
from lightning_rl.distributions.noise import MOST_AHEAD, fill_normal, noise_like
from tests.helpers import make_data, make_model, make_trainer
from tests.torch_environments import ID

STEPS = 4
LOGITS = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))

# What is drawn ahead of each, as one block for all steps.
MAKERS: dict[str, tuple[Callable[[], Distribution], Callable[[torch.Tensor, torch.Generator], torch.Tensor]]] = {
    "categorical": (
        lambda: Categorical(LOGITS),
        lambda block, generator: (LOGITS - block.exponential_(generator=generator).log()).argmax(-1),
    ),
    "gaussian": (
        lambda: DiagonalGaussian(LOGITS, torch.full((5,), -0.5)),
        lambda block, generator: LOGITS + torch.tensor(-0.5).exp() * block.normal_(generator=generator),
    ),
    "bernoulli": (
        lambda: Bernoulli(LOGITS),
        lambda block, generator: (block.uniform_(generator=generator) < LOGITS.sigmoid()).to(torch.int8),
    ),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_the_samples_of_several_steps_are_those_of_one_block_of_noise(kind: str) -> None:
    make, of_block = MAKERS[kind]
    generator = BlockGenerator().manual_seed(0)
    with drawn_ahead(generator, STEPS):
        samples = torch.stack([make().sample(generator) for _ in range(STEPS)])
    expected = of_block(torch.empty(STEPS, *LOGITS.shape), torch.Generator().manual_seed(0))
    torch.testing.assert_close(samples, expected, rtol=0, atol=0)
    assert len({tuple(sample.flatten().tolist()) for sample in samples}) > 1


@pytest.mark.parametrize("kind", MAKERS)
def test_outside_it_draws_as_any_other_generator_does(kind: str) -> None:
    make, _ = MAKERS[kind]
    block, plain = BlockGenerator().manual_seed(0), torch.Generator().manual_seed(0)
    with drawn_ahead(block, STEPS):
        make().sample(block)
    block.manual_seed(0)
    for _ in range(STEPS):
        assert torch.equal(make().sample(block), make().sample(plain))
    assert torch.equal(block.get_state(), plain.get_state())


def test_what_is_left_of_a_block_is_not_part_of_the_state() -> None:
    def sample_twice(generator: torch.Generator) -> list[torch.Tensor]:
        with drawn_ahead(generator, STEPS):
            return [Categorical(LOGITS).sample(generator) for _ in range(2)]

    generator, resumed = BlockGenerator().manual_seed(0), BlockGenerator()
    sample_twice(generator)
    resumed.set_state(generator.get_state())
    for sample, other in zip(sample_twice(generator), sample_twice(resumed), strict=True):
        assert torch.equal(sample, other)


def test_parts_of_an_action_never_share_noise() -> None:
    generator = BlockGenerator().manual_seed(0)
    with drawn_ahead(generator, STEPS):
        kinds = (LOGITS, LOGITS.double())
        drawn = [noise_like(like, generator, fill_normal) for _ in range(3 * STEPS) for like in kinds]
    numbers = torch.cat([x.double().flatten() for x in drawn])
    assert numbers.unique().numel() == numbers.numel()
    assert {x.dtype for x in drawn} == {torch.float32, torch.float64}


def test_a_block_is_bounded() -> None:
    generator, counted = BlockGenerator(), []

    def fill(x: torch.Tensor, _: torch.Generator | None) -> torch.Tensor:
        counted.append(x.shape)
        return x

    with drawn_ahead(generator, 128):
        noise_like(torch.empty(MOST_AHEAD // 2), generator, fill)
        noise_like(torch.empty(2 * MOST_AHEAD), generator, fill)
    assert counted == [(2, MOST_AHEAD // 2), (1, 2 * MOST_AHEAD)]


@pytest.mark.parametrize(
    ("backend", "env_id"),
    [("sync", "Acrobot-v1"), ("native", "CartPole-v1"), ("torch", f"tests.torch_environments:{ID}")],
)
def test_a_rollout_draws_once(backend: str, env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data(env_id, backend=backend, rollout_length=16)
    shapes: list[torch.Size] = []

    def recording(name: str) -> Callable[..., torch.Tensor]:
        draw = getattr(torch.Tensor, name)

        def drawn(x: torch.Tensor, *args: object, generator: torch.Generator | None = None) -> torch.Tensor:
            if isinstance(generator, BlockGenerator):
                shapes.append(x.shape)
            return draw(x, *args, generator=generator)

        return drawn

    for name in ("exponential_", "normal_"):
        monkeypatch.setattr(torch.Tensor, name, recording(name))
    make_trainer(max_epochs=1).fit(make_model(data), data)
    assert [shape[:2] for shape in shapes] == [(16, 2)] * 2
