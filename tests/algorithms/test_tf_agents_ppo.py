"""Whole training calls, and every loss, as TF-Agents computed them; see tests/vectors/README.md."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl import PPO, Rollout, TFAgentsPPO
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.policies.distributions import Distribution
from lightning_rl.rollouts.batch import Batch
from lightning_rl.training.loss import Loss
from lightning_rl.validation import ConfigurationError
from tests.helpers import CONTINUOUS, DISCRETE, VECTOR, Recorder, make_data, make_trainer, merged, random_rollout
from tests.policies.distributions.test_golden import as_action, build
from tests.vectors.load import load

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SCENARIOS, LOSSES = load("tf_agents/07_train"), load("tf_agents/02_losses")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
TERMS = {
    "policy_loss": "policy_gradient_loss",
    "kl_penalty": "kl_penalty_loss",
    "l2_penalty": "l2_regularization_loss",
    "loss": "total",
    "clip_fraction": "clip_fraction",
}


def in_our_terms(config: dict[str, Any]) -> dict[str, Any]:
    """The options of an agent by the names, and in the units, that they have here."""
    renamed = {
        "importance_ratio_clipping": "clip_range",
        "lambda_value": "gae_lambda",
        "discount_factor": "gamma",
        "initial_adaptive_kl_beta": "initial_kl_coef",
    }
    same = ("num_epochs", "adaptive_kl_target", "adaptive_kl_tolerance", "kl_cutoff_factor", "kl_cutoff_coef")
    options = {renamed.get(name, name): x for name, x in config.items() if name in same or name in renamed}
    options["clip_range"] = options.get("clip_range") or None
    options["entropy_coef"] = max(config.get("entropy_regularization", 0), 0)
    options["value_coef"] = 2 * config.get("value_pred_loss_coef", 0.5)
    options["sum_losses_over_ranks"] = not config.get("aggregate_losses_across_replicas", True)
    options["optimizer"] = {"max_grad_norm": config.get("gradient_clipping"), "l2": penalties(config)}
    options["advantages"] = {
        "estimator": "gae" if config.get("use_gae") else "monte_carlo",
        "value_target": "td_lambda" if config.get("use_td_lambda_return") else "empirical",
        "recompute_values": config.get("compute_value_and_advantage_in_train", False),
    }
    options["normalization"] = {
        "rewards": "reward_std" if config.get("normalize_rewards", True) else False,
        "reward_clip": config.get("reward_norm_clipping", 10.0) or None,
        "update": "after" if config.get("update_normalizers_in_train", True) else "before",
    }
    if not config.get("normalize_observations", True):
        options["normalization"]["observations"] = False
    options["clipping"] = {"log_prob": config.get("log_prob_clipping") or None, "value": config.get("value_clipping")}
    return options


def penalties(config: dict[str, Any]) -> dict[str, float]:
    """The coefficients of an agent's penalties on weights."""
    theirs = {"policy": "policy_l2_reg", "value": "value_function_l2_reg", "shared": "shared_vars_l2_reg"}
    return {part: config.get(name, 0.0) for part, name in theirs.items()}


# What the three agents have for options that are not given.
AGENTS: dict[str, dict[str, Any]] = {
    "PPOAgent": {},
    "PPOClipAgent": {"initial_adaptive_kl_beta": 0, "kl_cutoff_factor": 0},
    "PPOKLPenaltyAgent": {
        **{"use_gae": True, "use_td_lambda_return": True, "normalize_observations": False},
        **{"reward_norm_clipping": 0, "kl_cutoff_coef": 0},
    },
}


