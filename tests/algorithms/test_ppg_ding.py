"""Whole cycles of both PPGs against DI-engine with a fixed cloning loss; see tests/vectors/README.md."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl import PPG, Batch, OffPolicyPPG, Rollout
from lightning_rl.algorithms.ppg import AuxiliaryActorCritic
from lightning_rl.functional import clipped_value_loss, value_loss
from lightning_rl.nested import Nested
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.distributions.discrete import Categorical
from lightning_rl.training.minibatches import BatchPair
from tests.helpers import FixedRollouts, Recorder, make_trainer, parameters_of
from tests.vectors.load import load

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

CYCLES, LOSSES = load("ppg_vtrace/ding_ppg_learn"), load("ppg_vtrace/ding_rl_utils")["ppg_joint_error"]
OBSERVATIONS, ACTIONS = spaces.Box(-9, 9, (5,)), spaces.Discrete(3)
NAMES = {
    "actor_critic.encoder.init": "actor_encoder.layers.0",
    "actor_critic.encoder.main.0": "actor_encoder.layers.2",
    "actor_critic.actor_encoder.init": "actor_encoder.layers.0",
    "actor_critic.actor_encoder.main.0": "actor_encoder.layers.2",
    "actor_critic.actor_head.Q.0.0": "action_head.0",
    "actor_critic.actor_head.Q.1.0": "action_head.2.logits",
    "actor_critic.critic_encoder.init": "auxiliary_encoder.layers.0",
    "actor_critic.critic_encoder.main.0": "auxiliary_encoder.layers.2",
    "actor_critic.critic_head.main.0": "auxiliary_head.hidden",
    "actor_critic.critic_head.last": "auxiliary_head.last",
    "aux_critic.0.init": "critic_encoder.layers.0",
    "aux_critic.0.main.0": "critic_encoder.layers.2",
    "aux_critic.1.main.0": "value_head.hidden",
    "aux_critic.1.last": "value_head.last",
}


class DeepHead(nn.Module):
    """A value head with one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    @property
    def weight(self) -> Tensor:
        return self.last.weight

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.hidden(features).relu())


class DingPolicy(AuxiliaryActorCritic):
    """Deep heads; the auxiliary head may have a separate encoder, and then does not train the policy."""

    def __init__(self, shared: bool, **options: Any) -> None:
        super().__init__(OBSERVATIONS, ACTIONS, hidden_sizes=(6, 8), activation="relu", **options)
        self.action_head: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), self.action_head)
        self.value_head: Any = DeepHead()
        self.auxiliary_head: Any = DeepHead()
        if not shared:
            self.auxiliary_encoder: Any = AuxiliaryActorCritic(
                OBSERVATIONS, ACTIONS, hidden_sizes=(6, 8), activation="relu"
            ).actor_encoder

    def forward_auxiliary(self, observations: Nested, *more: Any) -> tuple[Distribution, Tensor, Tensor]:
        distribution, auxiliary, value = super().forward_auxiliary(observations, *more)
        if hasattr(self, "auxiliary_encoder"):
            auxiliary = self._from_head(self.auxiliary_head, self.auxiliary_encoder(observations))
        return distribution, auxiliary, value


