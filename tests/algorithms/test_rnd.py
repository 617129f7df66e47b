"""Random network distillation: intrinsic rewards, their own values and discount, and what a checkpoint has of them."""

import copy
import math

import pytest
import torch
from gymnasium import spaces
from lightning.pytorch import Callback

from lightning_rl import PPO, RND
from lightning_rl.functional import clipped_value_loss
from lightning_rl.training.parameter_groups import weights_by_part
from lightning_rl.validation import ConfigurationError
from tests.combination_probes import SAMPLE, data_options, model_options
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

SMALL = {"policy": {"hidden_sizes": (16,)}, "num_epochs": 2, "num_minibatches": 2}


def make(observation_space=VECTOR, action_space=DISCRETE, **options):
    torch.manual_seed(0)
    return RND(observation_space, action_space, **merged(SMALL, options))


def test_intrinsic_advantages_continue_over_the_ends_of_episodes():
    model = make(intrinsic_gamma=0.8, gae_lambda=0.7)
    rollout = random_rollout(model.policy)
    assert rollout.terminated.any() and rollout.truncated.any()
    with torch.no_grad():
        values = model.policy.with_intrinsic_value().value(rollout.observations)
        rewards = model.policy.novelty(rollout.observations[1:].flatten(0, 1)).view(rollout.shape)
    batch, expected = model.batch(rollout), torch.zeros(*rollout.shape)
    after = torch.zeros(rollout.shape[1])
    for t in reversed(range(len(rewards))):
        after = rewards[t] + 0.8 * values[t + 1] - values[t] + 0.8 * 0.7 * after
        expected[t] = after
    torch.testing.assert_close(batch.intrinsic_advantages, expected.flatten())
    torch.testing.assert_close(batch.intrinsic_returns, (expected + values[:-1]).flatten())


def test_advantages_are_weighted_sums_of_both():
    model = make(extrinsic_coef=3.0, intrinsic_coef=0.5)
    rollout = random_rollout(model.policy)
    plain = PPO(VECTOR, DISCRETE, **SMALL, gamma=0.999)
    plain.policy = plain.estimator.policy = model.policy
    batch, extrinsic = model.batch(rollout), plain.batch(rollout)
    torch.testing.assert_close(batch.advantages, 3 * extrinsic.advantages + 0.5 * batch.intrinsic_advantages)
    assert torch.equal(batch.returns, extrinsic.returns)


@pytest.mark.parametrize("resets", [1, 2])
def test_rows_that_only_reset_change_no_intrinsic_advantage(resets):
    """A step that ends an episode reaches the first observation of the next one, whenever the reset happens."""
    model = make()
    same = random_rollout(model.policy, num_envs=1)
    same.terminated[-1] = True
    ends = (same.dones[:, 0].nonzero() + 1).flatten().tolist()
    assert ends[0] < ends[-1] == len(same.dones)

    def with_resets(x, row):
        parts = list(x.tensor_split(ends))
        return torch.cat([part if k == 0 else torch.cat([row(x)] * resets + [part]) for k, part in enumerate(parts)])

    later = copy.copy(same)
    for name in ("observations", "rewards", "values", "next_values", "log_probs", "actions"):
        setattr(later, name, with_resets(getattr(same, name), lambda x: torch.full_like(x[:1], 2)))
    for name in ("terminated", "truncated"):
        setattr(later, name, with_resets(getattr(same, name), lambda x: torch.zeros_like(x[:1])))
    later.valid = with_resets(torch.ones_like(same.dones), lambda x: torch.zeros_like(x[:1]))
    later.final_indices = same.final_indices[:0]
    one, other = model.batch(same), model.batch(later)
    for name in ("intrinsic_rewards", "intrinsic_advantages", "intrinsic_returns"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("clipping", [{}, {"value": 0.05, "value_huber_delta": 0.3}])
def test_loss_is_ppo_with_a_second_value_loss_and_the_error_of_the_predictor(clipping):
    options = {"value_coef": 0.3, "entropy_coef": 0.1, "clipping": clipping}
    model = make(**options)
    batch = model.batch(random_rollout(model.policy))
    old_values = batch.intrinsic_values + torch.linspace(-1, 1, len(batch))
    batch = batch.replace(intrinsic_values=old_values)
    plain = PPO(VECTOR, DISCRETE, **SMALL, **options)
    plain.policy = model.policy
    loss, ppo = model.loss(batch), plain.loss(batch)
    assert all(torch.equal(loss.metrics[name], x) for name, x in ppo.metrics.items())
    values = model.policy.with_intrinsic_value()(batch.observations)[1]
    value_loss = 0.5 * (values - batch.intrinsic_returns).square().mean()
    if clipping:
        value_loss = clipped_value_loss(values, batch.intrinsic_returns, old_values, 0.05, 0.3).mean()
    part = model.policy.novelty(batch.observations[:12]).mean()  # a quarter of 48 rows
    torch.testing.assert_close(loss.metrics["predictor_loss"], part.detach())
    torch.testing.assert_close(loss.total, ppo.total + 0.3 * value_loss + part)


def test_predictor_learns_observations_that_it_sees_but_not_others():
    data, logger = make_data(rollouts_per_epoch=30), MemoryLogger()
    model = make(data.observation_space, data.action_space, learning_rate=1e-3, predictor_fraction=1.0)
    target = parameters_of(model.policy.critic_target)
    make_trainer(logger=logger, log_every_n_steps=1).fit(model, data)
    rewards = [value for _, value in logger.rows("train/intrinsic_reward")]
    assert rewards[-1] < rewards[0] / 10
    assert all(torch.equal(x, target[name]) for name, x in model.policy.critic_target.named_parameters())
    with torch.no_grad():
        unseen = model.policy.novelty(torch.tensor([[2.0, -3.0, 0.2, 3.0], [-2.0, 3.0, -0.2, -3.0]]))
    assert unseen.min() > 10 * rewards[-1]


def test_target_stays_fixed_in_a_model_that_was_unfrozen():
    data = make_data()
    model = RND(data.observation_space, data.action_space, **SMALL)
    model.freeze()
    model.unfreeze()
    target = parameters_of(model.policy.critic_target)
    make_trainer().fit(model, data)
    assert all(torch.equal(x, target[name]) for name, x in model.policy.critic_target.named_parameters())


def test_only_numbers_are_whitened():
    policy = RND(spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3)}), DISCRETE, **SMALL).policy
    x = {"a": torch.zeros(3, 3), "b": torch.arange(3)}
    before = policy.novelty(x)
    ones = torch.ones(1, 3)
    policy.novelty_normalizer.update({"a": torch.cat([ones, -ones]), "b": torch.tensor([2, 2])})
    assert torch.equal(policy.novelty(x), before)
    assert not torch.equal(policy.novelty(x | {"a": x["a"] + 1}), before)
    policy.critic_predictor = policy.critic_target
    assert not policy.novelty(x).any()


