"""Every backend and every family of environments fulfills one contract."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from lightning_rl.environments import EnvironmentSpec, make_environments
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.validation import ConfigurationError
from tests.helpers import needs_box2d
from tests.probes import Told, collect, make_batch, make_collector

MINIGRID = {"env": {"wrappers": ["minigrid.wrappers.ImgObsWrapper"]}}
BLACKJACK = {"env": {"wrappers": [{"class_path": "gymnasium.wrappers.FlattenObservation"}]}}
DOUBLE = {"class_path": "tests.probes.DoubleReward", "init_args": {}}
DOUBLE_VECTOR = {"class_path": "tests.probes.DoubleVectorReward", "init_args": {}}


@pytest.mark.parametrize(
    ("env_id", "backend", "options"),
    [
        ("CartPole-v1", "sync", {}),
        ("CartPole-v1", "async", {}),
        ("CartPole-v1", "native", {}),
        ("CartPole-v1", "envpool", {}),
        ("ALE/Pong-v5", "sync", {}),
        ("ALE/Pong-v5", "async", {}),
        ("ALE/Pong-v5", "native", {}),
        ("ALE/Pong-v5", "envpool", {}),
        ("Pong-v5", "envpool", {}),
        ("PongNoFrameskip-v4", "sync", {}),
        ("HalfCheetah-v5", "sync", {}),
        ("HalfCheetah-v4", "envpool", {}),
        ("Pendulum-v1", "envpool", {}),
        pytest.param("LunarLander-v3", "sync", {}, marks=needs_box2d),
        pytest.param("LunarLander-v3", "sync", {"continuous": True}, marks=needs_box2d),
        ("MiniGrid-Empty-5x5-v0", "sync", MINIGRID),
        ("Blackjack-v1", "sync", BLACKJACK),
        ("FrozenLake-v1", "sync", {}),
        ("FrozenLake-v1", "envpool", {}),
    ],
)
def test_one_rollout_of_every_family_and_backend(env_id, backend, options):
    environments = make_batch(env_id, 2, backend=backend, **options)
    torch.manual_seed(0)
    policy = ActorCritic(environments.single_observation_space, environments.single_action_space)
    rollout = make_collector(environments, 8).collect(policy)
    space = environments.single_observation_space
    assert rollout.shape == (8, 2) and 8 <= rollout.num_steps <= 16
    assert rollout.observations.shape == (9, 2, *space.shape)
    assert len(torch.unique(rollout.observations.reshape(18, -1).double(), dim=0)) > 1
    for x in (rollout.rewards, rollout.log_probs, rollout.values, rollout.next_values):
        assert x.shape == (8, 2) and x.dtype == torch.float32 and torch.isfinite(x).all()
    # The importance ratio is 1 before the update, wherever the log-probabilities were computed.
    batch = rollout.flatten()
    with torch.no_grad():
        ratios = (policy.log_prob(batch.observations, batch.actions) - batch.log_probs).exp()
    assert (ratios - 1).abs().max() <= 1e-6
    environments.close()
    environments.close()  # may be called twice


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_worker_processes_give_the_same_rollout_in_every_mode(mode, backend):
    policy = Told(lambda o: o[..., 0] * 100 + o[..., 1])
    options = {"lengths": (3, 5), "ends": ("truncated", "terminated"), "mode": mode}
    one = collect("Probe/Counter-v0", 12, policy, 3, **options)
    other = collect("Probe/Counter-v0", 12, policy, 3, backend=backend, **options)
    for name in ("observations", "rewards", "terminated", "truncated", "values", "next_values", "final_indices"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.valid is None) == (other.valid is None) == (mode is not AutoresetMode.NEXT_STEP)


def test_native_and_envpool_keep_their_own_autoreset_mode():
    modes = {
        ("CartPole-v1", "native"): AutoresetMode.NEXT_STEP,
        ("CartPole-v1", "envpool"): AutoresetMode.NEXT_STEP,
        ("ALE/Pong-v5", "native"): AutoresetMode.SAME_STEP,
        ("CartPole-v1", "sync"): AutoresetMode.SAME_STEP,
    }
    for (env_id, backend), mode in modes.items():
        environments = make_batch(env_id, backend=backend)
        assert environments.mode is mode
        environments.close()


def test_discrete_actions_are_stored_from_zero_and_shifted_for_the_environment():
    environments = make_batch("Probe/Counter-v0", 2, start=5)  # the probe rejects actions outside of its space
    torch.manual_seed(0)
    policy = ActorCritic(environments.single_observation_space, environments.single_action_space)
    rollout = make_collector(environments, 30).collect(policy)
    assert set(rollout.actions.unique().tolist()) == {0, 1, 2}


def test_continuous_actions_are_clipped_for_the_environment_and_stored_as_drawn():
    environments = make_batch("Probe/Counter-v0", 2, start=None)
    torch.manual_seed(0)
    spaces_ = environments.single_observation_space, environments.single_action_space
    rollout = make_collector(environments, 30).collect(ActorCritic(*spaces_, initial_log_std=1.0))
    assert rollout.actions.shape == (30, 2, 2) and rollout.actions.abs().max() > 1


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_single_and_vector_wrappers_are_both_applied(backend):
    options = {"backend": backend, "lengths": (9,), "reward": 1.0}
    for wrappers, reward in (
        ([], 1),
        ([DOUBLE], 2),
        ([DOUBLE_VECTOR], 2),
        ([DOUBLE, DOUBLE, DOUBLE_VECTOR], 8),
    ):
        rollout = collect("Probe/Counter-v0", 4, Told(), env={"wrappers": wrappers}, **options)
        assert rollout.rewards[0, 0] == reward


@pytest.mark.parametrize("backend", ["native", "envpool"])
def test_vectorized_backends_accept_only_vector_wrappers(backend):
    rollout = collect("CartPole-v1", 4, Told(), backend=backend, env={"wrappers": [DOUBLE_VECTOR]})
    assert rollout.rewards.tolist() == [[2.0]] * 4
    message = r"^env.wrappers=\['tests.probes.DoubleReward'\] is not valid: expected gymnasium.vector.VectorW"
    with pytest.raises(ConfigurationError, match=message):
        make_batch("CartPole-v1", backend=backend, env={"wrappers": [DOUBLE]})


def test_time_limit_reaches_the_environment():
    rollout = collect("CartPole-v1", 9, Told(), env={"max_episode_steps": 3})
    assert rollout.truncated[:, 0].tolist() == [False, False, True] * 3


@needs_box2d
def test_arguments_of_the_environment_change_its_spaces():
    environments = make_batch("LunarLander-v3", continuous=True)
    assert isinstance(environments.single_action_space, spaces.Box)


@pytest.mark.filterwarnings("ignore:.*missing AutoresetMode metadata")
def test_vector_environment_without_autoreset_mode_is_an_error():
    class Silent(gymnasium.vector.VectorEnv):
        metadata = {}  # noqa: RUF012
        num_envs = 1
        single_observation_space = observation_space = spaces.Box(0, 1, (1,))
        single_action_space = action_space = spaces.Discrete(2)

        def __init__(self, num_envs=1):
            pass

    gymnasium.register("Probe/Silent-v0", vector_entry_point=Silent)
    try:
        with pytest.raises(
            ConfigurationError, match=r"metadata\['autoreset_mode'\]=None: expected one of \['NextStep'"
        ):
            make_environments(EnvironmentSpec("Probe/Silent-v0", backend="native"), 1, [0])
    finally:
        del gymnasium.registry["Probe/Silent-v0"]


def test_envpool_rollouts_are_float32():
    environments = make_batch("HalfCheetah-v4", backend="envpool")
    assert environments.reset().dtype == np.float64
    rollout = make_collector(environments, 3).collect(
        ActorCritic(environments.single_observation_space, environments.single_action_space)
    )
    assert rollout.observations.dtype == torch.float32
