"""The actor-critic: its four methods agree, encoders are shared or not, observations are prepared once."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.networks.mlp import MLPEncoder
from lightning_rl.spaces import observation_dtype
from lightning_rl.validation import ConfigurationError

VECTOR = spaces.Box(-1, 1, (3,))
IMAGE = spaces.Box(0, 255, (7, 7, 3), np.uint8)
ACTIONS = [spaces.Discrete(4), spaces.Box(-1, 1, (2,))]


class RowsEncoder(nn.Module):
    """Accepts only rows, and ignores dtypes."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.linear = nn.Linear(*space.shape, 8)
        self.out_features = 8

    def forward(self, observations: Tensor) -> Tensor:
        assert observations.dim() == 2
        return self.linear(observations).tanh()


def observations(space: spaces.Box | spaces.Discrete, *leading: int) -> Tensor:
    space.seed(0)
    samples = np.stack([space.sample() for _ in range(int(np.prod(leading)))])
    return torch.from_numpy(samples).unflatten(0, leading)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("action_space", ACTIONS, ids=["discrete", "continuous"])
@pytest.mark.parametrize("space", [VECTOR, IMAGE, spaces.Discrete(5)], ids=["vector", "image", "discrete"])
@pytest.mark.parametrize("shared", [True, False])
def test_act_log_prob_value_and_forward_agree(space, action_space, shared):
    policy = ActorCritic(space, action_space, shared_encoder=shared)
    x = observations(space, 6)
    output = policy.act(x, generator())
    distribution, value = policy(x)
    torch.testing.assert_close(policy.log_prob(x, output.action), distribution.log_prob(output.action))
    torch.testing.assert_close(policy.value(x), value)
    torch.testing.assert_close(distribution.sample(generator()), output.action)
    torch.testing.assert_close(policy.act(x, deterministic=True).action, distribution.mode())
    if shared:  # the shared features give both
        torch.testing.assert_close(output.log_prob, distribution.log_prob(output.action))
        torch.testing.assert_close(output.value, value)
    else:
        assert output.log_prob is None
        assert output.value is None


@pytest.mark.parametrize("space", [VECTOR, IMAGE], ids=["vector", "image"])
def test_leading_time_and_environment_dimensions_do_not_change_results(space):
    policy = ActorCritic(space, spaces.Box(-1, 1, (2,)))
    x = observations(space, 5, 4)
    action = torch.randn(5, 4, 2)
    torch.testing.assert_close(policy.value(x), policy.value(x.flatten(0, 1)).unflatten(0, (5, 4)))
    expected = policy.log_prob(x.flatten(0, 1), action.flatten(0, 1)).unflatten(0, (5, 4))
    torch.testing.assert_close(policy.log_prob(x, action), expected)
    assert policy.act(x[0, 0]).action.shape == (2,)


@pytest.mark.parametrize(
    ("space", "option", "shared"),
    [(VECTOR, None, False), (IMAGE, None, True), (VECTOR, True, True), (IMAGE, False, False)],
)
def test_encoder_is_shared_for_images_by_default(space, option, shared):
    policy = ActorCritic(space, spaces.Discrete(2), shared_encoder=option)
    policy.value(observations(space, 3)).sum().backward()
    reached = {name.split(".")[0] for name, p in policy.named_parameters() if p.grad is not None}
    assert reached == {"actor_encoder" if shared else "critic_encoder", "value_head"}
    assert (policy.critic_encoder is None) is shared


def test_every_method_normalizes_observations_once():
    policy = ActorCritic(VECTOR, spaces.Discrete(4), normalize_observations=True).double()
    policy.observation_normalizer.moments.mean.fill_(5.0)
    policy.observation_normalizer.moments.variance.fill_(4.0)
    plain = ActorCritic(VECTOR, spaces.Discrete(4)).double()
    plain.load_state_dict({k: v for k, v in policy.state_dict().items() if "normalizer" not in k})
    x = observations(VECTOR, 6).double()
    y = (x - 5) / 2
    action = torch.tensor([0, 1, 2, 3, 0, 1])
    for ours, expected in (
        (policy.value(x), plain.value(y)),
        (policy.log_prob(x, action), plain.log_prob(y, action)),
        (policy(x)[1], plain(y)[1]),
        (policy(x)[0].log_probs, plain(y)[0].log_probs),
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)
    assert torch.equal(policy.act(x, generator()).action, plain.act(y, generator()).action)