def double(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def batch_of(data: dict[str, Any], std: float | None = None) -> Batch:
    """Its values may be in units of the returns' deviation, its advantages are in units of return."""
    actions, values, advantages = torch.tensor(data["action"]), double(data["value"]), double(data["adv"])
    values = values * (std or 1.0)
    fields = {
        "observations": double(data["obs"]),
        "actions": actions,
        "log_probs": Categorical(double(data["logit"])).log_prob(actions),
        "values": values,
        "advantages": advantages,
        "returns": advantages + values,
    }
    return Batch(fields)


def rollout_of(batch: Batch) -> Rollout:
    """One environment, which a batch is what happened in."""
    column, no = batch.values[:, None], torch.zeros(len(batch), 1, dtype=torch.bool)
    return Rollout(
        observations=torch.cat([batch.observations, batch.observations[:1]])[:, None],
        actions=batch.actions[:, None],
        rewards=column,
        terminated=no,
        truncated=no,
        log_probs=batch.log_probs[:, None],
        values=column,
        next_values=column,
        final_indices=torch.zeros(0, 2, dtype=torch.int64),
        final_observations=torch.zeros(0, 5, dtype=torch.float64),
    )


class Scripted(PPG):
    """Takes batches and the rows of minibatches from a script."""

    case: dict[str, Any]

    def events(self, kind: str) -> list[Any]:
        """Rows of all minibatches of a kind, or the events themselves, of the present call."""
        return [event for event in self.case["calls"][self.policy_version]["events"] if event["kind"] == kind]

    def batch(self, rollout: Rollout, **per_step: Any) -> Batch:
        call = self.case["calls"][self.policy_version]
        batch = batch_of(call["batch"], call["std_before"])
        self.normalizers.value_targets = batch.returns
        return batch.replace(places=torch.arange(len(batch)))

    def make_policy(self) -> DingPolicy:
        return DingPolicy(SHARED[-1], value_normalization=self.hparams["normalization"]["values"])

    def auxiliary_minibatches(self) -> Iterator[Batch]:
        events = self.events("aux_minibatch")
        one_pass = len(events) // self.num_aux_epochs
        start = self.passes * one_pass
        self.passes += 1
        for event in events[start : start + one_pass]:
            yield Batch(self.kept.gather(torch.tensor(event["rows"])))

    passes = 0

    def auxiliary_phase(self) -> None:
        self.before_aux = parameters_of(self.policy)
        super().auxiliary_phase()


SHARED = [True]  # Lightning would take an argument for a hyper-parameter


class ScriptedPPG(Scripted):
    """DI-engine makes all passes of the policy before the passes of the value, each in its own order."""

    def update(self, rollout: Rollout) -> None:
        batch = self.batch(rollout)
        self.store_rollout(rollout, batch)
        rows = [event["rows"] for event in self.events("minibatch")]
        num_policy = len(self.events("policy"))
        for index, some in enumerate(rows):
            self.steps.part = "actor" if index < num_policy else "critic"
            self.descend(self.loss, Batch({n: x[torch.tensor(some)] for n, x in batch.fields.items()}))
        self.steps.part = None
        self.finish_iteration()


class ScriptedOffPolicyPPG(Scripted, OffPolicyPPG):
    """Uses the batches of the script."""

    def store(self, rollout: Rollout) -> None:
        pass

    def sample(self) -> BatchPair:
        call = self.case["calls"][self.policy_version]
        batches = (batch_of(call[f"{name}_batch"]) for name in ("policy", "value"))
        return BatchPair(*(batch.replace(versions=torch.zeros(len(batch))) for batch in batches))


def run(algorithm: type[Scripted], name: str, **options: Any) -> tuple[Scripted, list[dict[str, Tensor]], Recorder]:
    """Return the model, its parameters after each call, and the recorded values."""
    case = CYCLES[name]
    cfg, SHARED[-1] = case["cfg"], case["share_encoder"]
    model = algorithm(
        OBSERVATIONS,
        ACTIONS,
        num_policy_iterations=cfg["aux_freq"],
        num_aux_epochs=cfg["aux_train_epoch"],
        cloning_coef=cfg["aux_bc_weight"],
        learning_rate=cfg["learning_rate"],
        clip_range=cfg["clip_ratio"],
        aux_clip_range_value=cfg["clip_ratio"],
        value_coef=cfg["value_weight"],
        entropy_coef=cfg["entropy_weight"],
        separate_aux_optimizer=False,
        num_minibatches=1,
        clipping={"value": cfg["clip_ratio"]},
        advantages={"normalize": "minibatch"},
        optimizer={"name": "torch.optim.Adam"},
        **options,
    )
    model.case = case
    weights = {own(theirs): double(numbers) for theirs, numbers in case["weights_init"].items()}
    model.double().policy.load_state_dict(weights, strict=False)  # moments of values are not among them
    after: list[dict[str, Tensor]] = []

    class Weights(Recorder):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            super().on_train_batch_end(trainer, pl_module)
            after.append({n: p.detach().clone() for n, p in pl_module.policy.named_parameters()})

    rollouts = [rollout_of(batch_of(call.get("batch", call.get("value_batch")))) for call in case["calls"]]
    make_trainer(precision="64-true", callbacks=[recorder := Weights()]).fit(model, FixedRollouts(rollouts, model))
    return model, after, recorder


def own(name: str) -> str:
    module, _, parameter = name.rpartition(".")
    return f"{NAMES[module]}.{parameter}"


def check(name: str, after: list[dict[str, Tensor]], recorder: Recorder) -> None:
    for parameters, call in zip(after, CYCLES[name]["calls"], strict=True):
        assert {own(theirs) for theirs in call["weights_after"]} == set(parameters)
        for theirs, numbers in call["weights_after"].items():
            torch.testing.assert_close(parameters[own(theirs)], double(numbers), rtol=1e-10, atol=1e-10)
    info, row = CYCLES[name]["calls"][1]["info"], recorder.rows[1]
    figures = {"head": "auxiliary_loss", "cloning": "behavioral_cloning_loss", "value": "aux_value_loss"}
    for ours, theirs in figures.items():
        assert row[f"aux_{ours}_loss"] == pytest.approx(info[theirs], rel=1e-9)
    assert row["aux_learning_rate"] == info["policy_cur_lr"]


@pytest.mark.parametrize("name", ["ppg_kl_fixed_shared", "ppg_kl_fixed_separate"])
def test_ding_cycle(name: str) -> None:
    _, after, recorder = run(ScriptedPPG, name)
    check(name, after, recorder)


def test_ding_cycle_with_values_in_units_of_their_deviation() -> None:
    """Its moments begin with a ten-thousandth of an observation, and it keeps returns in units of different times."""
    name = "ppg_value_norm_kl_fixed_shared"
    model, after, _ = run(ScriptedPPG, name, normalization={"values": "running_std"})
    first, second = CYCLES[name]["calls"]
    for theirs, numbers in first["weights_after"].items():
        torch.testing.assert_close(after[0][own(theirs)], double(numbers), rtol=1e-8, atol=1e-8)
    for theirs, numbers in second["weights_before_aux"].items():
        torch.testing.assert_close(model.before_aux[own(theirs)], double(numbers), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["ppg_offpolicy_kl_fixed_shared", "ppg_offpolicy_kl_fixed_separate"])
def test_ding_off_policy_cycle(name: str) -> None:
    _, after, recorder = run(ScriptedOffPolicyPPG, name, updates_per_rollout=1, batch_size=8)
    check(name, after, recorder)


def test_the_cloning_loss_of_ding_makes_taken_actions_less_likely() -> None:
    """It is NaN, and its gradient makes whatever was done less likely, from the old policy on, which is to be kept."""
    assert CYCLES["ppg_as_shipped_shared"]["calls"][1]["info"]["behavioral_cloning_loss"] == "nan"
    assert CYCLES["ppg_offpolicy_as_shipped_shared"]["calls"][1]["info"]["total_loss"] == "nan"
    actions, old = torch.tensor(LOSSES["action"]), Categorical(double(LOSSES["logit_old"]))

    def shipped(logits: Tensor) -> Tensor:
        return -(old.log_prob(actions) * Categorical(logits).log_prob(actions)).mean()

    def mended(logits: Tensor) -> Tensor:
        return old.kl(Categorical(logits)).mean()

    def gradient(loss: Any, logits: Tensor) -> Tensor:
        return torch.autograd.grad(loss(logits.requires_grad_()), logits)[0]

    theirs = next(case["grad_bc_logit_new"] for case in LOSSES["cases"])
    torch.testing.assert_close(gradient(shipped, double(LOSSES["logit_new"])), double(theirs), rtol=1e-12, atol=1e-12)
    assert gradient(mended, old.logits.clone()).abs().max() < 1e-15
    logits = old.logits.clone()
    for _ in range(100):
        logits = logits.detach() - gradient(shipped, logits)
    now = Categorical(logits.detach())
    assert (now.log_prob(actions) < old.log_prob(actions)).all()
    assert old.kl(now).mean() > 1


@pytest.mark.parametrize("case", LOSSES["cases"])
def test_ding_joint_error(case: dict[str, Any]) -> None:
    w = 1.0 if case["weight"] is None else double(LOSSES["w"])
    values, targets, old = (double(LOSSES[name]) for name in ("value_new", "return_", "value_old"))
    values.requires_grad_()
    clipped = clipped_value_loss(values, targets, old, case["clip_ratio"])
    loss = (w * (clipped if case["use_value_clip"] else value_loss(values, targets))).mean()
    loss.backward()
    assert loss.item() == pytest.approx(case["auxiliary_loss"], rel=1e-12)
    torch.testing.assert_close(values.grad, double(case["grad_auxiliary_value_new"]), rtol=1e-12, atol=1e-12)


def test_ding_divergence_after_the_fix() -> None:
    logits = double(LOSSES["logit_new"]).requires_grad_()
    divergence = Categorical(double(LOSSES["logit_old"])).kl(Categorical(logits)).mean()
    divergence.backward()
    assert divergence.item() == pytest.approx(LOSSES["paper"]["kl"], rel=1e-12)
    torch.testing.assert_close(logits.grad, double(LOSSES["paper"]["grad_logit_new"]), rtol=1e-12, atol=1e-12)
