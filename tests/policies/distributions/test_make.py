"""Choice of the distribution of an action, and its errors."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl import PPO
from lightning_rl.policies.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    SquashedGaussian,
    make_action_head,
)
from lightning_rl.policies.distributions.joint import AutoregressiveHead
from lightning_rl.policies.distributions.make import KINDS
from lightning_rl.validation import ConfigurationError
from tests.helpers import VECTOR

BOX = spaces.Box(-1, 3, (2,))
OPEN = spaces.Box(-1, np.inf, (2,))
NESTED = spaces.Dict({"arm": spaces.Tuple([BOX, spaces.Discrete(3)]), "move": spaces.Discrete(2)})
FEATURES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class WideHead(nn.Module):
    """A custom head."""

    def __init__(self, in_features: int, space: spaces.Box, width: float = 1.0) -> None:
        super().__init__()
        self.mean = nn.Linear(in_features, len(space.low))
        self.width = width

    def forward(self, features: Tensor) -> DiagonalGaussian:
        return DiagonalGaussian(self.mean(features), torch.full((2,), math.log(self.width)))


@pytest.mark.parametrize(
    ("space", "choice", "kind"),
    [
        (spaces.Discrete(3), None, Categorical),
        (spaces.MultiDiscrete([2, 3]), None, MultiCategorical),
        (spaces.Box(-3, 9, (2, 2), np.int16), None, MultiCategorical),
        (spaces.Box(0, 255, (3,), np.uint8), "categorical", MultiCategorical),
        (spaces.MultiBinary(3), None, Bernoulli),
        (BOX, None, DiagonalGaussian),
        (OPEN, None, DiagonalGaussian),
        (BOX, "gaussian", DiagonalGaussian),
        (BOX, {"kind": "squashed_gaussian"}, SquashedGaussian),
        (BOX, "beta", Beta),
        (spaces.Discrete(3), "tf_agents_categorical", Categorical),
    ],
)
def test_distribution_of_each_space_and_choice(space, choice, kind):
    distribution = make_action_head(space, 4, action_distribution=choice)(FEATURES)
    assert type(distribution) is kind
    assert distribution.log_prob(distribution.sample()).shape == (6,)


def test_parts_are_set_by_path_and_others_keep_their_default():
    choice = {"arm.0": {"kind": "gaussian", "initial_std": 0.5}, "move": "tf_agents_categorical"}
    parts = make_action_head(NESTED, 4, action_distribution=choice)(FEATURES).parts
    torch.testing.assert_close(parts["arm"][0].log_std, torch.full((2,), math.log(0.5)))
    assert type(parts["arm"][1]) is type(parts["move"]) is Categorical
    assert type(make_action_head(NESTED, 4, -2.0)(FEATURES).parts["arm"][0]) is DiagonalGaussian
    assert make_action_head(NESTED, 4, -2.0)(FEATURES).parts["arm"][0].log_std.tolist() == [-2, -2]


@pytest.mark.parametrize(
    ("space", "choice"), [(spaces.Discrete(3), None), (spaces.Box(-1, 1, (2,)), "squashed_gaussian")]
)
def test_log_prob_in_no_grad_leaves_later_gradients(space, choice):
    head, features = make_action_head(space, 4, action_distribution=choice), torch.randn(5, 4)
    fresh, used = head(features), head(features)
    action = fresh.sample()
    with torch.no_grad():
        used.log_prob(action)
    expected, found = (
        torch.autograd.grad(x.log_prob(action).sum(), [*head.parameters()], allow_unused=True) for x in (fresh, used)
    )
    torch.testing.assert_close(found, expected)


def test_custom_head_is_given_by_class_path():
    spec = {"class_path": f"{__name__}.WideHead", "init_args": {"width": 7.0}}
    assert make_action_head(BOX, 4, action_distribution=spec)(FEATURES).log_std.exp().tolist() == pytest.approx([7, 7])
    parts = make_action_head(NESTED, 4, action_distribution={"arm.0": spec})(FEATURES).parts
    assert parts["arm"][0].log_std.exp().tolist() == pytest.approx([7, 7])


@pytest.mark.parametrize(
    ("space", "choice", "message"),
    [
        (BOX, "normal", r"action_distribution='normal' is not valid: expected one of categorical, bernoulli, gaussian"),
        (BOX, 3, r"action_distribution=3 is not valid: expected one of"),
        (BOX, {"std": "state_dependent"}, r"action_distribution=.* with one of them as 'kind'"),
        (
            spaces.Discrete(3),
            "beta",
            r"action_distribution='beta' .* distribution for Discrete\(3\); this one is for",
        ),
        (OPEN, "beta", r"action_distribution='beta' is not valid: .* finite bounds on every side"),
        (OPEN, "squashed_gaussian", r"action_distribution='squashed_gaussian' .* finite bounds on every side"),
        (spaces.Box(1, 1, (1,)), "squashed_gaussian", r"'squashed_gaussian' .* finite bounds on every side, low below"),
        (BOX, "categorical", r"action_distribution='categorical' .* integer Box with at most 256 values"),
        (spaces.Box(0, 256, (1,), np.int64), None, r"action_space=Box.* integer Box with at most 256 values"),
        (spaces.Box(-(2**63), 2**63 - 1, (1,), np.int64), None, r"action_space=Box.* integer Box with at most 256"),
        (
            spaces.Text(3),
            None,
            r"action_space=Text.* expected Discrete, MultiDiscrete, .* MultiBinary",
        ),
        (spaces.Sequence(BOX), None, r"action_space=Sequence.* expected Discrete"),
        (spaces.Dict({"a": spaces.Graph(BOX, None)}), None, r"action_space=Graph.* or a Dict or Tuple of these"),
        (NESTED, "gaussian", r"action_distribution='gaussian' .* the parts are arm.0, arm.1, move"),
        (NESTED, {"arm": "beta"}, r"a mapping from parts of the action .* the parts are arm.0, arm.1, move"),
        (NESTED, {"arm.1": "beta"}, r"action_distribution.arm.1='beta' is not valid"),
        (BOX, {"kind": "beta", "std": 1}, r"action_distribution.kind=beta.*\['std'\].* options initialization"),
        (spaces.Discrete(2), {"kind": "tf_agents_categorical", "x": 1}, r"\['x'\] .* its options initialization"),
        (BOX, {"kind": "gaussian", "std": "learned"}, r"action_distribution.std='learned' .* state_dependent"),
        (BOX, {"kind": "gaussian", "std_transform": "relu"}, r"action_distribution.std_transform='relu'"),
        (BOX, {"kind": "gaussian", "mean_transform": "sigmoid"}, r"action_distribution.mean_transform='sigmoid'"),
        (OPEN, {"kind": "gaussian", "mean_transform": "tanh"}, r"mean_transform='tanh' .* expected none, since Box"),
        (BOX, {"kind": "beta", "initialization": "xavier"}, r"action_distribution.initialization='xavier'"),
        (BOX, {"kind": "gaussian", "min_std": 0.0}, r"action_distribution.min_std=0.0 .* above 0"),
        (BOX, {"kind": "gaussian", "max_std": 0.5}, r"initial_std=1.0 is not valid: expected a value between"),
        (BOX, {"kind": "gaussian", "initial_std": "x"}, r"action_distribution.initial_std='x' .* a number above 0"),
        (BOX, {"class_path": "torch.nn.Linear"}, r"action_distribution: torch.nn.Linear refused"),
        (BOX, {"class_path": "nowhere.Head"}, r"action_distribution='nowhere.Head' cannot be imported"),
    ],
)
def test_invalid_action_distribution_raises(space, choice, message):
    with pytest.raises(ConfigurationError, match=message):
        make_action_head(space, 4, action_distribution=choice)


def stds(choice: Any, features: Tensor = FEATURES) -> Tensor:
    head = make_action_head(BOX, 4, action_distribution=choice)
    distribution = head(features)
    return distribution.log_std.exp().expand(len(features), 2)


@pytest.mark.parametrize("kind", ["gaussian", "squashed_gaussian"])
@pytest.mark.parametrize("transform", ["exp", "softplus"])
@pytest.mark.parametrize("std", ["state_independent", "state_dependent"])
def test_initial_std_and_state_dependent_std(kind, transform, std):
    found = stds({"kind": kind, "std": std, "std_transform": transform, "initial_std": 0.3})
    torch.testing.assert_close(found, torch.full((6, 2), 0.3), rtol=0.05, atol=0)
    assert (found.std(0) > 1e-6).all() == (std == "state_dependent")


@pytest.mark.parametrize(("transform", "expected"), [("exp", math.exp(1.5)), ("softplus", math.log1p(math.exp(1.5)))])
def test_std_transforms(transform, expected):
    choice = {"kind": "gaussian", "std_transform": transform}
    head = make_action_head(BOX, 4, action_distribution=choice)
    nn.init.constant_(head.raw_std if transform == "softplus" else head.log_std, 1.5)
    assert head(FEATURES).log_std.exp().tolist() == pytest.approx([expected] * 2, rel=1e-6)
    nn.init.constant_(head.raw_std if transform == "softplus" else head.log_std, -80.0)
    head(FEATURES).entropy().sum().backward()
    assert next(p.grad for name, p in head.named_parameters() if "std" in name).isfinite().all()


@pytest.mark.parametrize("std", ["state_independent", "state_dependent"])
@pytest.mark.parametrize("transform", ["exp", "softplus"])
def test_std_stays_within_limits_and_can_return(std, transform):
    choice = {"kind": "gaussian", "std": std, "std_transform": transform, "min_std": 0.5, "max_std": 2.0}
    head = make_action_head(BOX, 4, action_distribution=choice)
    name = "std_layer.bias" if std == "state_dependent" else ("raw_std" if transform == "softplus" else "log_std")
    raw = head.get_parameter(name)
    for value, limit, sign in ((-5.0, 0.5, 1), (5.0, 2.0, -1)):
        nn.init.constant_(raw, value)
        log_std = head(FEATURES).log_std
        torch.testing.assert_close(log_std.exp().expand(6, 2), torch.full((6, 2), limit))
        # Descent on -sign · log std leads back inside, descent on the opposite further out.
        (inwards,) = torch.autograd.grad(-sign * log_std.sum(), raw, retain_graph=True)
        assert (sign * inwards < 0).all()
        (outwards,) = torch.autograd.grad(sign * log_std.sum(), raw)
        assert not outwards.any()
    nn.init.constant_(raw, 0.9 if transform == "softplus" else 0.1)
    (inside,) = torch.autograd.grad(head(FEATURES).log_std.sum(), raw)
    assert (inside > 0).all()


def test_tanh_mean_starts_in_the_middle_of_the_bounds_and_stays_inside():
    head = make_action_head(BOX, 4, action_distribution={"kind": "gaussian", "mean_transform": "tanh"})
    torch.testing.assert_close(head(FEATURES).mean, torch.ones(6, 2), rtol=0, atol=0.1)
    nn.init.constant_(head.mean.bias, 20.0)
    assert head(FEATURES).mean.unique().tolist() == [3.0]


def test_action_distribution_is_stored_as_plain_data():
    choice = {"arm.0": {"kind": "squashed_gaussian", "initial_std": np.float64(0.5)}}
    model = PPO(VECTOR, NESTED, policy={"action_distribution": choice})
    stored = model.hparams["policy"]["action_distribution"]
    assert stored == {"arm.0": {"kind": "squashed_gaussian", "initial_std": 0.5}}
    assert type(stored["arm.0"]["initial_std"]) is float
    again = PPO(**{name: model.hparams[name] for name in ("observation_space", "action_space", "policy")})
    assert type(again.policy(torch.zeros(1, 3))[0].parts["arm"][0]) is SquashedGaussian


def test_bounds_are_exact_in_any_precision():
    space = spaces.Box(-0.1, 3.1, (1,), np.float64)
    head = make_action_head(space, 4, action_distribution="beta").bfloat16()
    distribution = head(FEATURES.bfloat16())
    edge = distribution.to_space(torch.full((1, 1), 80.0))
    assert edge.item() == pytest.approx(3.1, rel=1e-6)


def test_every_kind_and_option_is_documented():
    text = (Path(__file__).parents[3] / "docs/policies.md").read_text()
    for name, kind in KINDS.items():
        assert f"| `{name}` |" in text
        for option in kind.options:
            assert f"`{option}`" in text


def test_action_part_with_the_name_kind():
    space = spaces.Dict({"kind": spaces.Discrete(3), "amount": spaces.Discrete(2)})
    assert isinstance(make_action_head(space, 4, action_distribution="autoregressive"), AutoregressiveHead)
    make_action_head(space, 4, action_distribution={"kind": "categorical"})