def test_normalized_integer_vectors_are_not_divided_by_255():
    space = spaces.Box(0, 255, (3,), np.uint8)
    policy = ActorCritic(space, spaces.Discrete(2), normalize_observations=True)
    policy.observation_normalizer.moments.mean.fill_(100.5)
    policy.observation_normalizer.moments.variance.fill_(2500.0)
    plain = ActorCritic(VECTOR, spaces.Discrete(2))
    plain.load_state_dict({k: v for k, v in policy.state_dict().items() if "normalizer" not in k})
    x = observations(space, 6)
    torch.testing.assert_close(policy.value(x), plain.value((x.float() - 100.5) / 50))


def test_custom_encoders_see_rows_in_the_dtype_of_their_parameters():
    policy = ActorCritic(VECTOR, spaces.Discrete(3), network=f"{__name__}.RowsEncoder")
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        policy.to(dtype)
        x = observations(VECTOR, 4, 2)
        assert policy.value(x).shape == (4, 2)
        assert policy.act(x[0], generator()).action.shape == (2,)
        assert isinstance(policy.critic_encoder, RowsEncoder)


def test_values_and_log_probabilities_of_a_bfloat16_policy_are_float32():
    policy = ActorCritic(VECTOR, spaces.Box(-1, 1, (2,))).bfloat16()
    distribution, value = policy(observations(VECTOR, 6))
    assert value.dtype == distribution.log_prob(distribution.mode()).dtype == torch.float32


def test_encoders_get_the_space_of_normalized_observations():
    policy = ActorCritic(spaces.Box(0, 255, (3,), np.uint8), spaces.Discrete(2), normalize_observations=True)
    assert isinstance(policy.actor_encoder, MLPEncoder)
    assert not next(policy.actor_encoder.inputs.children()).is_uint8


@pytest.mark.parametrize(("size", "network"), [(7, "auto"), (40, "auto"), (40, "impala"), (40, "mlp")])
def test_normalized_images_have_their_own_moments_for_each_pixel(size, network):
    space = spaces.Box(0, 255, (size, size, 3), np.uint8)
    normalize = {"images": True, "epsilon": 16.0, "clip": 1.5}
    policy = ActorCritic(space, spaces.Discrete(2), network=network, normalize_observations=normalize)
    plain = ActorCritic(space, spaces.Discrete(2), network=network)
    assert type(policy.actor_encoder) is type(plain.actor_encoder)
    assert (policy.critic_encoder is None) == (plain.critic_encoder is None)
    x = observations(space, 20)
    policy.observation_normalizer.update(x)
    deviation = (x.double().var(0, correction=0) + 16).sqrt()
    standardized = ((x - x.double().mean(0)) / deviation).clamp(-1.5, 1.5).float()
    assert (standardized.abs() == 1.5).any()
    values = policy.value(x)
    policy.observation_normalizer = None
    torch.testing.assert_close(values, policy.value(standardized), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("space", [IMAGE, spaces.Discrete(3)])
def test_normalizing_images_or_discrete_observations_raises(space):
    with pytest.raises(ConfigurationError, match=r"normalization.observations=True .* only a Box that is no image"):
        ActorCritic(space, spaces.Discrete(2), normalize_observations=True)


@pytest.mark.parametrize(
    ("space", "parameters", "expected"),
    [
        (VECTOR, torch.float32, np.float32),
        (VECTOR, torch.bfloat16, np.float32),
        (VECTOR, torch.float64, np.float64),
        (spaces.Box(-1, 1, (3,), np.float64), torch.float32, np.float32),
        (IMAGE, torch.float64, np.uint8),
        (spaces.Discrete(3), torch.float32, np.int64),
    ],
)
def test_rollouts_store_floats_in_network_precision_and_keep_integers(space, parameters, expected):
    assert observation_dtype(space, parameters) == expected
