"""Contract 3: every autoreset mode, and EnvPool, gives the same learning data."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv

from lightning_rl import PPO
from lightning_rl.environments import EnvironmentBatch
from tests.helpers import FixedRollouts, make_trainer, merged
from tests.probes import Greedy, Tape, Told, make_batch, make_collector

SAME, NEXT, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
SCRIPT = {"lengths": (5, 3, 4), "ends": ("terminated", "truncated", "both")}


def make_model(environments, **options) -> PPO:
    """A float64 model with one step of gradient descent per rollout: results differ only by the order of sums."""
    torch.manual_seed(0)
    spaces = environments.single_observation_space, environments.single_action_space
    small = {"num_epochs": 1, "num_minibatches": 1, "learning_rate": 1.0, "entropy_coef": 0.01}
    small |= {"optimizer": {"name": "torch.optim.SGD", "max_grad_norm": None}}
    small |= {"normalization": {"observations": True, "rewards": True}}
    model = PPO(*spaces, **merged(small, options))
    return model.double()


def length_of(environments, num_rows) -> int:
    """Return the length of the shortest rollout with this many valid steps of one environment."""
    collector = make_collector(environments, 1)
    missing, length = num_rows, 0
    while missing:
        missing -= collector.collect(Told()).num_steps
        length += 1
    return length


def learn(model, rollout):
    """Take the gradient step, and return all changed parameters and statistics."""
    make_trainer(precision="64-true").fit(model, FixedRollouts([rollout], model))
    return {name: x.clone() for name, x in model.state_dict().items()}


@pytest.fixture
def script_in(request):
    def make(mode):
        environments = make_batch("Probe/Counter-v0", mode=mode, **SCRIPT)
        request.addfinalizer(environments.close)
        return environments

    return make


# 20 rows end with an episode, 19 in the middle of one, 21 with the first step of the next.
@pytest.mark.parametrize("num_rows", [19, 20, 21])
@pytest.mark.parametrize("mode", [NEXT, DISABLED])
def test_modes_give_equal_targets_gradients_statistics_and_counts(script_in, mode, num_rows):
    results = []
    for environments in (script_in(SAME), script_in(mode)):
        model = make_model(environments)
        keys = ("level", "score", "only_reset", "absent")
        length = length_of(environments, num_rows)
        # A new environment, since the scripted one counts its episodes.
        rollout = make_collector(script_in(environments.mode), length, torch.float64, keys).collect(
            Greedy(model.policy)
        )
        batch = rollout.flatten(
            advantages=model.estimator.gae(rollout, 0.95), next_values=rollout.next_values, rewards=rollout.rewards
        )
        ends = rollout.flatten(terminated=rollout.terminated, truncated=rollout.truncated)
        results.append((rollout, batch, ends, learn(model, rollout), model))
    (one, batch, ends, state, model), (other, other_batch, other_ends, other_state, other_model) = results
    assert one.num_steps == other.num_steps == num_rows == len(batch)
    assert model.env_steps == other_model.env_steps == num_rows
    assert one.episodes.returns == other.episodes.returns
    assert one.episodes.lengths == other.episodes.lengths == [5, 3, 4, 5, 3][: 5 if num_rows >= 20 else 4]
    infos, other_infos = ({k: x[~x.isnan()].tolist() for k, x in rollout.infos.items()} for rollout in (one, other))
    assert infos == other_infos and infos["only_reset"] == infos["absent"] == []
    assert len(infos["level"]) == num_rows and infos["score"] == [float(n) for n in one.episodes.lengths]
    for name in ("observations", "actions", "rewards"):
        assert torch.equal(getattr(batch, name), getattr(other_batch, name)), name
    for name in ("terminated", "truncated"):
        assert torch.equal(getattr(ends, name), getattr(other_ends, name)), name
    for name in ("values", "next_values", "log_probs", "advantages"):
        torch.testing.assert_close(getattr(batch, name), getattr(other_batch, name), rtol=1e-13, atol=1e-13)
    initial = make_model(script_in(SAME)).state_dict()
    for name, x in state.items():
        torch.testing.assert_close(other_state[name], x, rtol=1e-12, atol=1e-14, msg=name)
        if "weight" in name or "moments" in name:
            assert not torch.equal(x, initial[name]), f"{name} did not change, so its equality says nothing"


def test_next_step_masks_exactly_the_resets_also_across_rollouts():
    environments = make_batch("Probe/Counter-v0", mode=NEXT, lengths=(3, 2))
    collector = make_collector(environments, 4)
    assert [collector.collect(Told()).valid[:, 0].tolist() for _ in range(3)] == [
        [True, True, True, False],
        [True, True, False, True],
        [True, True, False, True],
    ]


def test_rollout_that_ends_with_an_episode_begins_the_next_one_with_the_reset_masked():
    environments = make_batch("Probe/Counter-v0", mode=NEXT, lengths=(3, 2))
    collector = make_collector(environments, 3)
    first, second = collector.collect(Told()), collector.collect(Told())
    assert first.valid is None and second.valid is not None
    assert second.valid[:, 0].tolist() == [False, True, True]
    assert second.rewards[:, 0].tolist() == [0, 101, 102]
    assert second.episodes.lengths == [2] and second.episodes.returns == [203.0]


def test_same_step_and_disabled_waste_no_step():
    for mode in (SAME, DISABLED):
        rollout = make_collector(make_batch("Probe/Counter-v0", 3, mode=mode, lengths=(1, 2)), 20).collect(Told())
        assert rollout.valid is None and rollout.num_steps == 60


def test_minibatches_contain_only_valid_rows():
    rollout = make_collector(make_batch("Probe/Counter-v0", 3, mode=NEXT, lengths=(2,), reward=7.0), 10).collect(Told())
    batch = rollout.flatten(rewards=rollout.rewards)
    assert len(batch) == rollout.num_steps == 3 * 7
    assert (batch.rewards == 7).all()
    assert sorted(len(part) for part in batch.shuffled().split(4)) == [5, 5, 5, 6]
    assert batch.mean(batch.rewards).item() == pytest.approx(7)


def record(rollout, first_observation) -> Tape:
    """Return the valid transitions of one environment."""
    valid = np.ones(rollout.shape[0], bool) if rollout.valid is None else rollout.valid[:, 0].numpy()
    observations = rollout.observations[:, 0].numpy()
    firsts = [first_observation] + [observations[t + 1] for t in np.flatnonzero(~valid)]
    # A valid step of EnvPool returns its own next observation.
    columns = (rollout.rewards, rollout.terminated, rollout.truncated)
    rewards, terminated, truncated = (x[:, 0].numpy()[valid].copy() for x in columns)
    return Tape([x.copy() for x in firsts], observations[1:][valid].copy(), rewards, terminated, truncated)


@pytest.mark.parametrize("backend", ["envpool", "native"])
def test_vectorized_cartpole_equals_a_single_one_on_the_same_transitions(backend):
    environments = make_batch("CartPole-v1", backend=backend, env={"max_episode_steps": 9})
    assert environments.mode is NEXT
    model = make_model(environments, normalization={"observations": False})
    rollout = make_collector(environments, 63, torch.float64).collect(Greedy(model.policy))
    assert rollout.valid is not None and not rollout.valid.all() and rollout.valid[-1]
    assert rollout.truncated.any() and (rollout.rewards[~rollout.valid] == 0).all()
    tape = record(rollout, rollout.observations[0, 0].numpy())
    spaces = environments.single_observation_space, environments.single_action_space
    environments.close()
    replay = make_batch("Probe/Replay-v0", tape=tape, observation_space=spaces[0], action_space=spaces[1])
    again = make_collector(replay, rollout.num_steps, torch.float64).collect(Greedy(model.policy))
    assert again.valid is None
    rows, expected = (
        r.flatten(advantages=model.estimator.gae(r, 0.95), next_values=r.next_values, rewards=r.rewards)
        for r in (rollout, again)
    )
    for name in ("observations", "actions", "rewards"):
        assert torch.equal(getattr(rows, name), getattr(expected, name)), name
    for name in ("values", "next_values", "log_probs", "advantages"):
        torch.testing.assert_close(getattr(rows, name), getattr(expected, name), rtol=1e-13, atol=1e-13)
    assert rollout.episodes.returns == again.episodes.returns
    assert rollout.episodes.lengths == again.episodes.lengths
    initial = {name: x.clone() for name, x in model.state_dict().items()}
    changed = learn(model, rollout)
    reference = make_model(replay, normalization={"observations": False})
    reference.load_state_dict(initial)
    for name, x in learn(reference, again).items():
        torch.testing.assert_close(changed[name], x, rtol=1e-12, atol=1e-14, msg=name)
        assert "weight" not in name or not torch.equal(x, initial[name])


class Reusing(VectorEnv):
    """Returns its own arrays; a reset clears the rows that it resets."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012 - as Gymnasium has it
    num_envs = 2
    single_observation_space, single_action_space = Box(-1, 1, (1,)), Discrete(2)

    def reset(self, *, seed=None, options=None):
        mask = options["reset_mask"] if options else slice(None)
        if not options:
            self.rewards, self.flags = np.ones(2), np.zeros((2, 2), bool)
        self.rewards[mask], self.flags[:, mask] = 0, False
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions):
        self.rewards[:], self.flags[0] = 1, [True, False]
        return np.zeros((2, 1), np.float32), self.rewards, *self.flags, {"sum": self.rewards}


def test_rewards_flags_and_infos_of_a_step_survive_the_reset_after_it():
    batch = EnvironmentBatch(Reusing(), [0, 1], [0, 1])
    batch.reset()
    step = batch.step(np.zeros(2, np.int64))
    assert (step.rewards.tolist(), step.terminated.tolist()) == ([1, 1], [True, False])
    assert batch.info_values(step, "sum").tolist() == [1, 1]


class ReusingFinals(Reusing):
    """Returns the same array of final observations each time."""

    metadata = {"autoreset_mode": SAME}  # noqa: RUF012 - as Gymnasium has it
    finals = np.zeros((2, 1), np.float32)

    def step(self, actions):
        self.finals += 1
        return *super().step(actions)[:-1], {"final_obs": self.finals}


def test_final_observation_survives_the_reset_after_it():
    batch = EnvironmentBatch(ReusingFinals(), [0, 1], [0, 1])
    batch.reset()
    steps = [batch.step(np.zeros(2, np.int64)) for _ in range(2)]
    assert [step.final_observations for step in steps] == [[(0, [1])], [(0, [2])]]