def test_observations_are_whitened_and_clipped_and_rewards_scaled_by_the_deviation_of_returns():
    data, recorder = make_data(rollouts_per_epoch=3), Recorder()
    model = make(data.observation_space, data.action_space)
    rollouts, streams = [], []
    model.on_train_batch_start = lambda batch, _: rollouts.append(batch.clone())
    model.on_train_batch_end = lambda *_: streams.append(model.stream.rewards)
    make_trainer(callbacks=[recorder]).fit(model, data)
    seen = torch.cat([x.observations[:-1].flatten(0, 1) for x in (rollouts[0], *rollouts)])  # the first gives a start
    moments = model.policy.novelty_normalizer.of("").moments
    torch.testing.assert_close(moments.mean, seen.double().mean(0).to(moments.mean.dtype))
    torch.testing.assert_close(moments.variance, seen.double().var(0, correction=0).to(moments.mean.dtype))
    whitened = model.policy.novelty_normalizer(seen)
    assert whitened.abs().max() <= 5
    assert (model.policy.novelty_normalizer(seen + 1e6) == 5).all()
    assert model.intrinsic_normalizer(torch.tensor(1e6)) > 1e4  # rewards are not clipped
    returns, running = [], torch.zeros(2)
    for rollout, rewards in zip(rollouts, streams, strict=True):
        for t, reward in enumerate(rewards):
            running = reward + 0.99 * running
            returns.append(running)
            running = running * ~rollout.dones[t]
    deviation = torch.stack(returns).std(correction=0)
    torch.testing.assert_close(model.intrinsic_normalizer(torch.ones(1)), 1 / deviation.view(1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("combination", SAMPLE, ids=str)
def test_it_trains_on_policy_for_every_kind_of_observation_and_action(combination):
    data, recorder = make_data(**data_options(combination)), Recorder()
    options = merged({"num_epochs": 1}, model_options(combination))
    model = make(data.observation_space, data.action_space, **options)
    before = parameters_of(model)
    make_trainer(callbacks=[recorder]).fit(model, data)
    assert max(recorder.column("first_ratio_error")) <= 1e-6
    unchanged = [name for name, x in model.named_parameters() if torch.equal(x, before[name])]
    assert all(name.startswith("policy.critic_target.") for name in unchanged)


def test_checkpoint_has_the_intrinsic_returns_of_the_running_episodes(tmp_path):
    """`tests/checkpointing/test_resume.py` compares resumed runs with uninterrupted ones."""
    data, trainer = make_data(), make_trainer()
    trainer.fit(model := make(data.observation_space, data.action_space), data)
    trainer.save_checkpoint(path := tmp_path / "rnd.ckpt")
    (rank,) = torch.load(path, weights_only=True)["lightning_rl"]["ranks"]
    stored = rank["discounted_returns"]["intrinsic_normalizer"]
    assert torch.equal(stored, model.intrinsic_normalizer.discounted_return) and (stored > 0).any()
    loaded = RND.load_from_checkpoint(path)
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in model.state_dict().items())
    resumed = []

    class Reader(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            resumed.append(pl_module.intrinsic_normalizer.discounted_return)

    make_trainer(max_epochs=trainer.max_epochs + 1, callbacks=[Reader()]).fit(loaded, make_data(), ckpt_path=path)
    assert torch.equal(resumed[0], stored)


def test_compute_loss_changes_nothing():
    model = make()
    rollout = random_rollout(model.policy)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state(), model.generator.get_state()
    terms = model.compute_loss(rollout)
    assert {"intrinsic_value_loss", "intrinsic_reward", "predictor_loss"} <= terms.keys()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state[0]) and torch.equal(model.generator.get_state(), state[1])


def test_compute_loss_within_an_update_changes_no_statistics():
    found = []
    for held_out in (False, True):

        class Own(RND):
            def loss(self, batch):
                if self.checks_held_out:
                    self.checks_held_out = False
                    self.compute_loss(random_rollout(self.policy, seed=9))
                return super().loss(batch)

        torch.manual_seed(0)
        model = Own(VECTOR, DISCRETE, **SMALL)
        model.checks_held_out = held_out
        rollouts = [random_rollout(model.policy, seed=0, off_policy=0.0)]
        make_trainer().fit(model, FixedRollouts(rollouts, model))
        found.append({name: x for name, x in model.state_dict().items() if "normalizer" in name})
    assert found[0] and all(torch.equal(x, found[1][name]) for name, x in found[0].items())


def test_skipped_update_changes_no_statistics():
    data = make_data(rollouts_per_epoch=2)
    model = make(data.observation_space, data.action_space, debug={"max_skipped_updates": 1})
    counts = []

    def on_train_batch_start(batch, index):
        if index == 1:
            batch.rewards[0] = math.nan
            counts.append(model.intrinsic_normalizer.moments.count.clone())

    model.on_train_batch_start = on_train_batch_start
    make_trainer().fit(model, data)
    assert torch.equal(model.intrinsic_normalizer.moments.count, counts[0]) and counts[0] == 32


def test_intrinsic_returns_start_at_0_after_a_skipped_update():
    torch.manual_seed(0)
    model = make(VECTOR, DISCRETE, debug={"max_skipped_updates": 1})
    rollouts = [random_rollout(model.policy, seed=seed, off_policy=0.0) for seed in range(3)]
    for rollout in rollouts:
        rollout.terminated[:], rollout.truncated[:] = False, False
        rollout.final_indices, rollout.final_observations = rollout.final_indices[:0], rollout.final_observations[:0]
    rollouts[1].rewards[0] = math.nan
    make_trainer().fit(model, FixedRollouts(rollouts, model))
    discounts = model.intrinsic_gamma ** torch.arange(12, dtype=torch.float64).flip(0).unsqueeze(1)
    # The return already has the discount of the next step.
    expected = model.intrinsic_gamma * (discounts * model.stream.rewards).sum(0)
    assert torch.allclose(model.intrinsic_normalizer.discounted_return, expected, rtol=1e-6)


@pytest.mark.parametrize("optimizer", [{"num_value_epochs": 3}, {"critic": {"learning_rate": 1e-3}}])
def test_predictor_is_trained_with_the_critic(optimizer):
    data = make_data(rollouts_per_epoch=1)
    model = make(data.observation_space, data.action_space, optimizer={"critic_warmup_steps": 100, **optimizer})
    before = parameters_of(model)
    make_trainer().fit(model, data)
    changed = {name.split(".")[1] for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert changed == {"critic_encoder", "value_head", "value_intrinsic_head", "critic_predictor"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"intrinsic_coef": -1.0}, "intrinsic_coef=-1"),
        ({"extrinsic_coef": -1.0}, "extrinsic_coef=-1"),
        ({"intrinsic_gamma": 1.5}, "intrinsic_gamma=1.5"),
        ({"predictor_fraction": 0.0}, "predictor_fraction=0"),
        ({"normalization": {"values": "popart"}}, "normalization.values='popart'"),
        ({"advantages": {"recompute_values": True}}, "advantages.recompute_values=True"),
    ],
)
def test_options_out_of_range_or_without_effect_are_errors(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


def test_images_are_whitened_too():
    image = spaces.Box(0, 255, (8, 8, 3), "uint8")
    model = make(image, DISCRETE)
    observations = torch.randint(0, 256, (64, 8, 8, 3), dtype=torch.uint8)
    model.policy.novelty_normalizer.update(observations)
    whitened = model.policy.novelty_normalizer(observations)
    torch.testing.assert_close(whitened.mean(0), torch.zeros(8, 8, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(whitened.std(0, correction=0), torch.ones(8, 8, 3), atol=1e-5, rtol=0)
    assert model.policy.novelty(observations).shape == (64,)


def test_weight_penalty_leaves_the_fixed_target_out():
    policy = make(optimizer={"l2": {"value": 0.1}}).policy
    penalized = {id(weight) for weight in weights_by_part(policy)["value"]}
    assert penalized.isdisjoint(map(id, policy.critic_target.parameters()))
    assert any(id(x) in penalized for x in policy.critic_predictor.parameters())
