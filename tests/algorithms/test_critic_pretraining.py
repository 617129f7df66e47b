"""Critic pretraining as an algorithm, and critic warm-up of PPO and PPG."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_rl import IMPALA, PPG, PPO, CriticPretraining, OffPolicyPPG
from lightning_rl import functional as rl
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.validation import ConfigurationError
from tests.algorithms.test_impala import learn, make
from tests.algorithms.test_impala_golden import AS_IT_IS, LENGTH, NUM_ENVS, RIGHT, double, rollout_of
from tests.algorithms.test_impala_golden import learn as learn_once
from tests.algorithms.test_impala_golden import make as make_of_table
from tests.helpers import (
    DISCRETE,
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    Recorder,
    make_data,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
CRITICS = ("policy.critic_", "policy.value_")


class StepAlone(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows the step, not the episode."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[1:]


@pytest.mark.parametrize("trains", ["critic", "network"])
@pytest.mark.parametrize("name", AS_IT_IS["critic"])
def test_loss_and_gradient_match_the_reference_in_float64(name: str, trains: str) -> None:
    case, expected = AS_IT_IS["critic"][name], RIGHT[f"critic_{name}"]
    model = make_of_table(case, CriticPretraining, num_epochs=1, num_minibatches=1, trains=trains)
    heads = [*model.policy.logits]
    rollout = rollout_of(slice(None), heads)
    rollout.policy_version = 0
    with torch.no_grad():
        values = model.policy.value(rollout.observations)
    rollout.values, rollout.next_values = values[:-1], values[1:].masked_fill(rollout.terminated, 0)
    before = parameters_of(model)
    _, returns = model.estimator.advantages_and_returns(rollout)
    torch.testing.assert_close(returns, double(expected["returns"]), rtol=1e-7, atol=1e-7)
    recorded = learn_once(model, rollout)
    assert recorded["loss"] == pytest.approx(expected["loss"], rel=1e-7)
    assert recorded["value_loss"] == pytest.approx(expected["loss"] / (LENGTH * NUM_ENVS), rel=1e-7)
    limit = case["kwargs"]["clip_grad_norm"]
    factor = min(1.0, limit / recorded["grad_norm"])
    gradient = model.policy.value_table.grad.view(LENGTH + 1, NUM_ENVS)
    torch.testing.assert_close(gradient, factor * double(expected["grad_baseline"]), rtol=1e-6, atol=1e-6)
    for head, logits in model.policy.logits.items():
        assert logits.grad is None and torch.equal(logits, before[f"policy.logits.{head}"])


@pytest.mark.parametrize("name", AS_IT_IS["critic"])
def test_replay_matches_the_reference_in_float64(name: str) -> None:
    """The replayed columns are the first ones; targets of all columns come from the current values."""
    case, expected = AS_IT_IS["critic"][name], RIGHT[f"critic_{name}"]
    num_replayed = case["kwargs"]["batch_size_from_replay"]
    options = {"num_epochs": 1, "num_minibatches": 1, "trains": "network", "replay_ratio": 1.0}
    model = make_of_table(case, CriticPretraining, **options)
    heads = [*model.policy.logits]
    model.kept.append(rollout_of(slice(num_replayed), heads), model.generator)
    model.kept.draw = lambda count, generator: torch.arange(num_replayed)
    new = rollout_of(slice(num_replayed, None), heads)
    new.policy_version = 0
    recorded = learn_once(model, new)
    assert recorded["loss"] == pytest.approx(expected["loss"], rel=1e-7)
    factor = min(1.0, case["kwargs"]["clip_grad_norm"] / recorded["grad_norm"])
    gradient = model.policy.value_table.grad.view(LENGTH + 1, NUM_ENVS)
    torch.testing.assert_close(gradient, factor * double(expected["grad_baseline"]), rtol=1e-6, atol=1e-6)
    assert sorted(model.kept.state_dict()["kept"][0]["numbers"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("memory", [None, "gru"])
def test_replayed_unrolls_are_learned_beside_the_rollout(memory: str | None) -> None:
    """Twice as many unrolls, whose importance ratios are not checked: an earlier policy has acted."""
    policy = {"shared_encoder": True, "memory": memory and {"kind": memory, "hidden_size": 4}}
    options = {"num_epochs": 1, "num_minibatches": 1, "replay_ratio": 2.0, "trains": "network"}
    torch.manual_seed(0)
    data = make_data("CartPole-v1", rollout_length=8, rollouts_per_epoch=3)
    model = CriticPretraining(data.observation_space, data.action_space, policy=policy, learning_rate=0.1, **options)
    sizes: list[tuple[int, int]] = []
    loss = model.loss

    def watched(batch: Any) -> Any:
        is_new = batch.fields.get("is_new", torch.ones(len(batch)))
        sizes.append((len(batch), int(is_new.sum())))
        return loss(batch)

    model.loss = watched
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, data)
    assert sizes == [(16, 16), (48, 16), (48, 16)] and len(model.kept) == 6
    assert max(recorder.column("first_ratio_error")) < 1e-5


def changed(before: dict[str, Any], model: Any) -> set[str]:
    return {name for name, parameter in parameters_of(model).items() if not torch.equal(parameter, before[name])}


@pytest.mark.parametrize("shared", [False, True])
def test_critic_pretraining_changes_no_parameter_of_the_policy(shared):
    model = make(CriticPretraining, policy={"shared_encoder": shared}, num_minibatches=2)
    before = parameters_of(model)
    learn(model, [random_rollout(model.policy, off_policy=0.0) for _ in range(2)])
    assert changed(before, model) == {name for name in before if name.startswith(CRITICS)}


@pytest.mark.parametrize("shared", [False, True])
def test_training_the_network_includes_a_shared_encoder(shared):
    """The gradient is the one of the value loss."""
    options = {"num_epochs": 1, "num_minibatches": 1, "optimizer": {"max_grad_norm": None}}
    model = make(CriticPretraining, policy={"shared_encoder": shared}, trains="network", **options)
    rollout = random_rollout(model.policy, off_policy=0.0)
    _, returns = model.estimator.advantages_and_returns(rollout)
    values = model.policy.value(rollout.observations[:-1])
    (0.5 * (values - returns).square()).mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    before = parameters_of(model)
    learn(model, [rollout])
    trained = (*CRITICS, "policy.actor_encoder.") if shared else CRITICS
    assert {name for name in before if name.startswith(trained)} == changed(before, model) == {*expected}
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-10, atol=1e-12)


def test_only_vtrace_corrects_for_another_policy():
    one, other = (make(CriticPretraining, target=target) for target in ("discounted_return", "vtrace"))
    rollout = random_rollout(one.policy)
    plain, corrected = (model.estimator.advantages_and_returns(rollout)[1] for model in (one, other))
    torch.testing.assert_close(plain, rl.gae(*_inputs(rollout), rollout.traces(1.0)) + rollout.values)
    log_rhos = one.policy.log_prob(rollout.observations[:-1], rollout.actions).detach() - rollout.log_probs
    torch.testing.assert_close(corrected, rl.vtrace(log_rhos, *_inputs(rollout), rollout.traces(1.0))[0])
    assert not torch.allclose(plain, corrected)
    half = make(CriticPretraining, target="vtrace", vtrace_lambda=0.5).estimator.advantages_and_returns(rollout)[1]
    torch.testing.assert_close(half, rl.vtrace(log_rhos, *_inputs(rollout), rollout.traces(0.5))[0])


def _inputs(rollout: Any) -> tuple[torch.Tensor, ...]:
    return rollout.rewards, rollout.values, rollout.next_values, rollout.discounts(0.99)


def test_pretrained_values_converge_and_initialize_another_algorithm(tmp_path):
    """Episodes of four steps of reward 1 that terminate: 1, 1.9, 2.71 and 3.439 at γ = 0.9."""
    data = make_data(
        "tests.probes:Probe/Counter-v0",
        num_envs=4,
        rollout_length=16,
        rollouts_per_epoch=80,
        env={
            "kwargs": {"lengths": (4,), "ends": ("terminated",), "reward": 1.0},
            "wrappers": ["tests.algorithms.test_critic_pretraining.StepAlone"],
        },
    )
    torch.manual_seed(0)
    spaces = (data.observation_space, data.action_space)
    model = CriticPretraining(*spaces, gamma=0.9, policy={"hidden_sizes": (16,)}, learning_rate=1e-2)
    trainer = make_trainer()
    trainer.fit(model, data)
    expected = torch.tensor([3.439, 2.71, 1.9, 1.0])
    steps = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    torch.testing.assert_close(model.policy.value(steps).detach(), expected, rtol=0.05, atol=0.05)
    trainer.save_checkpoint(tmp_path / "critic.ckpt")
    for algorithm in (PPO, IMPALA):
        begun = algorithm(*spaces, gamma=0.9, policy={"hidden_sizes": (16,)})
        begun.init_from(tmp_path / "critic.ckpt")
        assert torch.equal(begun.policy.value(steps), model.policy.value(steps))


def test_logged_names_have_a_prefix_of_their_own():
    model, logger = make(CriticPretraining), MemoryLogger()
    rollouts = FixedRollouts([random_rollout(model.policy, off_policy=0.0)], model)
    make_trainer(precision="64-true", logger=logger, log_every_n_steps=1).fit(model, rollouts)
    ((metrics, _),) = logger.calls
    own = {name.partition("/")[2] for name in metrics if name.startswith("critic_pretraining/")}
    assert {"value_loss", "loss", "grad_norm", "learning_rate", "explained_variance", "first_ratio_error"} <= own
    assert not any(name.startswith("train/") for name in metrics)


def test_invalid_options_raise():
    for options, message in (
        ({"target": "gae"}, "target='gae'"),
        ({"vtrace_lambda": 0.5}, "vtrace_lambda=0.5"),
        ({"optimizer": {"l2": {"policy": 0.1}}}, "optimizer.l2.policy=0.1"),
        ({"advantages": {"value_target": "empirical"}}, "advantages.value_target='empirical'"),
        ({"num_epochs": 0}, "num_epochs=0"),
        ({"trains": "encoder"}, "trains='encoder' .* one of critic, network"),
        ({"replay_ratio": -1.0}, "replay_ratio=-1.0"),
        ({"replay_memory_gib": 2.0}, "replay_memory_gib=2.0 .* 1.0 unless replay_ratio"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            make(CriticPretraining, **options)
    with pytest.raises(ConfigurationError, match=r"optimizer\.critic_warmup_steps=-1"):
        make(PPO, optimizer={"critic_warmup_steps": -1})


# -- the first steps of PPO and PPG


@pytest.mark.parametrize("shared", [False, True])
def test_critic_warmup_of_ppo_trains_only_the_value_first(shared):
    """Rollouts of 48 steps: two begin before step 49."""
    model = make(PPO, policy={"shared_encoder": shared}, optimizer={"critic_warmup_steps": 49}, num_minibatches=2)
    seen: list[set[str]] = []

    class Watch(Recorder):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.before = parameters_of(pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *args)
            seen.append(changed(self.before, pl_module))

    watch = Watch()
    rollouts = [random_rollout(model.policy, off_policy=0.0) for _ in range(3)]
    make_trainer(precision="64-true", callbacks=[watch]).fit(model, FixedRollouts(rollouts, model))
    critics = {name for name in parameters_of(model) if name.startswith(CRITICS)}
    assert seen[:2] == [critics, critics] and seen[2] == {*parameters_of(model)}
    assert ["policy_loss" in row for row in watch.rows] == [False, False, True]


@pytest.mark.parametrize(("passes", "expected"), [(1, [2, 6]), (None, [6, 6]), (5, [10, 10])])
def test_critic_warmup_uses_the_number_of_value_epochs(passes, expected):
    data = make_data("CartPole-v1", rollout_length=16, rollouts_per_epoch=2)
    options = {
        "policy": {"hidden_sizes": (8,)},
        "optimizer": {"num_value_epochs": passes, "critic_warmup_steps": 1},
        "num_epochs": 3,
        "num_minibatches": 2,
    }
    counts: list[int] = []
    callback = LambdaCallback(
        on_train_batch_end=lambda _, module, *args: counts.append(int(module.steps.record.num_updates))
    )
    model = PPO(data.observation_space, data.action_space, **options)
    make_trainer(callbacks=[callback]).fit(model, data)
    assert counts == expected


@pytest.mark.parametrize("algorithm", [PPG, OffPolicyPPG])
@pytest.mark.parametrize("architecture", ["dual", "detached"])
def test_ppg_has_no_auxiliary_phase_during_critic_warmup(algorithm, architecture):
    data = make_data("CartPole-v1", rollout_length=16, rollouts_per_epoch=4)
    torch.manual_seed(0)
    options = {"batch_size": 16} if algorithm is OffPolicyPPG else {"num_minibatches": 2}
    model = algorithm(
        data.observation_space,
        data.action_space,
        num_policy_iterations=2,
        architecture=architecture,
        **merged({"policy": {"hidden_sizes": (8,)}, "optimizer": {"critic_warmup_steps": 65}}, options),
    )
    recorder, before = Recorder(), parameters_of(model)
    trainer = make_trainer(callbacks=[recorder], limit_train_batches=3)
    trainer.fit(model, data)
    assert changed(before, model) == {name for name in before if name.startswith(CRITICS)}
    assert not any("aux_kl" in row for row in recorder.rows)


class OtherNames(ActorCritic):
    """A policy without parameter names that begin with `critic_` or `value_`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.baseline, self.value_head = self.value_head, torch.nn.Identity()
        self.baseline_encoder, self.critic_encoder = self.critic_encoder, None


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (CriticPretraining, {}, r"model='Own' is not valid"),
        (PPO, {"optimizer": {"critic_warmup_steps": 64}}, r"optimizer.critic_warmup_steps=64 is not valid"),
    ],
)
def test_a_policy_without_critic_parameters_raises(algorithm: type[Any], options: dict[str, Any], message: str) -> None:
    class Own(algorithm):  # type: ignore[misc]
        def make_policy(self) -> ActorCritic:
            return OtherNames(self.observation_space, self.action_space, hidden_sizes=(4,))

    expected = r".* names begin with critic_ or value_, .* OtherNames with .*baseline\.weight"
    with pytest.raises(ConfigurationError, match=f"^{message}: {expected}"):
        Own(VECTOR, DISCRETE, **options)
    algorithm(VECTOR, DISCRETE, **options)