class FromFrames(TFAgentsPPO):
    """Learns from recorded frames in a recorded order, with the epsilon that makes Adam equal to TensorFlow's."""

    given_frames: dict[str, Any]
    weights: Tensor | None = None
    order: Iterator[Tensor] | None = None
    epsilon = 1e-7
    optimized = 0

    def step_weights(self, rollout: Rollout) -> Tensor | None:
        return None if self.weights is None else self.weights.T

    def minibatch_order(self, num_rows: int) -> Tensor:
        return torch.arange(num_rows) if self.order is None else next(self.order)

    def batch(self, rollout: Rollout, **per_step: Nested) -> Batch:
        acted = distribution_of(self, self.given_frames).parameters()
        acting = map_leaves(lambda x: x.flatten(0, 1), acted)
        self.made = super().batch(rollout, **per_step).replace(acting_distribution=acting)
        return self.made

    def descend(self, loss: Callable[[Any], Loss], batch: Batch) -> None:
        self.optimized += 1
        for group in self.optimizers().param_groups:
            group["eps"] = self.epsilon / (1 - 0.999**self.optimized) ** 0.5
        super().descend(loss, batch)


def distribution_of(model: TFAgentsPPO, frames: dict[str, Any]) -> Distribution:
    """Return the values of each frame, time first."""
    kind = "categorical" if isinstance(model.action_space, spaces.Discrete) else "gaussian_diag"
    params = {name.removesuffix("_diag"): x.transpose(0, 1) for name, x in frames["dist_params"].items()}
    return build(kind, params)


def make_model(scenario: dict[str, Any]) -> FromFrames:
    torch.manual_seed(0)
    spec, activation = scenario.get("action_spec"), scenario["hidden_activation"]
    action_space: spaces.Space[Any] = spaces.Discrete(3)
    if spec and spec["dtype"] == "float32":
        action_space = spaces.Box(spec["minimum"].numpy(), spec["maximum"].numpy())
    options = in_our_terms(AGENTS[scenario["agent"]] | scenario["config"])
    options["optimizer"] |= {"name": "torch.optim.Adam", "options": {"eps": 1e-7}}
    options["learning_rate"] = scenario["optimizer"]["lr"]
    if "epochs" in scenario:
        options |= {"num_epochs": scenario["epochs"], "num_minibatches": 40 // scenario["minibatch_size"]}
    distribution = None if isinstance(action_space, spaces.Discrete) else "tf_agents_normal"
    policy = {"activation": activation, "action_distribution": distribution}
    observation_space = spaces.Box(-torch.inf, torch.inf, (4,))
    model = FromFrames(observation_space, action_space, policy={"hidden_sizes": (6, 5), **policy}, **options)
    smaller = FromFrames(observation_space, action_space, policy={"hidden_sizes": (5,), **policy}, **options)
    model.policy.critic_encoder = smaller.policy.critic_encoder
    model.epsilon = scenario["optimizer"]["eps"]
    with torch.no_grad():
        for name, x in weights_here(model, scenario["initial_weights"]).items():
            model.policy.get_parameter(name).copy_(x)
    return model


def weights_here(model: FromFrames, weights: dict[str, Any]) -> dict[str, Tensor]:
    """Their weights by our names."""
    head = "logits" if isinstance(model.action_space, spaces.Discrete) else "mean"
    layers = ["actor_encoder.layers.0", "actor_encoder.layers.2", f"action_head.{head}"]
    actor = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    if head == "mean":
        actor.append("action_head.raw_std")
    critic = [f"{layer}.{kind}" for layer in ("critic_encoder.layers.0", "value_head") for kind in ("weight", "bias")]
    named = {}
    for names, part in ((actor, weights["actor"]), (critic, weights["value"])):
        for name, entry in zip(names, part, strict=True):
            named[name] = entry["value"].T if name.endswith("weight") else entry["value"]
    return named


def rollout_from(model: FromFrames, frames: dict[str, Any]) -> Rollout:
    """Frames as a rollout: boundary frames are steps that only reset."""
    x = map_leaves(lambda x: x.transpose(0, 1), frames)
    observations = torch.cat([x["observation"], x["observation"][-1:]])
    over = x["next_step_type"] == 2
    terminated = over & (x["discount"] == 0)
    actions = x["action"].long() if isinstance(model.action_space, spaces.Discrete) else x["action"]
    with torch.no_grad():
        values = x["value_prediction"] if "value_prediction" in x else model.policy.value(x["observation"])
    return Rollout(
        observations=observations,
        actions=actions,
        rewards=x["reward"],
        terminated=terminated,
        truncated=over & ~terminated,
        valid=x["step_type"] != 2,
        log_probs=distribution_of(model, frames).log_prob(actions),
        values=values,
        next_values=torch.full_like(values, torch.nan),  # not looked at
        final_indices=torch.zeros(0, 2, dtype=torch.long),
        final_observations=observations[:0, 0],
        policy_version=model.policy_version,
    )


class Frames:
    """A loader of one rollout for each training call."""

    def __init__(self, model: FromFrames, calls: list[dict[str, Any]]) -> None:
        self.model, self.calls = model, calls

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Rollout]:
        for call in self.calls:
            self.model.given_frames, self.model.weights = call["experience"], call.get("weights")
            yield rollout_from(self.model, call["experience"])


