"""Contents of rollouts: observations, actions, log-probabilities, values, episodes and infos; acting ahead."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from lightning_rl.data.collector import Collector
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.environments.contract import derive_seed
from lightning_rl.policies import values
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.interface import PolicyOutput
from lightning_rl.validation import ConfigurationError
from tests.probes import Told, collect, make_batch, make_collector, seeds_of, step_timeout

IMAGES = spaces.Box(0, 255, (9, 9, 3), np.uint8)


def make_policy(environments, dtype=torch.float32, **options):
    torch.manual_seed(0)
    spaces_ = environments.single_observation_space, environments.single_action_space
    return ActorCritic(*spaces_, **{"hidden_sizes": (32,)} | options).to(dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("start", [0, None])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_log_probs_and_values_equal_a_new_evaluation_of_each_step(mode, start, shared, dtype, bound):
    """Shared encoders compute them while acting, separate encoders at the end of the rollout."""
    environments = make_batch("Probe/Counter-v0", 3, mode=mode, start=start, lengths=(7, 4), ends=("truncated", "both"))
    policy = make_policy(environments, dtype, shared_encoder=shared)
    assert (policy.act(torch.zeros(1, 2, dtype=dtype)).log_prob is not None) == shared
    rollout = make_collector(environments, 25, dtype).collect(policy)
    assert rollout.observations.dtype == rollout.log_probs.dtype == rollout.rewards.dtype == dtype
    with torch.no_grad():
        ratios = (policy.log_prob(rollout.observations[:-1], rollout.actions) - rollout.log_probs).exp()
        values = policy.value(rollout.observations)
    assert (ratios - 1).abs().max() <= bound
    torch.testing.assert_close(rollout.values, values[:-1], rtol=10 * bound, atol=10 * bound)
    expected = values[1:].clone()
    expected[rollout.final_indices[:, 0], rollout.final_indices[:, 1]] = policy.value(
        rollout.final_observations
    ).detach()
    expected[rollout.terminated] = 0
    torch.testing.assert_close(rollout.next_values, expected, rtol=10 * bound, atol=10 * bound)


def test_log_probs_and_values_of_images_equal_a_new_evaluation_of_each_step():
    environments = make_batch("Probe/Space-v0", 2, observation_space=IMAGES)
    policy = make_policy(environments)
    rollout = make_collector(environments, 12).collect(policy)
    assert rollout.observations.dtype == torch.uint8
    with torch.no_grad():
        ratios = (policy.log_prob(rollout.observations[:-1], rollout.actions) - rollout.log_probs).exp()
    assert (ratios - 1).abs().max() <= 1e-6


def test_actions_only_depend_on_the_given_generator():
    rollouts = []
    for disturb in (False, True):
        environments = make_batch("Probe/Counter-v0", 2)
        policy = make_policy(environments)
        torch.manual_seed(int(disturb))
        rollouts.append(make_collector(environments, 20).collect(policy))
    assert torch.equal(rollouts[0].actions, rollouts[1].actions)
    assert len(rollouts[0].actions.unique()) == 3


def test_policy_acts_on_the_stored_observations_and_rollouts_have_no_gap():
    policy = Told()
    collector = make_collector(make_batch("Probe/Counter-v0", 2, lengths=(4,)), 6)
    first = collector.collect(policy).observations.clone()
    second = collector.collect(policy).observations
    assert torch.equal(torch.stack(policy.seen), torch.cat([first[:-1], second[:-1]]))
    assert torch.equal(first[-1], second[0])
    places = [(t // 4, t % 4) for t in range(13)]
    assert first[:, 1].tolist() == [list(map(float, place)) for place in places[:7]]
    assert second[:, 1].tolist() == [list(map(float, place)) for place in places[6:]]


def test_stored_actions_are_the_actions_of_the_environment():
    by_place = Told(action=lambda o: (o[..., 1] % 3).long())
    rollout = collect("Probe/Counter-v0", 6, by_place, lengths=(6,))
    assert rollout.actions[:, 0].tolist() == [0, 1, 2, 0, 1, 2]


def test_episode_returns_continue_across_rollouts_in_float64():
    environments = make_batch("Probe/Counter-v0", 2, lengths=(7, 3), reward=0.1)
    collector = make_collector(environments, 4)
    episodes = [collector.collect(Told()).episodes for _ in range(5)]
    assert [e.lengths for e in episodes] == [[], [7, 7], [3, 3], [], [7, 7, 3, 3]]
    for e in episodes:
        assert e.returns == pytest.approx([0.1 * length for length in e.lengths], rel=1e-15)  # float32 is off by 1e-8


def test_episode_lengths_count_only_real_steps():
    environments = make_batch("Probe/Counter-v0", 1, mode=AutoresetMode.NEXT_STEP, lengths=(2, 3), reward=1.0)
    rollout = make_collector(environments, 12).collect(Told())
    assert rollout.episodes.lengths == [2, 3, 2] and rollout.episodes.returns == [2.0, 3.0, 2.0]
    assert rollout.num_steps == 12 - 3


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_infos_are_collected_from_steps_but_not_from_resets(backend, mode):
    """Every step and reset has `level`; only the last step of an episode has `score`."""
    environments = make_batch("Probe/Counter-v0", 2, mode=mode, backend=backend, lengths=(2, 1))
    keys = ("level", "score", "only_reset", "absent")
    bogus = 2 if mode is AutoresetMode.NEXT_STEP else 0
    rollout = make_collector(environments, 4 + bogus, info_keys=keys).collect(Told())
    environments.close()
    assert rollout.num_steps == 8
    levels, scores, *others = (rollout.infos[key] for key in keys)
    assert sorted(levels[~levels.isnan()].tolist()) == [1, 1, 2, 2, 11, 11, 21, 21]
    # Each value belongs to its step and environment: the reward is 100 times the episode plus the step.
    episodes, steps = rollout.rewards.double() // 100, rollout.rewards.double() % 100
    valid = torch.ones_like(rollout.dones) if rollout.valid is None else rollout.valid
    for found, expected, rows in ((levels, 10 * episodes + steps, valid), (scores, steps, rollout.dones)):
        torch.testing.assert_close(found, expected.masked_fill(~rows, torch.nan), equal_nan=True)
    assert all(other.isnan().all() and other.shape == rollout.shape for other in others)


def test_infos_of_vectorized_environments_are_collected():
    environments = make_batch("CartPole-v1", 3, backend="envpool")
    rollout = make_collector(environments, 4, info_keys=("elapsed_step",)).collect(Told())
    assert rollout.infos["elapsed_step"].tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3, [4.0] * 3]


def test_infos_must_be_numbers():
    environments = make_batch("Probe/Counter-v0")
    with pytest.raises(
        ConfigurationError, match=r"^info_keys='name' is not valid: info\['name'\] is 'probe', expected"
    ):
        make_collector(environments, 4, info_keys=("name",)).collect(Told())


@pytest.mark.parametrize("rows", [1, 3, 4, 10**6])
def test_values_in_chunks_equal_values_of_the_whole_rollout(monkeypatch, rows):
    monkeypatch.setattr(values, "_MAX_ROWS", rows)
    environments = make_batch("Probe/Counter-v0", 3, lengths=(2,))
    policy = make_policy(environments, torch.float64)
    largest = []
    value = policy.value
    monkeypatch.setattr(policy, "value", lambda o: largest.append(o.shape[:-1].numel()) or value(o))
    rollout = make_collector(environments, 11, torch.float64).collect(policy)
    assert max(largest) <= max(3, rows)
    with torch.no_grad():
        torch.testing.assert_close(rollout.values, value(rollout.observations[:-1]), rtol=1e-14, atol=1e-14)
        finals = value(rollout.final_observations)
    index = rollout.final_indices
    assert len(index) == 15
    torch.testing.assert_close(rollout.next_values[index[:, 0], index[:, 1]], finals, rtol=1e-14, atol=1e-14)


def test_large_observations_are_evaluated_in_small_chunks(monkeypatch):
    monkeypatch.setattr(values, "_MAX_ENTRIES", 1000)  # four images of 243
    environments = make_batch("Probe/Space-v0", 2, observation_space=IMAGES)
    policy = make_policy(environments, shared_encoder=False)
    largest = []
    log_prob = policy.log_prob
    monkeypatch.setattr(policy, "log_prob", lambda o, a: largest.append(a.numel()) or log_prob(o, a))
    make_collector(environments, 9).collect(policy)
    assert largest == [4, 4, 4, 4, 2]


@pytest.mark.parametrize(
    ("space", "dtype"),
    [
        (spaces.Discrete(5), torch.int64),
        (spaces.Box(0, 255, (4,), np.uint8), torch.uint8),
        (spaces.Box(-1, 1, (4,), np.float64), torch.float32),
        (spaces.Box(-1, 1, (2, 2), np.float32), torch.float32),
        (spaces.Box(-1, 1, (), np.float32), torch.float32),
    ],
)
def test_observations_keep_their_shape_and_integers_their_dtype(space, dtype):
    environments = make_batch("Probe/Space-v0", 2, observation_space=space)
    rollout = make_collector(environments, 30).collect(make_policy(environments))
    assert rollout.observations.dtype == dtype and rollout.observations.shape == (31, 2, *space.shape)


def test_rollout_has_policy_version_and_seconds():
    collector = make_collector(make_batch("Probe/Counter-v0"), 3)
    rollout = collector.collect(Told(), policy_version=17)
    assert rollout.policy_version == 17 and 0 < rollout.seconds < 5


def test_rollouts_have_no_gradients():
    environments = make_batch("Probe/Counter-v0", 2, lengths=(2,))
    for shared in (True, False):
        policy = make_policy(environments, shared_encoder=shared)
        with torch.enable_grad():
            rollout = make_collector(environments, 5).collect(policy)
        tensors = [x for x in vars(rollout).values() if isinstance(x, torch.Tensor)]
        assert len(tensors) == 11 and not any(x.requires_grad or x.is_inference() for x in tensors)
        loss = (policy.log_prob(rollout.observations[:-1], rollout.actions) * rollout.next_values).mean()
        loss.backward()  # inference tensors would not be allowed here
        environments.reset()


def test_any_object_with_three_methods_is_a_policy():
    class Uniform:
        def act(self, observations, generator=None, deterministic=False):
            return PolicyOutput(torch.randint(3, observations.shape[:1], generator=generator))

        def log_prob(self, observations, actions):
            return torch.full(actions.shape, -np.log(3.0))

        def value(self, observations):
            return observations.sum(-1)

    rollout = collect("Probe/Counter-v0", 4, Uniform(), 2)
    assert rollout.values.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]


# ---------------------------------------------------------------------------------------------- acting ahead of a half


@pytest.fixture
def acts_ahead(monkeypatch):
    """Always act ahead; return a list of the steps chosen ahead, each with False if the policy raised."""
    monkeypatch.setattr("lightning_rl.data.collector.AHEAD_FROM", 0.0)
    chosen = []
    choose = Collector._choose_ahead

    def count(self, t, *arguments):
        actions = choose(self, t, *arguments)
        chosen.append((t, actions is not None))
        return actions

    monkeypatch.setattr(Collector, "_choose_ahead", count)
    return chosen


def two_rollouts(env_id, backend, num_envs, policy=None, length=7, **options):
    """Return the content of two rollouts and the state after them."""
    environments = make_batch(env_id, num_envs, backend=backend, **options)
    collector = make_collector(environments, length)
    policy = policy or make_policy(environments)
    kept = *(clone(collector.collect(policy).state_dict()) for _ in range(2)), clone(collector.state_dict())
    environments.close()
    return kept


def clone(x):
    """Return a copy as plain values, since the next rollout overwrites this one."""
    if isinstance(x, dict):
        return {key: clone(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [clone(value) for value in x]
    return x.tolist() if isinstance(x, torch.Tensor | np.ndarray) else x


def test_next_rollout_overwrites_only_observations():
    options = {"lengths": (3, 5), "ends": ("terminated", "truncated"), "mode": AutoresetMode.NEXT_STEP}
    environments = make_batch("Probe/Counter-v0", 2, start=None, **options)
    collector, policy = make_collector(environments, 7), make_policy(environments)
    rollout = collector.collect(policy)
    kept = clone(rollout.state_dict())
    assert kept["valid"] is not None
    collector.collect(policy)
    overwritten = {name for name, value in clone(rollout.state_dict()).items() if value != kept[name]}
    environments.close()
    assert overwritten == {"observations"}


@pytest.mark.parametrize("num_envs", [2, 3, 8])
@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("Probe/Random-v0", {}),
        ("Probe/Counter-v0", {"start": None, "lengths": (3, 5), "ends": ("terminated", "truncated", "both")}),
        ("tests.nested_probes:Probe/Sensors-v0", {"lengths": (3, 4)}),
        ("Probe/Counter-v0", {"env": {"reward_scale": 0.5}}),
    ],
)
def test_acting_ahead_gives_bit_identical_rollouts(acts_ahead, env_id, options, num_envs):
    one, other = (two_rollouts(env_id, backend, num_envs, **options) for backend in ("sync", "async"))
    assert one == other
    # The first step of a rollout waits for the policy, which was updated in between.
    assert acts_ahead == [(t, True) for t in range(1, 7)] * 2


@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("Probe/Counter-v0", {"mode": AutoresetMode.NEXT_STEP}),
        ("Probe/Counter-v0", {"mode": AutoresetMode.DISABLED}),
        ("Probe/Counter-v0", {"env": {"previous_action": True}}),
        ("Probe/Counter-v0", {"env": {"wrappers": ["tests.probes.DoubleVectorReward"]}}),
    ],
)
def test_no_acting_ahead_if_observations_depend_on_other_environments(acts_ahead, env_id, options):
    assert two_rollouts(env_id, "async", 2, **options) == two_rollouts(env_id, "sync", 2, **options)
    assert acts_ahead == []


@pytest.mark.parametrize("options", [{"memory": "lstm"}, {"action_distribution": "beta"}])
def test_no_acting_ahead_if_rows_share_memory_or_noise(acts_ahead, options):
    environments = make_batch("Probe/Counter-v0", 2, backend="async", start=None)
    make_collector(environments, 5).collect(make_policy(environments, **options))
    environments.close()
    assert acts_ahead == []


def test_actions_taken_ahead_are_stored_even_if_the_network_mixes_rows(acts_ahead):
    class Together(ActorCritic):
        """The action in each environment depends on all observations."""

        def act(self, observations, generator=None, deterministic=False):
            output = super().act(observations, generator, deterministic)
            output.action = output.action + observations.mean()
            output.environment_action, output.log_prob = output.action, output.action.sum(-1)
            output.value = output.log_prob + 1
            return output

    environments = make_batch("Probe/Echo-v0", 4, backend="async")
    policy = Together(environments.single_observation_space, environments.single_action_space)
    rollout = make_collector(environments, 6).collect(policy)
    environments.close()
    assert len(acts_ahead) == 5
    assert torch.equal(rollout.observations[1:], rollout.actions)
    assert torch.equal(rollout.log_probs, rollout.actions.sum(-1))
    assert torch.equal(rollout.values, rollout.log_probs + 1)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("raise", "raised in step: ArithmeticError: the physics exploded"),
        ("kill", "is gone: its worker process died with exit code -9"),
        ("hang", "gave no answer within env.step_timeout=1 seconds"),
        ("nan observation", "returned observation (entry 1) nan: expected a finite number that float32 can hold"),
    ],
)
@pytest.mark.parametrize("index", [0, 3])
def test_failure_in_a_step_ahead_names_environment_and_step(acts_ahead, index, how, what):
    seed = derive_seed(seeds_of(4)[index], 1)
    options = {"how": how, "at": 3, "episode_seed": seed, "lengths": (5,), "env": {"step_timeout": step_timeout(how)}}
    environments = make_batch("Probe/Failing-v0", 4, backend="async", **options)
    workers = environments.env.processes
    with pytest.raises(EnvironmentFailure) as caught:
        make_collector(environments, 20).collect(make_policy(environments))
    assert str(caught.value) == f"environment {index} (episode 1, seed {seed}, step 3) {what}"
    environments.close()
    assert {t for t, _ in acts_ahead} >= set(range(1, 8)) and not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("index", [0, 3])
def test_worker_lost_in_a_step_ahead_is_replaced(acts_ahead, index):
    """The environment dies in `async` and raises in `sync`; the rollouts are the same."""
    seed = derive_seed(seeds_of(4)[index], 1)
    options = {"at": 3, "episode_seed": seed, "lengths": (5,), "env": {"on_failure": "restart"}}
    one, other = (
        two_rollouts("Probe/Failing-v0", backend, 4, how=how, **options)
        for backend, how in (("sync", "raise"), ("async", "kill"))
    )
    assert one == other and acts_ahead


def test_policy_that_raises_while_acting_ahead_raises_in_the_next_step(acts_ahead):
    class Tired(ActorCritic):
        calls = 0

        def act(self, *args):
            self.calls += 1
            if self.calls > 3:
                raise ArithmeticError("no more")
            return super().act(*args)

    environments = make_batch("Probe/Counter-v0", 2, backend="async")
    with pytest.raises(ArithmeticError, match="no more"):
        make_collector(environments, 9).collect(
            Tired(environments.single_observation_space, environments.single_action_space)
        )
    assert [made for _, made in acts_ahead] == [True, False]
    environments.close()


def test_environments_work_after_an_unfinished_step_ahead(acts_ahead):
    environments = make_batch("Probe/Counter-v0", 2, backend="async")
    environments.reset()
    environments.choose_ahead(lambda count, observations: np.zeros(2, np.int64))
    environments.step(np.zeros(2, np.int64))
    assert environments.env.call("count") == (2, 1)
    environments.close()


def test_policy_acts_ahead_only_if_environments_take_longer(acts_ahead, monkeypatch):
    monkeypatch.setattr("lightning_rl.data.collector.AHEAD_FROM", float("inf"))
    two_rollouts("Probe/Counter-v0", "async", 2)
    assert acts_ahead == []
