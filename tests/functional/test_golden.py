"""Returns and losses against numbers of other implementations; see tests/vectors/README.md."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rl.functional import (
    adapted_kl_coef,
    approx_kl_k1,
    clip_indicator,
    clipped_surrogate_loss,
    clipped_value_loss,
    discounted_returns,
    dual_clipped_surrogate_loss,
    gae,
    kl_cutoff_penalty,
    td_lambda_returns,
    value_loss,
    vtrace,
)

from ..vectors.load import load

FLOAT32, FLOAT64 = {"rtol": 1e-5, "atol": 1e-5}, {"rtol": 1e-12, "atol": 1e-12}
RETURNS, LOSSES = load("tf_agents/01_returns_advantages"), load("tf_agents/02_losses")
RLAX, SCALABLE_AGENT = load("ppg_vtrace/vtrace_rlax"), load("ppg_vtrace/vtrace_tf")
DING, OPENAI = load("ppg_vtrace/ding_rl_utils"), load("ppg_vtrace/openai_ppg")


def close(actual: Tensor, expected: Any, tolerance: dict[str, float] = FLOAT32) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), **tolerance)


def double(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def shifted(values: Tensor, last: Tensor) -> Tensor:
    """Return the values one row later, then `last`."""
    return torch.cat([values[1:], last[None]])


# -- TF-Agents


def kernels() -> tuple[Tensor, ...]:
    names = ("rewards", "values", "discounts", "final_value")
    return tuple(RETURNS["kernels"][name].movedim(0, -1) for name in names)


def test_tf_agents_gae() -> None:
    rewards, values, discounts, final = kernels()
    advantages = gae(rewards, values, shifted(values, final), discounts, 0.95)
    close(advantages.T, RETURNS["kernels"]["gae_lambda_095"])


def test_tf_agents_gae_as_its_agent_calls_it_bootstraps_the_last_row_from_the_wrong_value() -> None:
    rewards, values, discounts, _ = kernels()
    advantages = gae(rewards, values, shifted(values, values[-1]), discounts, 0.95)
    close(advantages.T, RETURNS["kernels"]["gae_lambda_095_as_ppo_agent_calls_it"])


def test_tf_agents_discounted_return() -> None:
    rewards, _, discounts, final = kernels()
    returns = discounted_returns(rewards, discounts, final)
    close(returns.T, RETURNS["kernels"]["discounted_return"])
    close(returns[0], RETURNS["kernels"]["discounted_return_single"])
    close(discounted_returns(rewards, discounts, 0 * final).T, RETURNS["kernels"]["discounted_return_no_final_value"])


@pytest.mark.parametrize("case", [case for case in RETURNS["cases"] if not case["config"]["normalize_rewards"]])
def test_tf_agents_preprocessing(case: dict[str, Any]) -> None:
    config, inputs = case["config"], RETURNS["inputs"]
    names = ("reward", "value_prediction", "discount", "next_step_type")
    rewards, values, discounts, next_step_types = (inputs[name].T for name in names)
    # TF-Agents has no truncation: the last step of an episode (2) is terminal.
    discounts = (discounts * config["discount_factor"] * (next_step_types != 2))[:-1]
    rewards, lambda_ = rewards[:-1], config["lambda_value"]
    returns = discounted_returns(rewards, discounts, values[-1])
    advantages = returns - values[:-1]
    if config["use_gae"]:
        wrong_next_values = shifted(values[:-1], values[-2])  # see the test above
        advantages = gae(rewards, values[:-1], wrong_next_values, discounts, lambda_)
        if config["use_td_lambda_return"]:
            returns = td_lambda_returns(rewards, wrong_next_values, discounts, lambda_)
            # G[T] is the value that the last row bootstraps from, even if it is the wrong value.
            close(returns, advantages + values[:-1])
    close(returns.T, case["returns"][:, :-1])
    close(advantages.T, case["advantages"][:, :-1])


def tf_agents_losses() -> list[Any]:
    return [
        pytest.param(kind, *name.split("/"), id=f"{kind}-{name}")
        for kind in LOSSES["kinds"]
        for name in LOSSES["kinds"][kind]["losses"]
    ]


@pytest.mark.parametrize(("kind", "config", "weights"), tf_agents_losses())
def test_tf_agents_losses(kind: str, config: str, weights: str) -> None:
    options, inputs, steps = LOSSES["configs"][config], LOSSES["inputs"], LOSSES["kinds"][kind]["per_step"]
    expected = LOSSES["kinds"][kind]["losses"][f"{config}/{weights}"]["losses"]
    w, log_prob = inputs["weights"][weights], steps["log_prob_new"]
    if limit := options.get("log_prob_clipping", 0):
        log_prob = log_prob.clamp(-limit, limit)
    log_ratios, epsilon = log_prob - steps["log_prob_old"], options.get("importance_ratio_clipping", 0)
    policy_loss = clipped_surrogate_loss(log_ratios, inputs["advantages"], epsilon or torch.inf)
    close((w * policy_loss).mean(), expected["policy_gradient_loss"])  # over all entries, not over sum(w)
    # Its coefficient, 0.5 by default, multiplies the square; `value_loss` is half of the square.
    value_range, coefficient = options.get("value_clipping"), 2 * options.get("value_pred_loss_coef", 0.5)
    if value_range is None:
        errors = value_loss(inputs["new_value"], inputs["returns"])
    else:
        errors = clipped_value_loss(inputs["new_value"], inputs["returns"], inputs["old_value"], value_range)
    close((coefficient * w * errors).mean(), expected["value_estimation_loss"])
    if epsilon:
        close(clip_indicator(log_ratios, epsilon).mean(), expected["clip_fraction"])


@pytest.mark.parametrize("weights", ["ones", "mask", "fractional"])
def test_tf_agents_gradients(weights: str) -> None:
    kind, inputs = LOSSES["kinds"]["categorical"], LOSSES["inputs"]
    logits, values = kind["new_params"]["logits"].clone().requires_grad_(), inputs["new_value"].clone().requires_grad_()
    actions = kind["action"].long()[..., None]
    log_ratios = logits.log_softmax(-1).gather(-1, actions)[..., 0] - kind["per_step"]["log_prob_old"]
    losses = clipped_surrogate_loss(log_ratios, inputs["advantages"], 0.2) + value_loss(values, inputs["returns"])
    (inputs["weights"][weights] * losses).mean().backward()
    expected = kind["losses"][f"clip/{weights}"]["grads"]
    close(logits.grad, expected["logits"])
    close(values.grad, expected["value"])


# -- V-trace


def vtrace_inputs(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    log_rhos, rewards, values = (double(inputs[name]) for name in ("log_rhos", "rewards", "values"))
    return log_rhos, rewards, values, shifted(values, double(inputs["bootstrap_value"])), double(inputs["discounts"])


@pytest.mark.parametrize("case", RLAX["cases"])
def test_rlax_vtrace(case: dict[str, Any]) -> None:
    inputs = vtrace_inputs(SCALABLE_AGENT["inputs"])
    traces = double(case["lambda_"]).reshape(-1, 1) if isinstance(case["lambda_"], list) else case["lambda_"]
    clips = (case["clip_rho_threshold"], 1.0, case["clip_pg_rho_threshold"])
    targets, advantages = vtrace(*inputs, traces, *clips)
    close(targets, case["vs"], FLOAT64)
    close(advantages, case["pg_advantages"], FLOAT64)
    close(targets - inputs[2], case["errors"], FLOAT64)


@pytest.mark.parametrize("case", RLAX["leaky"])
def test_rlax_leaky_vtrace(case: dict[str, Any]) -> None:
    """alpha of rlax is 1 - leak, and its errors are the targets minus the values."""
    inputs = vtrace_inputs(SCALABLE_AGENT["inputs"])
    targets, advantages = vtrace(*inputs, case["lambda_"], leak=1 - case["alpha"])
    close(targets - inputs[2], case["errors"], FLOAT64)
    close(advantages, case["pg_advantages"], FLOAT64)


@pytest.mark.parametrize("case", SCALABLE_AGENT["cases"])
def test_scalable_agent_vtrace(case: dict[str, Any]) -> None:
    clips = (case["clip_rho_threshold"], 1.0, case["clip_pg_rho_threshold"])
    targets, advantages = vtrace(*vtrace_inputs(SCALABLE_AGENT["inputs"]), 1.0, *clips)
    close(targets, case["vs"])
    close(advantages, case["pg_advantages"])


def test_scalable_agent_vtrace_on_policy() -> None:
    log_rhos, *rest = vtrace_inputs(SCALABLE_AGENT["inputs"])
    targets, advantages = vtrace(0 * log_rhos, *rest, 1.0)
    close(targets, SCALABLE_AGENT["on_policy"]["vs"])
    close(advantages, SCALABLE_AGENT["on_policy"]["pg_advantages"])
    close(gae(*rest, 1.0), SCALABLE_AGENT["on_policy"]["pg_advantages"])


def test_scalable_agent_vtrace_with_more_dimensions() -> None:
    case = SCALABLE_AGENT["extra_dims"]
    targets, advantages = vtrace(*vtrace_inputs(case["inputs"]), 1.0)
    close(targets, case["vs"])
    close(advantages, case["pg_advantages"])


def test_scalable_agent_vtrace_from_logits() -> None:
    inputs, outputs = SCALABLE_AGENT["from_logits"]["inputs"], SCALABLE_AGENT["from_logits"]["outputs"]
    actions = torch.tensor(inputs["actions"])[..., None]
    target, behaviour = (
        double(inputs[f"{name}_policy_logits"]).log_softmax(-1).gather(-1, actions)[..., 0]
        for name in ("target", "behaviour")
    )
    close(target - behaviour, outputs["log_rhos"])
    targets, advantages = vtrace(*vtrace_inputs({**inputs, "log_rhos": (target - behaviour).tolist()}), 1.0)
    close(targets, outputs["vs"])
    close(advantages, outputs["pg_advantages"])


# -- DI-engine; its flags are float32 even where the rest is float64, hence the tolerance of its GAE


@pytest.mark.parametrize("case", DING["gae"]["cases"])
def test_ding_gae_with_termination_and_truncation(case: dict[str, Any]) -> None:
    rewards, values, next_values = (double(DING["gae"][name]) for name in ("reward", "value", "next_value"))
    terminated = torch.zeros_like(rewards) if case["done"] is None else double(case["done"])
    ends = terminated if case["traj_flag"] is None else double(case["traj_flag"])
    discounts, traces = case["gamma"] * (1 - terminated), case["lambda_"] * (1 - ends)
    if case["name"] == "traj_flag_only":
        assert ends.any()
        assert not terminated.any()
    close(gae(rewards, values, next_values, discounts, traces), case["adv"], {"rtol": 1e-6, "atol": 1e-6})


def test_ding_gae_of_several_agents() -> None:
    case = DING["gae_multi_agent"]
    values, next_values = double(case["value"]), double(case["next_value"])
    rewards = double(case["reward"])[..., None].expand_as(values)
    discounts = case["gamma"] * (1 - double(case["done"])[..., None])
    traces = case["lambda_"] * (1 - double(case["traj_flag"])[..., None])
    close(gae(rewards, values, next_values, discounts, traces), case["adv"], {"rtol": 1e-6, "atol": 1e-6})


def test_ding_gae_of_one_trajectory_ignores_the_end_inside() -> None:
    case = DING["get_gae"]
    values = double(case["value"])
    next_values = shifted(values, double(case["last_value"])[0])
    advantages = gae(double(case["reward"]), values, next_values, case["gamma"], case["gae_lambda"])
    close(advantages, case["adv"], {"rtol": 1e-6, "atol": 1e-6})


@pytest.mark.parametrize("case", DING["ppo_policy_error"]["cases"])
def test_ding_policy_error(case: dict[str, Any]) -> None:
    data = DING["ppo_policy_error"]
    w = 1.0 if case["weight"] is None else double(data["w"])
    logits, actions = double(data["logit_new"]).requires_grad_(), torch.tensor(data["action"])[:, None]
    new, old = (x.log_softmax(-1).gather(-1, actions)[:, 0] for x in (logits, double(data["logit_old"])))
    advantages, clip = double(data["adv"]), case["clip_ratio"]
    terms = dual_clipped_surrogate_loss(new - old, advantages, clip, clip, case["dual_clip"])
    loss = (w * terms).mean()
    loss.backward()
    close(loss, case["policy_loss"], FLOAT64)
    close(logits.grad, case["grad_policy_loss_logit_new"], FLOAT64)
    close(approx_kl_k1(new - old).mean(), case["approx_kl"], FLOAT64)
    close(clip_indicator(new - old, case["clip_ratio"]).mean(), case["clipfrac"], {"rtol": 1e-6, "atol": 1e-6})
    if case["dual_clip"] is None:
        close(clipped_surrogate_loss(new - old, advantages, clip), terms.detach(), FLOAT64)


def test_ding_cases_have_ratios_that_a_dual_clip_bounds() -> None:
    cases = DING["ppo_policy_error"]["cases"]
    assert {case["dual_clip"] for case in cases} > {None}
    unbounded = {case["policy_loss"] for case in cases if case["dual_clip"] is None}
    assert {case["policy_loss"] for case in cases} > unbounded


@pytest.mark.parametrize("case", DING["ppo_value_error"]["cases"])
def test_ding_value_error(case: dict[str, Any]) -> None:
    data = DING["ppo_value_error"]
    w = 1.0 if case["weight"] is None else double(data["w"])
    values, targets, old = (double(data[name]) for name in ("value_new", "return_", "value_old"))
    values.requires_grad_()
    clipped = clipped_value_loss(values, targets, old, case["clip_ratio"])
    loss = (w * (clipped if case["use_value_clip"] else value_loss(values, targets))).mean()
    loss.backward()
    close(loss, case["value_loss"], FLOAT64)
    close(values.grad, case["grad_value_new"], FLOAT64)


# -- OpenAI


@pytest.mark.parametrize("case", OPENAI["compute_gae"]["cases"])
def test_openai_gae(case: dict[str, Any]) -> None:
    data = OPENAI["compute_gae"]  # [environment, time]; first[t + 1] says that row t ended an episode
    rewards, values = double(data["reward"]).T, double(data["vpred"]).T
    goes_on = 1 - double(data["first"]).T[1:]
    advantages = gae(rewards, values[:-1], values[1:], case["gamma"] * goes_on, case["lambda_"] * goes_on)
    close(advantages.T, case["adv"])
    close((advantages + values[:-1]).T, case["vtarg"])


def test_tf_agents_adaptive_kl_coefficient() -> None:
    for case in load("tf_agents/03_kl_beta")["cases"]:
        coef = torch.tensor(float(case["initial_adaptive_kl_beta"]))
        target, tolerance = case["adaptive_kl_target"], case["adaptive_kl_tolerance"]
        for kl, expected in zip(case["kl"], case["beta_after"], strict=True):
            coef = adapted_kl_coef(coef, kl.mean(), target, tolerance)
            torch.testing.assert_close(coef, expected, rtol=1e-6, atol=0, msg=case["note"])


@pytest.mark.parametrize("weights", ["mask", "fractional"])
@pytest.mark.parametrize("config", [name for name in LOSSES["configs"] if name.startswith("kl_")])
def test_tf_agents_kl_penalties(config: str, weights: str) -> None:
    options = {"adaptive_kl_target": 0.01, "kl_cutoff_factor": 2.0, "kl_cutoff_coef": 1000.0} | LOSSES["configs"][
        config
    ]
    for kind in LOSSES["kinds"].values():
        kl = (LOSSES["inputs"]["weights"][weights] * kind["per_step"]["kl_old_new"]).mean()
        expected = kind["losses"][f"{config}/{weights}"]["losses"]
        if options["kl_cutoff_factor"]:
            cutoff = options["kl_cutoff_factor"] * options["adaptive_kl_target"]
            close(kl_cutoff_penalty(kl, cutoff, options["kl_cutoff_coef"]), expected["kl_cutoff_loss"])
        close(options.get("initial_adaptive_kl_beta", 1.0) * kl, expected["adaptive_kl_loss"])
