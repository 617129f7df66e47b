"""Custom networks: an encoder by its class path, or a whole policy by `make_policy`."""

import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl import (
    A2C,
    CLEAR,
    PPG,
    PPO,
    RND,
    VMPO,
    ActorCritic,
    BehaviourCloning,
    CriticPretraining,
    OnPolicyAlgorithm,
    OverlappedPPO,
    PolicyOutput,
    PPOKLPenalty,
    TFAgentsPPO,
)
from lightning_rl.cli.main import main
from lightning_rl.policies.distributions import Categorical
from lightning_rl.policies.normalization import ValueNormalizer
from lightning_rl.rollouts.batch import Batch
from lightning_rl.training.loss import Loss
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    DISCRETE,
    VECTOR,
    Recorder,
    assert_equal_parameters,
    make_data,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)
from tests.recorded import remember


class Residual(nn.Module):
    """An encoder as a user would write it."""

    def __init__(self, space: spaces.Box, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(*space.shape, width), nn.Linear(width, width)
        self.out_features = width

    def forward(self, observations: Tensor) -> Tensor:
        x = self.first(observations).relu()
        return x + self.second(x).relu()


class OneNetwork(nn.Module):
    """A policy that is no `ActorCritic`: one linear layer gives logits and value."""

    def __init__(self, num_features: int, num_actions: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_features, num_actions + 1)

    def forward(self, observations: Tensor) -> tuple[Categorical, Tensor]:
        *logits, value = self.linear(observations).unbind(-1)
        return Categorical(torch.stack(logits, -1)), value

    def act(
        self, observations: Tensor, generator: torch.Generator | None = None, deterministic: bool = False
    ) -> PolicyOutput:
        distribution = self(observations)[0]
        return PolicyOutput(distribution.mode() if deterministic else distribution.sample(generator))

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        return self(observations)[0].log_prob(actions)

    def value(self, observations: Tensor) -> Tensor:
        return self(observations)[1]


class OneNetworkPPO(PPO):
    def make_policy(self) -> Any:
        return OneNetwork(self.observation_space.shape[0], self.action_space.n)


class FlatterPPO(PPO):
    """Adds a hyper-parameter that its policy needs."""

    def __init__(self, *args: Any, temperature: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def make_policy(self) -> ActorCritic:
        policy = super().make_policy()
        with torch.no_grad():
            policy.action_head.logits.weight.div_(self.hparams["temperature"])
        return policy


class FixedPPO(PPO):
    """Fixes three options of PPO: `clip_range`, `gamma` at its default, and the group `optimizer`."""

    def __init__(self, *args: Any, slack: float = 0.2, **kwargs: Any) -> None:
        super().__init__(*args, clip_range=None, gamma=0.99, optimizer={"max_grad_norm": 1.0}, **kwargs)
        self.slack = slack

    def surrogate_loss(self, log_ratios: Tensor, advantages: Tensor) -> Tensor:
        """Simple policy optimization (Xie et al. 2024)."""
        changes = log_ratios.exp() - 1
        return advantages.abs() / (2 * self.slack) * changes**2 - (changes + 1) * advantages


NETWORK = {"class_path": f"{__name__}.Residual", "init_args": {"width": 12}}


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (PPO, {"policy": {"network": NETWORK}}),
        (OneNetworkPPO, {}),
        (FlatterPPO, {"temperature": 2.0}),
        (FixedPPO, {"slack": 0.3, "clip_range": None}),
    ],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_own_network_learns_on_policy_and_loads_from_its_checkpoint(algorithm, options, precision, tmp_path):
    data, recorder = make_data(), Recorder()
    given = {name: value for name, value in options.items() if algorithm is not FixedPPO or name == "slack"}
    model = algorithm(data.observation_space, data.action_space, learning_rate=3e-3, **given)
    before = parameters_of(model)
    trainer = make_trainer(limit_val_batches=1, callbacks=[recorder], precision=precision)
    trainer.fit(model, data)
    assert max(recorder.column("first_ratio_error")) <= (1e-6 if precision == "32-true" else 1e-2)
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = algorithm.load_from_checkpoint(tmp_path / "model.ckpt")
    assert_equal_parameters(loaded, parameters_of(model))
    assert merged(loaded.hparams, options) == loaded.hparams and loaded.options == model.options
    (validated,) = trainer.validate(loaded, data, verbose=False)
    assert validated["val/episode_return"] == trainer.callback_metrics["val/episode_return"]


def test_custom_surrogate_loss_keeps_other_terms_and_target_kl():
    """The gradient is 0 at ratio 1 + slack for positive advantages, at 1 - slack for negative ones."""
    data, recorder = make_data(rollouts_per_epoch=1), Recorder()
    model = FixedPPO(data.observation_space, data.action_space, slack=0.5, target_kl=1e-9, learning_rate=1e-2)
    log_ratios = torch.tensor([1.5, 0.5, 1.0]).log().requires_grad_()
    rows = model.surrogate_loss(log_ratios, torch.tensor([2.0, -2.0, 3.0]))
    torch.testing.assert_close(rows, torch.tensor([-2.5, 1.5, -3.0]))
    (gradient,) = torch.autograd.grad(rows.sum(), log_ratios)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, -3.0]), atol=1e-6, rtol=0)
    trainer = make_trainer(callbacks=[recorder])
    trainer.fit(model, data)
    assert {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"} <= recorder.rows[0].keys()
    assert 0 < trainer.global_step < model.num_epochs * model.num_minibatches


class AnnealedPPO(PPO):
    """Has a schedule that is no option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.beta = self.scheduled("beta", {"kind": "linear", "start": 1.0, "end": 0.0})


def test_schedule_that_is_no_option_is_followed():
    data = make_data(rollouts_per_epoch=2)
    model = AnnealedPPO(data.observation_space, data.action_space)
    make_trainer().fit(model, data)
    assert model.beta == pytest.approx(0.5)


@pytest.mark.parametrize("normalizer", [None, ValueNormalizer()])
def test_value_loss_of_own_rows_needs_returns_only(normalizer):
    rows = Batch({"observations": torch.zeros(2, 4), "returns": torch.tensor([1.0, 3.0])})
    loss = Loss(Batch({"returns": torch.zeros(5)}), normalizer)
    loss.add_value(torch.zeros(2), batch=rows)
    torch.testing.assert_close(loss.total, torch.tensor(2.5))


def test_terms_that_are_added_after_total_was_read_count():
    loss = Loss(Batch({"returns": torch.zeros(2)}))
    loss.add("policy_loss", torch.tensor([1.0, 3.0]))
    assert loss.total == 2
    loss.add("further", torch.tensor([4.0, 4.0]), weight=0.5)
    assert loss.total == 4
    loss.add_penalty("l2_penalty", torch.tensor(1.0))
    assert loss.total == 5


def test_options_that_a_subclass_fixes_cannot_be_set(in_tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    arguments = ["--data.num_envs=2", "--data.rollout_length=16", "--max_env_steps=64", "--trainer.accelerator=cpu"]
    arguments += ["--trainer.enable_model_summary=false", "--data.evaluation.episodes=1"]
    model = main(["fit", f"--model={__name__}.FixedPPO", "--data.env_id=CartPole-v1", *arguments]).model
    assert (model.clip_range, model.options["clip_range"], model.slack) == (None, None, 0.2)
    (path,) = in_tmp_path.glob("runs/**/last.ckpt")
    assert FixedPPO.load_from_checkpoint(path).options == model.options
    assert FixedPPO.load_from_checkpoint(path, gae_lambda=0.5).estimator.gae_lambda == 0.5
    with pytest.raises(ConfigurationError, match=r"^clip_range=0\.3 .* expected no value, since FixedPPO sets it"):
        FixedPPO.load_from_checkpoint(path, clip_range=0.3)
    with pytest.raises(SystemExit):
        main(["fit", f"--model={__name__}.FixedPPO", "--data.env_id=CartPole-v1", "--model.clip_range=0.3"])


def test_own_encoder_is_used_by_actor_and_critic():
    data = make_data()
    model = PPO(data.observation_space, data.action_space, policy={"network": NETWORK})
    assert isinstance(model.policy.actor_encoder, Residual)
    assert isinstance(model.policy.critic_encoder, Residual)
    assert model.policy.value_head.in_features == 12


class Reinforce(OnPolicyAlgorithm):
    """An algorithm as a user would write it."""

    def update(self, rollout: Any) -> None:
        for minibatch in self.minibatches(self.batch(rollout)):
            self.descend(self.loss, minibatch)

    def loss(self, batch: Any) -> Loss:
        distribution, values = self.actor_critic(batch)
        loss = self.new_loss(batch)
        loss.add("policy_loss", -distribution.log_prob(batch.actions) * batch.advantages)
        loss.add_value(values, 0.5)
        return loss


class WithDemonstrations(Reinforce):
    def update(self, rollout: Any) -> None:
        batch, names = self.batch(rollout), ("observations", "actions", "returns")
        self.descend(self.imitation, Batch({name: batch.fields[name] for name in names}))

    def imitation(self, batch: Any) -> Loss:
        distribution, values = self.actor_critic(batch)
        loss = self.new_loss(batch)
        loss.add("imitation_loss", -distribution.log_prob(batch.actions))
        loss.add_value(values)
        return loss


def test_own_rows_need_no_values_for_the_value_loss():
    data, trainer = make_data(), make_trainer(max_epochs=1)
    model = WithDemonstrations(data.observation_space, data.action_space)
    trainer.fit(model, data)
    assert {"imitation_loss", "value_loss"} <= model.losses.keys()


class ObservesKL(Reinforce):
    def loss(self, batch: Any) -> Loss:
        loss = super().loss(batch)
        loss.observe(approx_kl=torch.ones(len(batch)))
        return loss


def test_adaptive_learning_rate_needs_a_loss_that_observes_the_divergence():
    data, options = make_data(), {"optimizer": {"adaptive_learning_rate": {"target_kl": 0.1}}, "learning_rate": 1e-3}
    model = ObservesKL(data.observation_space, data.action_space, **options)
    make_trainer(max_epochs=1, limit_train_batches=1).fit(model, data)
    assert model.optimizers().param_groups[0]["lr"] == pytest.approx(1e-3 / 1.5)
    model = Reinforce(data.observation_space, data.action_space, **options)
    with pytest.raises(RuntimeError, match=r"^optimizer\.adaptive_learning_rate needs approx_kl: call loss\.observe"):
        make_trainer(max_epochs=1).fit(model, data)


class ImitatesFirst(WithDemonstrations):
    def update(self, rollout: Any) -> None:
        with self.steps.phase("sil_", 1.0):
            super().update(rollout)
        Reinforce.update(self, rollout)


def test_steps_after_a_phase_are_logged_without_its_prefix():
    data = make_data()
    model = ImitatesFirst(data.observation_space, data.action_space)
    make_trainer(max_epochs=1).fit(model, data)
    assert {"sil_imitation_loss", "policy_loss"} <= model.losses.keys()
    assert "sil_policy_loss" not in model.losses


def test_own_rows_without_sequences_are_named_as_the_cause_with_a_recurrent_policy():
    data = make_data()
    model = WithDemonstrations(data.observation_space, data.action_space, policy={"memory": "gru"})
    with pytest.raises(ValueError, match=r"needs sequences: .* your own rows have none"):
        make_trainer(max_epochs=1).fit(model, data)


class OnObservations(Reinforce):
    def loss(self, batch: Any) -> Loss:
        self.actor_critic(batch.observations)
        return super().loss(batch)


class WithoutPolicy(Reinforce):
    def loss(self, batch: Any) -> Loss:
        loss = self.new_loss(batch)
        loss.add("policy_loss", batch.advantages)
        return loss


class OnRollout(Reinforce):
    def update(self, rollout: Any) -> None:
        list(self.minibatches(rollout))


class DescendOnRollout(Reinforce):
    def update(self, rollout: Any) -> None:
        self.descend(self.loss, rollout)


class LossNotMethod(Reinforce):
    def update(self, rollout: Any) -> None:
        for minibatch in self.minibatches(self.batch(rollout)):
            self.descend(self.loss(minibatch), minibatch)


class EntropyOfComponents(Reinforce):
    def loss(self, batch: Batch) -> Loss:
        loss = super().loss(batch)
        distribution, _ = self.actor_critic(batch)
        loss.add_entropy(-distribution.log_probs.exp() * distribution.log_probs, 0.01)  # [N, n], as of torch's Normal
        return loss


class RowsAsScalar(Reinforce):
    def loss(self, batch: Batch) -> Loss:
        loss = super().loss(batch)
        loss.add_scalar("regularization", self.actor_critic(batch)[1].square())
        return loss


class StopsAboveUnknown(Reinforce):
    def loss(self, batch: Batch) -> Loss:
        loss = super().loss(batch)
        loss.stop_above("approx_kl", 0.1)
        return loss


class MeanOfComponents(PPOKLPenalty):
    """Its distribution returns the KL divergence of each component."""

    def penalized_kl(self, batch: Batch, distribution: Any) -> Tensor:
        with patch.object(Categorical, "kl", lambda self, other: self.log_probs.exp() * self.log_probs):
            return super().penalized_kl(batch, distribution)


class AssignsAdvantages(Reinforce):
    def batch(self, rollout: Any, **per_step: Any) -> Batch:
        batch = super().batch(rollout, **per_step)
        batch.advantages = batch.advantages - batch.advantages.mean()
        return batch


class ScheduledFirst(Reinforce):
    def __init__(self, *args: Any, temperature: float = 1.0, **kwargs: Any) -> None:
        self.temperature = self.scheduled("temperature", temperature)
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (OnObservations, r"actor_critic got observations: expected the batch, self\.actor_critic\(batch\)"),
        (WithoutPolicy, r"loss does not depend on the policy: expected terms of self\.actor_critic\(batch\)"),
        (AssignsAdvantages, r"batch\.advantages was assigned: expected batch = batch\.replace\(advantages=\.\.\.\)"),
        (OnRollout, r"minibatches got a Rollout: expected self\.minibatches\(self\.batch\(rollout\)"),
        (
            DescendOnRollout,
            r"descend got a Rollout: expected rows, self\.descend\(self\.loss, self\.batch\(rollout\)\)",
        ),
        (EntropyOfComponents, r"entropy: rows have the shape \(\d+, 2\): expected \(\d+,\), one number per row"),
        (MeanOfComponents, r"kl: rows have the shape \(\d+, 2\): expected \(\d+,\), one number per row of the batch"),
        (StopsAboveUnknown, r"stop_above\('approx_kl'\): expected a name that was observed or added before"),
        (RowsAsScalar, r"a term of the loss has the shape \(\d+,\): expected a scalar; add takes a number per row"),
        (LossNotMethod, r"descend got a Loss: expected a method: descend\(self\.loss, batch\)"),
        (ScheduledFirst, r"scheduled\('temperature', \.\.\.\) needs the base class: call super\(\).__init__"),
    ],
)
def test_mistakes_in_a_custom_algorithm_are_named(algorithm, message):
    data = make_data()
    make_trainer(max_epochs=1).fit(Reinforce(data.observation_space, data.action_space), data)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        make_trainer(max_epochs=1).fit(algorithm(data.observation_space, data.action_space), data)


def test_policy_that_returns_a_column_of_values_is_named():
    class Column(OneNetwork):
        def value(self, observations: Tensor) -> Tensor:
            return super().value(observations).unsqueeze(-1)

    class ColumnPPO(PPO):
        def make_policy(self) -> Any:
            return Column(self.observation_space.shape[0], self.action_space.n)

    data = make_data(num_envs=2, rollout_length=8)
    model = ColumnPPO(data.observation_space, data.action_space)
    with pytest.raises(ConfigurationError, match=r"values=\(9, 2, 1\) is not valid: expected \(9, 2\), one number per"):
        make_trainer(max_epochs=1).fit(model, data)


@pytest.mark.parametrize(
    ("column", "found"),
    [
        ("act.value", r"values=\(8, 2, 1\) is not valid: expected \(8, 2\), one number per"),
        ("value", r"values=\(2, 1\) is not valid: expected \(2,\), one number per"),
        ("act.log_prob", r"log_probs=\(8, 2, 1\) is not valid: expected \(8, 2\), one number per"),
    ],
)
def test_policy_that_returns_a_column_in_one_method_is_named(column, found):
    class Column(ActorCritic):
        def act(self, *args, **kwargs):
            output = super().act(*args, **kwargs)
            if column.startswith("act."):
                name = column.removeprefix("act.")
                setattr(output, name, getattr(output, name).unsqueeze(-1))
            return output

        def value(self, *args):
            return super().value(*args).unsqueeze(-1) if column == "value" else super().value(*args)

    class ColumnPPO(PPO):
        def make_policy(self) -> Any:
            return Column(self.observation_space, self.action_space, shared_encoder=True)

    data = make_data(num_envs=2, rollout_length=8)
    with pytest.raises(ConfigurationError, match=found):
        make_trainer(max_epochs=1).fit(ColumnPPO(data.observation_space, data.action_space), data)


@pytest.mark.parametrize(
    ("group", "option", "value"),
    [("normalization", "observations", True), ("normalization", "values", "popart"), ("policy", "memory", "lstm")],
)
def test_options_that_a_custom_policy_does_not_use_are_rejected(group, option, value):
    data = make_data()
    with pytest.raises(ConfigurationError, match=rf"^{group}\.{option}=.* make_policy\(\) returned OneNetwork without"):
        OneNetworkPPO(data.observation_space, data.action_space, **{group: {option: value}})


def test_custom_value_loss_without_add_value_names_the_options_that_train_the_critic_alone():
    loss = Loss(Batch({"returns": torch.zeros(2)}), part="critic")
    loss.add("value_loss", torch.ones(2))
    with pytest.raises(ValueError, match=r"expected a call of loss\.add_value, since optimizer\.num_value_epochs"):
        _ = loss.total


@pytest.mark.parametrize(
    "algorithm",
    [A2C, BehaviourCloning, CLEAR, CriticPretraining, OverlappedPPO, PPG, PPOKLPenalty, RND, TFAgentsPPO, VMPO],
)
def test_further_tensors_are_rows_of_the_batch_of_every_algorithm(algorithm):
    model = algorithm(VECTOR, DISCRETE, policy={"hidden_sizes": (4,)})
    rollout = random_rollout(model.policy, valid=True)
    batch = model.batch(rollout, more=rollout.actions)
    rows = getattr(batch, "batch", batch)  # an `Unroll` has the rows of V-trace
    assert torch.equal(rows.more, rows.actions)


def test_further_tensors_are_in_the_order_of_sequences_with_memory():
    model = VMPO(VECTOR, DISCRETE, policy={"hidden_sizes": (4,), "memory": {"kind": "gru", "sequence_length": 6}})
    stateless = VMPO(VECTOR, DISCRETE, policy={"hidden_sizes": (4,)})
    rollout = random_rollout(stateless.policy)
    remember(model.policy, rollout)
    batch = model.batch(rollout, more=rollout.actions)
    assert torch.equal(batch.more, batch.actions)
