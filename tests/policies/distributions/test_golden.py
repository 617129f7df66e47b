"""Distributions and heads against numbers that TF-Agents computed."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl.nested import Nested, leaves
from lightning_rl.policies.distributions import (
    Bounds,
    Categorical,
    DiagonalGaussian,
    Distribution,
    Joint,
    MultiCategorical,
    SquashedGaussian,
    make_action_head,
)
from tests.vectors.load import load

VECTORS = load("tf_agents/02_losses")
KINDS: dict[str, Any] = VECTORS["kinds"]
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def build(kind: str, params: dict[str, Tensor]) -> Distribution:
    """Return the distribution of a kind; a scalar Gaussian has one dimension."""
    if kind == "categorical":
        return Categorical(params["logits"])
    if kind == "multi_categorical":
        return MultiCategorical(params["logits"])
    if kind == "gaussian_scalar":
        return DiagonalGaussian(params["loc"].unsqueeze(-1), params["scale"].log().unsqueeze(-1))
    gaussian = DiagonalGaussian(params["loc"], params["scale"].log())
    if kind == "gaussian_diag":
        return gaussian
    return Joint({"aim": gaussian, "move": Categorical(params["logits"])}, ["aim", "move"])


def as_action(kind: str, action: Any) -> Nested:
    if kind == "nested_categorical_and_gaussian":
        return {"aim": action["aim"], "move": action["move"].long()}
    if kind == "gaussian_scalar":
        return action.unsqueeze(-1)
    return action.long() if "categorical" in kind else action


@pytest.mark.parametrize("kind", KINDS)
def test_log_prob_entropy_kl_and_mode_equal_tf_agents(kind):
    case = KINDS[kind]
    old, new = build(kind, case["old_params"]), build(kind, case["new_params"])
    action, expected = as_action(kind, case["action"]), case["per_step"]
    torch.testing.assert_close(old.log_prob(action), expected["log_prob_old"], **CLOSE)
    torch.testing.assert_close(new.log_prob(action), expected["log_prob_new"], **CLOSE)
    torch.testing.assert_close((new.log_prob(action) - old.log_prob(action)).exp(), expected["ratio"], **CLOSE)
    torch.testing.assert_close(old.entropy(), expected["entropy_old"], **CLOSE)
    torch.testing.assert_close(new.entropy(), expected["entropy_new"], **CLOSE)
    torch.testing.assert_close(old.kl(new), expected["kl_old_new"], **CLOSE)
    for ours, theirs in zip(leaves(new.mode()), leaves(as_action(kind, case["mode_new"])), strict=True):
        assert torch.equal(ours, theirs)


def box(case: dict[str, Tensor]) -> spaces.Box:
    return spaces.Box(case["low"].numpy(), case["high"].numpy())


def test_squashed_gaussian_equals_tf_agents():
    case = VECTORS["squashed_gaussian"]
    bounds = Bounds(box(case))
    ours = SquashedGaussian(case["loc"], case["scale"].log(), bounds)
    other = SquashedGaussian(case["loc_q"], case["scale_q"].log(), bounds)
    torch.testing.assert_close(ours.to_space(case["pre_tanh"]), case["action"], **CLOSE)
    torch.testing.assert_close(ours.log_prob(case["pre_tanh"]), case["log_prob"], **CLOSE)
    torch.testing.assert_close(ours.to_space(ours.mode()), case["mode"], **CLOSE)
    torch.testing.assert_close(ours.kl(other), case["kl_p_q"], **CLOSE)


HEADS: dict[str, Any] = {
    "default": "tf_agents_normal",
    "state_dependent_std": {"kind": "tf_agents_normal", "std": "state_dependent"},
    "no_mean_transform": {"kind": "tf_agents_normal", "mean_transform": "none"},
    "scale_distribution": "tf_agents_squashed_normal",
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_equal_projection_networks_of_tf_agents(name):
    case = VECTORS["network_heads"]
    head: Any = make_action_head(box(case), 5, action_distribution=HEADS[name])
    weights = [entry["value"] for entry in case[name]["weights"]]
    with torch.no_grad():
        head.mean.weight.copy_(weights[0].T)
        head.mean.bias.copy_(weights[1])
        if name == "state_dependent_std":
            head.std_layer.weight.copy_(weights[2].T)
            head.std_layer.bias.copy_(weights[3])
        else:
            head.raw_std.copy_(weights[2])
        distribution = head(case["hidden"])
        torch.testing.assert_close(distribution.mean, case[name]["loc"], **CLOSE)
        torch.testing.assert_close(distribution.log_std.exp().expand(4, 2), case[name]["scale"], **CLOSE)
        torch.testing.assert_close(distribution.to_space(distribution.mode()), case[name]["mode"], **CLOSE)


def test_initial_heads_equal_tf_agents():
    head: Any = make_action_head(box(VECTORS["network_heads"]), 5, action_distribution="tf_agents_normal")
    bias = torch.full((2,), VECTORS["network_heads"]["init_std_bias"])
    torch.testing.assert_close(head.raw_std.detach(), bias, **CLOSE)
    # A normal distribution truncated at two standard deviations, with a variance of 0.1 / features.
    torch.manual_seed(0)
    for kind, space in (("tf_agents_categorical", spaces.Discrete(50)), ("tf_agents_normal", spaces.Box(-1, 1, (50,)))):
        layer: Any = make_action_head(space, 400, action_distribution=kind)
        layer = layer.logits if kind == "tf_agents_categorical" else layer.mean
        deviation = np.sqrt(0.1 / 400)
        assert layer.weight.std().item() == pytest.approx(deviation, rel=0.02)
        assert 1.9 * deviation / 0.8796 < layer.weight.abs().max().item() <= 2 * deviation / 0.8796 + 1e-9
        assert not layer.bias.any()