class Calls(Recorder):
    """Compares after each training call."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        super().__init__()
        self.calls = iter(calls)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, pl_module)
        result = next(self.calls)["result"]
        targets, batch = result["targets"], pl_module.made
        for name, theirs in {
            "log_probs": targets["old_log_prob"],
            "returns": targets["returns"],
            "values": targets["old_value_predictions"],
            "weights": targets["masked_weights"],
        }.items():
            torch.testing.assert_close(getattr(batch, name), theirs.T.flatten(), **CLOSE)
        ours = pl_module.estimator.standardize([batch.advantages])[0]
        torch.testing.assert_close(ours, targets["normalized_advantages"].T.flatten(), **CLOSE)
        assert_losses(self.rows[-1], pl_module, result["losses_per_epoch"])
        if result["global_norm_before_clipping"] is not None:
            norm = result["global_norm_before_clipping"].mean().item()
            assert self.rows[-1]["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert_state(pl_module, result)


def assert_losses(row: dict[str, float], model: PPO, expected: dict[str, Tensor]) -> None:
    """Means over the epochs."""
    for ours, theirs in TERMS.items():
        assert row.get(ours, 0.0) == near(expected[theirs]), ours
    assert model.value_coef * row["value_loss"] == near(expected["value_estimation_loss"])
    assert -model.entropy_coef * row["entropy"] == near(expected["entropy_regularization_loss"])


def near(theirs: Tensor | float) -> Any:
    """Their mean over epochs; a term that is off is a plain 0."""
    return pytest.approx(torch.as_tensor(theirs, dtype=torch.float32).mean().item(), rel=1e-4, abs=1e-5)


def assert_state(model: FromFrames, expected: dict[str, Any]) -> None:
    for name, x in weights_here(model, expected["weights_after"]).items():
        torch.testing.assert_close(model.policy.get_parameter(name).data, x, rtol=0, atol=1e-5)
    if expected.get("adaptive_kl_beta") is not None:
        torch.testing.assert_close(model.kl_coef, expected["adaptive_kl_beta"])
    normalizers = expected["normalizers_after"]
    for name, normalizer in (
        ("reward", model.reward_normalizer),
        ("observation", model.policy.observation_normalizer),
    ):
        assert (name in normalizers) == (normalizer is not None)
        if normalizer is not None:
            state, moments = normalizers[name], normalizer.moments
            torch.testing.assert_close(moments.mean.float(), state["avg"])
            torch.testing.assert_close(moments.variance.float(), state["m2"] / state["count"])


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if "train_calls" in scenario])
def test_training_steps_match_tf_agents(name):
    scenario = SCENARIOS[name]
    model, calls = make_model(scenario), scenario["train_calls"]
    trainer = make_trainer(callbacks=[Calls(calls)])
    trainer.fit(model, Frames(model, calls))
    assert trainer.global_step == calls[-1]["result"]["train_step_counter"]
    evaluation = scenario["eval_policy_after"]
    if evaluation["greedy_eval"]:
        actions = model(evaluation["observation"])
        torch.testing.assert_close(actions.to(evaluation["action"].dtype), evaluation["action"], **CLOSE)


def test_minibatches_match_the_ppo_learner():
    scenario = SCENARIOS["minibatch_as_ppo_learner"]
    model = make_model(scenario)
    for name, module in (("reward", model.reward_normalizer), ("observation", model.policy.observation_normalizer)):
        state, moments = scenario["normalizers_at_collection"][name], module.moments
        moments.count.fill_(state["count"].flatten()[0])
        moments.mean.copy_(state["avg"])
        moments.variance.copy_(state["m2"] / state["count"])
    # Their indices go along time within each environment, ours along environments within each time.
    order = scenario["order"][: 4 * 16]
    model.order = iter((order % 10 * 4 + order // 10).split(32))
    recorder, batches = Recorder(), []
    model.loss = lambda batch: batches.append(batch) or FromFrames.loss(model, batch)
    make_trainer(callbacks=[recorder]).fit(model, Frames(model, [scenario]))
    torch.testing.assert_close(model.made.returns, scenario["returns"].T.flatten(), **CLOSE)
    torch.testing.assert_close(model.made.advantages, scenario["advantages"].T.flatten(), **CLOSE)
    theirs = scenario["minibatches"]
    for batch, expected in zip(batches, theirs, strict=True):
        torch.testing.assert_close(batch.weights, expected["masked_weights"][:, 0])
        torch.testing.assert_close(
            model.estimator.standardize([batch.advantages])[0],
            expected["normalized_advantages"][:, 0],
            rtol=1e-4,
            atol=1e-4,
        )
    means = {name: torch.stack([one["losses"][name] for one in theirs]) for name in theirs[0]["losses"]}
    assert_losses(recorder.rows[0], model, means)
    assert_state(model, scenario | {"normalizers_after": scenario["normalizers_after_update"]})


# -- One loss, with its terms and gradients, from given distributions and values


class Given(nn.Module):
    """A policy with fixed outputs for all observations."""

    def __init__(self, distribution: Distribution, values: Tensor) -> None:
        super().__init__()
        self.distribution, self.values = distribution, values

    def forward(self, observations: Nested) -> tuple[Distribution, Tensor]:
        return self.distribution, self.values


def loss_of(
    kind: str, config: dict[str, Any], weights: str, **targets: Tensor
) -> tuple[TFAgentsPPO, Tensor, dict[str, Tensor]]:
    """The model with what its loss recorded, the loss, and what gradients are wanted by; `targets` replace theirs."""
    case, inputs = LOSSES["kinds"][kind], LOSSES["inputs"]
    rows = {name: targets.get(name, inputs[name]).flatten() for name in ("advantages", "returns")}
    params = {name: x.flatten(0, 1).requires_grad_() for name, x in case["new_params"].items()}
    values = inputs["new_value"].flatten().clone().requires_grad_()
    new = build(kind, params)
    old = build(kind, {name: x.flatten(0, 1) for name, x in case["old_params"].items()})
    action = map_leaves(lambda x: x.flatten(0, 1), case["action"])
    options = merged(in_our_terms(config), {"advantages": {"normalize": "none"}})
    model = TFAgentsPPO(VECTOR, DISCRETE, policy={"hidden_sizes": (2,)}, **options)
    model.policy = Given(new, values)
    batch = Batch(
        {
            "observations": torch.zeros(15, 3),
            "actions": as_action(kind, action),
            "log_probs": old.log_prob(as_action(kind, action)),
            "values": inputs["old_value"].flatten(),
            "acting_distribution": old.parameters(),
            "weights": inputs["weights"][weights].flatten(),
            **rows,
        }
    )
    batch.counts_all_rows = True
    return model, model.steps.record_loss(model.loss(batch)), params | {"value": values}


CASES = [
    pytest.param(kind, *name.split("/"), id=f"{kind}-{name}")
    for kind in LOSSES["kinds"]
    for name in LOSSES["kinds"][kind]["losses"]
]


@pytest.mark.parametrize(("kind", "config", "weights"), CASES)
def test_losses_and_gradients_match_tf_agents(kind, config, weights):
    expected = LOSSES["kinds"][kind]["losses"][f"{config}/{weights}"]
    model, loss, variables = loss_of(kind, LOSSES["configs"][config], weights)
    row = model.steps.record.means()
    assert_losses(row, model, expected["losses"])
    # The two parts of the penalty are separate terms, and not negative.
    terms = ("policy_gradient_loss", "value_estimation_loss", "entropy_regularization_loss", "kl_penalty_loss")
    assert row["total_abs_loss"] == near(sum(abs(expected["losses"][name]) for name in terms))
    for name, gradient in expected.get("grads", {}).items():
        (ours,) = torch.autograd.grad(loss, variables[name], retain_graph=True, materialize_grads=True)
        torch.testing.assert_close(ours, gradient.flatten(0, 1), **CLOSE)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_with_weight_0_has_no_gradient(bad):
    """Theirs has it in the gradient, and without aggregation in the loss."""
    inputs, expected = LOSSES["inputs"], LOSSES["nan_under_zero_weight"]["aggregate_true"]
    spoilt = {name: inputs[name].clone() for name in ("advantages", "returns")}
    for x in spoilt.values():
        x[0, 2] = bad
    for without_aggregation in (False, True):
        config = LOSSES["configs"]["clip"] | {"aggregate_losses_across_replicas": not without_aggregation}
        model, loss, variables = loss_of("categorical", config, "mask", **spoilt)
        assert_losses(model.steps.record.means(), model, expected["losses"])
        for name, gradient in expected["grads"].items():
            (ours,) = torch.autograd.grad(loss, variables[name], retain_graph=True)
            assert ours.isfinite().all()
            torch.testing.assert_close(ours, gradient.flatten(0, 1).nan_to_num(0), **CLOSE)


def test_errors_name_the_non_finite_term():
    case = LOSSES["check_numerics"]
    advantages = LOSSES["inputs"]["advantages"].clone()
    advantages[:, 1] = torch.inf
    model, _, _ = loss_of("categorical", LOSSES["configs"]["clip"], "mask", advantages=advantages)
    assert case["message_has"] == TERMS["policy_loss"]
    assert "policy_loss" in model.steps.record.not_finite(model.steps.record.means())


@pytest.mark.parametrize("name", ["shared", "unshared"])
def test_weight_penalties_match_tf_agents(name):
    case = LOSSES["l2"][name]
    kernels = {part: [w["value"].T for w in case[part] if "kernel" in w["name"]] for part in ("actor", "value")}
    (hidden, inputs), (outputs, _) = (kernel.shape for kernel in kernels["actor"])
    for options in case["cases"]:
        coefficients = penalties(options)
        if name == "unshared":
            coefficients["shared"] = 0.0  # which theirs ignores
        sizes = {"hidden_sizes": (hidden,), "shared_encoder": name == "shared"}
        space = spaces.Box(-1, 1, (inputs,))
        model = PPO(space, spaces.Discrete(outputs), policy=sizes, optimizer={"l2": coefficients})
        encoder, policy = model.policy.actor_encoder.layers[0].weight, model.policy
        critic = encoder if policy.critic_encoder is None else policy.critic_encoder.layers[0].weight
        ours = [encoder, policy.action_head.logits.weight, critic, policy.value_head.weight]
        with torch.no_grad():
            for weight, theirs in zip(ours, kernels["actor"] + kernels["value"], strict=True):
                weight.copy_(theirs)
        terms = model.new_loss(Batch({"values": torch.zeros(1)}))
        terms.add_scalar(None, torch.zeros(()))
        loss = terms.total
        assert loss.item() == near(options["loss"])
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, encoder, allow_unused=True, materialize_grads=True)
            torch.testing.assert_close(gradient.T, options["grad_first_actor_kernel"], **CLOSE)
        else:
            assert not any(coefficients.values())


# -- What the preset keeps of the original's errors


def small(**options: Any) -> TFAgentsPPO:
    torch.manual_seed(0)
    common = {"policy": {"hidden_sizes": (4,)}, "normalization": {"rewards": False, "observations": False}}
    return TFAgentsPPO(VECTOR, DISCRETE, **merged(common, options)).double()


def test_time_limits_are_terminal_and_the_last_step_is_not_learned():
    model = small(advantages={"estimator": "gae"}, gae_lambda=0.5, gamma=0.9)
    rollout = random_rollout(model.policy)
    advantages, _ = model.estimator.advantages_and_returns(rollout)
    t, b = rollout.truncated[:-2].nonzero()[0].tolist()
    torch.testing.assert_close(advantages[t, b], rollout.rewards[t, b] - rollout.values[t, b])
    b = int((~rollout.dones[-2]).nonzero()[0])
    # Its own value instead of the value of the next step.
    expected = rollout.rewards[-2, b] + (0.9 - 1) * rollout.values[-2, b]
    torch.testing.assert_close(advantages[-2, b], expected)
    batch = model.batch(rollout)
    assert batch.weights.view(12, 4)[-1].tolist() == [0, 0, 0, 0]
    assert batch.weights[:-4].all()


def test_a_rollout_of_one_step_raises():
    data = make_data(rollout_length=1)
    model = TFAgentsPPO(data.observation_space, data.action_space)
    with pytest.raises(ConfigurationError, match=r"^rollout_length=1 is not valid: expected at least 2"):
        make_trainer().fit(model, data)


def test_steps_with_return_and_advantage_of_0_have_weight_0():
    model = small()
    rollout = random_rollout(model.policy)
    rollout.rewards[:, 1], rollout.values[:, 1] = 0, 0
    weights = model.batch(rollout).weights.view(12, 4)
    assert not weights[:, 1].any()
    assert weights[:-1, [0, 2, 3]].all()
    rollout.values[:-1, 1] = 1.0  # returns of 0, advantages of -1
    rollout.values[:-1, 2] = model.estimator.advantages_and_returns(rollout)[1][:-1, 2]  # advantages of 0
    assert model.batch(rollout).weights.view(12, 4)[:-1].all()


def test_advantages_are_divided_by_the_root_of_the_population_variance_plus_1e_8():
    advantages = torch.tensor([-1e-4, 1e-4], dtype=torch.float64)
    (found,) = small().estimator.standardize([advantages])
    torch.testing.assert_close(found, advantages / 2e-8**0.5)


def test_first_observations_are_multiplied_by_31():
    model = TFAgentsPPO(VECTOR, DISCRETE, policy={"hidden_sizes": (4,)})
    x = torch.tensor([[0.1, -0.01, 1.0]])
    torch.testing.assert_close(model.policy.observation_normalizer(x), torch.tensor([[3.162278, -0.3162278, 5.0]]))
    rollout = random_rollout(model.policy)
    rollout.rewards[:] = 0.1
    torch.testing.assert_close(model.normalizers.rewards(rollout)[0, 0].item(), 3.1623, rtol=1e-4, atol=0)


def test_initial_variance_is_an_option():
    model = small(normalization={"values": "running_std", "observations": {"initial_variance": 4.0, "epsilon": 0.0}})
    assert model.policy.value_normalizer.moments.variance == 1
    x = torch.tensor([[0.2, -1.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(model.policy.observation_normalizer(x), x / 2)


@pytest.mark.parametrize("summed", [False, True])
def test_penalties_and_clip_fraction_are_summed_over_ranks(summed, monkeypatch):
    """As if two ranks had the same rows: a sum over both is twice a mean."""
    terms = []
    for ranks in (1, 2):
        model = small(
            sum_losses_over_ranks=summed, clip_range=0.1, kl_cutoff_coef=50.0, optimizer={"l2": {"policy": 0.01}}
        )
        batch = model.batch(random_rollout(model.policy))
        with torch.no_grad():
            model.policy.action_head.logits.weight[0].add_(1.0)
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda n=ranks: n)
        monkeypatch.setattr("torch.distributed.all_reduce", lambda x, *_, n=ranks: x.mul_(n))
        monkeypatch.setattr("lightning_rl.distributed.gather_tensors", lambda x, n=ranks: x.expand(n, *x.shape))
        (minibatch,) = model.one_pass(batch, 1)
        loss = model.loss(minibatch)
        others = loss.metrics
        rest = others["policy_loss"] + model.value_coef * others["value_loss"] + others["l2_penalty"]
        penalties = float(loss.total.detach() - rest)
        terms.append({name: x.item() for name, x in (others | loss.observed).items()} | {"penalties": penalties})
        computed = model.compute_loss(batch)
        assert {name: computed[name] for name in terms[-1] if name in computed} == pytest.approx(
            {name: x for name, x in terms[-1].items() if name != "penalties"}
        )
        monkeypatch.undo()
    one, two = terms
    for name in ("penalties", "clip_fraction"):
        assert two[name] == pytest.approx(2 * one[name])
        assert one[name] > 0
    for name in ("policy_loss", "value_loss", "entropy"):
        assert two[name] == pytest.approx((1 + summed) * one[name])
    assert two["l2_penalty"] == one["l2_penalty"] > 0


def test_steps_of_weight_0_have_no_gradient():
    class Weighing(TFAgentsPPO):
        def step_weights(self, rollout: Rollout) -> Tensor:
            return torch.arange(12.0).unsqueeze(1).expand(12, 4)

    gradients = []
    for spoil in (False, True):
        torch.manual_seed(0)
        model = Weighing(
            VECTOR,
            CONTINUOUS,
            policy={"hidden_sizes": (4,)},
            normalization={"observations": False},
            optimizer={"l2": {"policy": 0.1}},
        )
        rollout = random_rollout(model.policy)
        batch = model.batch(rollout)
        if spoil:
            for x in (batch.observations, batch.actions, batch.log_probs, *batch.acting_distribution.values()):
                x[2] = torch.nan
        gradients.append(torch.autograd.grad(model.loss(batch).total, list(model.policy.parameters())))
    for one, other in zip(*gradients, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)


def test_a_cutoff_factor_of_0_disables_the_penalty():
    losses = []
    for options in ({"kl_cutoff_factor": 0.0}, {"kl_cutoff_coef": 0.0}, {}):
        model = small(adaptive_kl_target=1e-6, **options)
        batch = model.batch(random_rollout(model.policy))
        with torch.no_grad():
            model.policy.action_head.logits.weight.add_(torch.eye(3, 4, dtype=torch.float64))
        losses.append(model.loss(batch).total.item())
    assert losses[0] == losses[1] < losses[2]


def test_bootstrapping_at_time_limits_raises():
    with pytest.raises(
        ConfigurationError, match=r"advantages.on_truncation='bootstrap' .* expected 'terminal': TF-Agents takes"
    ):
        small(advantages={"on_truncation": "bootstrap"})


# -- Returns, advantages and masks of every configuration


PREPROCESSED = load("tf_agents/01_returns_advantages")


@pytest.mark.parametrize("case", PREPROCESSED["cases"])
def test_returns_advantages_and_masks_match_tf_agents(case):
    inputs, config = {name: x for name, x in PREPROCESSED["inputs"].items() if name != "row_names"}, case["config"]
    x = map_leaves(lambda x: x.T, inputs)
    over, rewards = x["next_step_type"] == 2, x["reward"]
    terminated = over & (x["discount"] == 0)
    model = TFAgentsPPO(VECTOR, DISCRETE, policy={"hidden_sizes": (2,)}, **in_our_terms(config))
    rollout = Rollout(
        observations=torch.zeros(len(rewards) + 1, rewards.shape[1], 3),
        actions=torch.zeros_like(rewards).long(),
        rewards=rewards,
        terminated=terminated,
        truncated=over & ~terminated,
        valid=x["step_type"] != 2,
        log_probs=torch.zeros_like(rewards),
        values=x["value_prediction"],
        next_values=torch.full_like(rewards, torch.nan),
        final_indices=torch.zeros(0, 2, dtype=torch.long),
        final_observations=torch.zeros(0, 3),
    )
    # TF-Agents' environments return discounts; Gymnasium's do not.
    gymnasiums = rollout.discounts
    rollout.discounts = lambda gamma, on_truncation: gymnasiums(gamma, on_truncation) * x["discount"]
    if model.reward_normalizer is not None:
        model.normalizers.commit(rollout)
    advantages, returns = model.estimator.advantages_and_returns(rollout)
    torch.testing.assert_close(advantages.T, case["advantages"], **CLOSE)
    torch.testing.assert_close(returns.T, case["returns"], **CLOSE)
    weights = model.estimator.batch(rollout).weights.view_as(advantages)
    torch.testing.assert_close(weights.T, torch.as_tensor(case["mask"], dtype=torch.float32))
