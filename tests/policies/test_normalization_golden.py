"""Normalizers, gradient clipping and Adam against golden numbers of TF-Agents and TensorFlow."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lightning_rl import TFAgentsPPO
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.policies.normalization import NestedNormalizer, ObservationNormalizer, RunningMoments
from lightning_rl.training.gradient_steps import EagerEngine, scale_to_norm
from lightning_rl.training.normalizers import RewardNormalizer
from tests.helpers import DISCRETE, VECTOR
from tests.vectors.load import load

NORMALIZERS, CLIPPING = load("tf_agents/04_normalizers"), load("tf_agents/06_clipping_adam")
ADVANTAGES = load("tf_agents/05_advantage_normalization")["cases"]
OBSERVATIONS = ("streaming_observation", "streaming_constant", "streaming_large_offset", "streaming_nested")
THEIRS = {"clip": 5.0, "epsilon": 1e-3, "initial_variance": 0.0}
# TF-Agents begins with this many observations of 0. Around 1e4 they add 1e-8 * 1e4**2 = 1 to the sum of squares, which
# is a hundredth of the variance after 100 observations of variance 1.
INITIAL_COUNT = 1e-8


def assert_moments(moments: Any, state: dict[str, Any], pick: Any = lambda x: x, variance_rtol: float = 1e-4) -> None:
    count, mean, squares = (torch.as_tensor(pick(state[name])) for name in ("count", "avg", "m2"))
    torch.testing.assert_close(moments.mean.float(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moments.variance.float(), squares / count, rtol=variance_rtol, atol=1e-6)
    assert moments.count.item() == pytest.approx(count.flatten()[0].item())


@pytest.mark.parametrize("section", OBSERVATIONS)
def test_observations_are_normalized_as_by_tf_agents(section):
    case = NORMALIZERS[section]
    first = case["steps"][0]["input"]
    nested = isinstance(first, dict)
    # Numbers around 1e4 are 1e-3 apart in float32, in which TF-Agents keeps mean and products. A float32 copy of its
    # formulas differs from ours by up to 2.9e-3 in normalized values and 4.6e-4 of the variance, over 4000 seeds.
    value_atol, variance_rtol = (4e-3, 1e-3) if section == "streaming_large_offset" else (1e-4, 1e-4)
    kwargs = next(i for i, one in enumerate(case["normalize_kwargs"]) if not one)
    shapes = {name: tuple(x.shape[2:]) for name, x in (first if nested else {"": first}).items()}
    normalizer: Any = NestedNormalizer(shapes, **THEIRS) if nested else ObservationNormalizer(shapes[""], **THEIRS)
    for module in normalizer.modules():
        if isinstance(module, RunningMoments):
            module.count.fill_(INITIAL_COUNT)
    for step in case["steps"]:
        for when in ("before", "after"):
            if when == "after":
                normalizer.update(map_leaves(lambda x: x.flatten(0, 1), step["input"]))
            expected = step[f"normalized_{when}_update"][kwargs]
            for ours, theirs in zip(leaves(normalizer(step["input"])), leaves(expected), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=value_atol)
        if nested:
            for name, leaf in zip(first, normalizer.leaves.values(), strict=True):
                assert_moments(leaf.moments, step["state_after"], lambda x, name=name: x[name])
        else:
            assert_moments(normalizer.moments, step["state_after"], variance_rtol=variance_rtol)


def test_rewards_are_normalized_as_by_tf_agents():
    case = NORMALIZERS["streaming_reward"]
    uncentered = [i for i, kwargs in enumerate(case["normalize_kwargs"]) if kwargs.get("center_mean") is False]
    assert uncentered
    for index in uncentered:
        kwargs = case["normalize_kwargs"][index]
        normalizer = RewardNormalizer(0.0, kwargs["clip_value"] or None, kwargs.get("variance_epsilon", 1e-3), 0.0)
        for step in case["steps"]:
            torch.testing.assert_close(normalizer(step["input"]), step["normalized_before_update"][index])
            normalizer.update(step["input"], torch.zeros_like(step["input"], dtype=torch.bool))
            torch.testing.assert_close(normalizer(step["input"]), step["normalized_after_update"][index])
            assert_moments(normalizer.moments, step["state_after"])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_normalized_as_by_tf_agents(name):
    case, model = ADVANTAGES[name], TFAgentsPPO(VECTOR, DISCRETE, policy={"hidden_sizes": (2,)})
    # The float32 variance of TF-Agents is noisy where a small spread cancels.
    noisy = name in ("large_mean_small_spread", "all_equal")
    tolerance = {"rtol": 1e-4, "atol": 3e-2 if noisy else 1e-5}
    (normalized,) = model.estimator.standardize([case["advantages"].flatten()])
    torch.testing.assert_close(normalized, case["normalized"].flatten(), **tolerance)


@pytest.mark.parametrize("case", CLIPPING["global_norm_clipping"], ids=lambda case: case["note"])
def test_gradients_are_clipped_as_by_tensorflow(case):
    parameters = [nn.Parameter(torch.zeros_like(torch.as_tensor(g))) for g in case["grads"]]
    for parameter, gradient in zip(parameters, case["grads"], strict=True):
        parameter.grad = gradient.clone()
    optimizer: Any = torch.optim.SGD(parameters, lr=1.0)
    norm = nn.utils.get_total_norm([cast(Tensor, parameter.grad) for parameter in parameters])
    scale_to_norm(EagerEngine().gradients(optimizer), case["clip_norm"], norm)
    expected = torch.as_tensor(case["global_norm_returned"])
    if not norm.isfinite():  # TensorFlow makes all gradients NaN; the step is skipped here
        assert not expected.isfinite()
        return
    torch.testing.assert_close(norm, expected)
    for parameter, clipped in zip(parameters, case["clipped"], strict=True):
        torch.testing.assert_close(parameter.grad, clipped)


@pytest.mark.parametrize("name", CLIPPING["adam"]["cases"])
def test_adam_with_scheduled_epsilon_equals_tensorflow(name):
    case: dict[str, Any] = CLIPPING["adam"]["cases"][name]
    weights: Tensor = nn.Parameter(case["w0"].clone())
    optimizer = torch.optim.Adam([weights], lr=case["hyper"]["lr"])
    for step, (gradient, expected) in enumerate(zip(case["grads"], case["w_after_each"], strict=True), start=1):
        optimizer.param_groups[0]["eps"] = case["hyper"]["eps"] / (1 - 0.999**step) ** 0.5
        weights.grad = gradient
        optimizer.step()
        torch.testing.assert_close(weights.data, expected, rtol=1e-5, atol=1e-6)