def test_no_critic_parameters_are_needed_without_warmup() -> None:
    class Own(PPO):
        def make_policy(self) -> ActorCritic:
            return OtherNames(self.observation_space, self.action_space, hidden_sizes=(4,))

    assert Own(VECTOR, DISCRETE).steps.critic_warmup_steps == 0


def test_a_rollout_of_another_length_clears_the_replay_memory():
    model = make(CriticPretraining, replay_ratio=1.0)
    learn(model, [random_rollout(model.policy, length=length) for length in (12, 6)])
    assert len(model.kept) == 4


def test_replay_memory_without_room_for_the_observations_of_one_unroll_raises():
    data = make_data(rollouts_per_epoch=1)
    options = {"replay_ratio": 1.0, "replay_memory_gib": 1e-7}
    with pytest.raises(ConfigurationError, match=r"^replay_memory_gib=1e-07 .* for \d+ steps of 24 bytes"):
        make_trainer().fit(CriticPretraining(data.observation_space, data.action_space, **options), data)


def test_replayed_steps_keep_the_weights_of_their_rollout():
    """`step_weights` is not called for replayed steps, which lack what it may need."""
    data = make_data("CartPole-v1", num_envs=2, rollout_length=16, rollouts_per_epoch=3)

    class Weighted(CriticPretraining):
        def step_weights(self, rollout):
            assert rollout.shape == (16, 2)
            return torch.full(rollout.shape, 0.5 + rollout.policy_version)

    model = Weighted(data.observation_space, data.action_space, num_minibatches=1, replay_ratio=2.0)
    seen, loss = [], model.loss
    model.loss = lambda batch: seen.append(sorted({*batch.weights.tolist()})) or loss(batch)
    make_trainer().fit(model, data)
    assert seen[0] == [0.5] and seen[-1][-1] == 2.5 and {*seen[-1]} <= {0.5, 1.5, 2.5} and len(seen[-1]) > 1
