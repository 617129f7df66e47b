"""Contract 9: whole episodes, exactly as many as asked, assigned beforehand."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lightning_rl.data.evaluation import run_episodes
from lightning_rl.environments import EnvironmentBatch, EnvironmentFailure
from lightning_rl.environments.contract import derive_seed
from lightning_rl.environments.episodes import SeededEpisodes
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.recurrent import MemoryOptions
from tests.environments.test_atari_lives import whole_game
from tests.probes import Counter, Told, make_batch, seeds_of


def run(environments, counts, policy=None, **options):
    try:
        return run_episodes(environments, policy or Told(), counts, torch.Generator().manual_seed(0), **options)
    finally:
        environments.close()


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("counts", [[3, 2], [1, 5], [0, 4], [2, 0]])
def test_every_environment_plays_its_number_of_whole_episodes(counts, mode):
    episodes = run(make_batch("Probe/Counter-v0", 2, mode=mode, lengths=(4, 1, 6)), counts)
    lengths = [(4, 1, 6)[episode % 3] for count in counts for episode in range(count)]
    assert [episode.length for episode in episodes] == lengths
    returns = [sum(100 * e + s for s in range(1, (4, 1, 6)[e % 3] + 1)) for count in counts for e in range(count)]
    assert [episode.episode_return for episode in episodes] == returns
    assert not any(episode.terminated for episode in episodes)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_episodes_have_the_numbers_of_info_at_each_step(mode):
    environments = make_batch("Probe/Counter-v0", 2, mode=mode, lengths=(4, 1))
    episodes = run(environments, [2, 1], info_keys=["level", "score", "nowhere"])
    assert [episode.infos["level"].tolist() for episode in episodes] == [[1, 2, 3, 4], [11], [1, 2, 3, 4]]
    np.testing.assert_equal(episodes[0].infos["score"], [np.nan, np.nan, np.nan, 4])
    assert all(np.isnan(episode.infos["nowhere"]).all() for episode in episodes)


def test_short_episodes_are_not_favored():
    """Lengths are random: taking the first episodes that end would prefer short ones."""
    counts = [3, 3, 2, 2, 2, 2, 2, 2]
    together = run(make_batch("Probe/Random-v0", 8), counts)
    alone = []
    for index, count in enumerate(counts):
        only_this = [count if i == index else 0 for i in range(8)]
        alone += run(make_batch("Probe/Random-v0", 8), only_this)
    assert [(e.length, e.episode_return) for e in together] == [(e.length, e.episode_return) for e in alone]
    lengths = [episode.length for episode in together]
    # The same number of episodes, taken as they end, is shorter.
    ends = []
    for index in range(8):
        episodes = run(make_batch("Probe/Random-v0", 8), [20 if i == index else 0 for i in range(8)])
        ends += [(end, e.length) for end, e in zip(np.cumsum([e.length for e in episodes]), episodes, strict=True)]
    first_to_end = [length for _, length in sorted(ends)[: len(lengths)]]
    assert np.mean(first_to_end) < np.mean(lengths)


@pytest.mark.parametrize("length", [5, 6])
def test_long_evaluation_episode_causes_a_warning(length, monkeypatch, recwarn):
    monkeypatch.setattr("lightning_rl.data.evaluation._STEPS_BEFORE_HINT", 5)
    run(make_batch("Probe/Counter-v0", lengths=(length,)), [1])
    messages = [str(warning.message) for warning in recwarn]
    hint = "no evaluation episode has ended in 5 steps: if episodes may never end, env.max_episode_steps truncates them"
    assert messages == [hint] * (length > 5)


def test_long_evaluation_episode_beside_further_episodes_of_other_environments_causes_a_warning(monkeypatch):
    monkeypatch.setattr("lightning_rl.data.evaluation._STEPS_BEFORE_HINT", 5)
    each = [lambda n=n: SeededEpisodes(Counter(lengths=(n,))) for n in (7, 1)]
    vector = SyncVectorEnv(each, autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.warns(UserWarning, match="no evaluation episode has ended in 5 steps"):
        run(EnvironmentBatch(vector, [1, 2], [1, 2]), [1, 1])


def test_no_episodes_means_no_reset():
    class Untouchable:
        num_envs = 2
        single_observation_space = single_action_space = gymnasium.spaces.Discrete(2)

        def reset(self):
            raise AssertionError

    assert run_episodes(Untouchable(), Told(), [0, 0], torch.Generator()) == []


@pytest.mark.parametrize("mode", AutoresetMode)
def test_recorded_episode_has_every_observation_action_and_reward(mode):
    by_place = Told(action=lambda o: (o[..., 1] % 3).long())
    environments = make_batch(
        "Probe/Counter-v0", 2, mode=mode, lengths=(3, 2), ends=("terminated", "truncated"), start=7
    )
    episodes = run(environments, [2, 1], by_place, record=True)
    first, second, other = episodes
    assert first.observations.tolist() == other.observations.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert second.observations.tolist() == [[1, 0], [1, 1], [1, 2]]
    assert first.actions.tolist() == [7, 8, 9] and second.actions.tolist() == [7, 8]
    assert first.rewards.tolist() == [1, 2, 3] and second.rewards.tolist() == [101, 102]
    assert [e.terminated for e in episodes] == [True, False, True]
    assert first.episode_return == 6.0 and first.length == 3
    assert repr(second) == "Episode(episode_return=203, length=2, terminated=False)"


def test_nothing_is_recorded_unless_asked():
    episode = run(make_batch("Probe/Counter-v0"), [1])[0]
    assert episode.observations is episode.actions is episode.rewards is None


def test_deterministic_evaluation_takes_the_mode():
    environments = make_batch("Probe/Counter-v0", lengths=(60,))
    torch.manual_seed(0)
    policy = ActorCritic(environments.single_observation_space, environments.single_action_space)
    actions = {
        deterministic: run(
            make_batch("Probe/Counter-v0", lengths=(60,)), [1], policy, record=True, deterministic=deterministic
        )[0].actions
        for deterministic in (True, False)
    }
    with torch.no_grad():
        places = torch.tensor([[0.0, step] for step in range(60)])
        modes = policy.act(places, deterministic=True).action
    assert actions[True].tolist() == modes.tolist()
    assert len(set(actions[False].tolist())) == 3


class Remembers(Told):
    """A recurrent policy whose state is the number of steps."""

    memory = MemoryOptions("gru")

    def initial_memory(self, batch_size, critic=True):
        return torch.zeros(batch_size, 1)

    def act(self, observations, generator=None, deterministic=False, memory=None):
        self.remembered.append(memory.flatten().tolist())
        output = super().act(observations, generator, deterministic)
        output.memory = memory + 1
        return output


def test_recurrent_state_is_reset_with_each_life_and_each_episode():
    """As in training, where each life is an episode."""
    games = [((0, 3), (0, 2), (0, 2), (0, 2), (0, 0)), ((0, 3), (0, 3), (0, 3), (0, 3), (0, 0))]
    vector = SyncVectorEnv(
        [lambda g=g: SeededEpisodes(whole_game(*g)) for g in games], autoreset_mode=AutoresetMode.SAME_STEP
    )
    environments, policy = EnvironmentBatch(vector, [1, 2], [1, 2]), Remembers(action=lambda o: o[..., 0].long() * 0)
    policy.remembered = []
    first, second = run_episodes(environments, policy, [1, 1], torch.Generator())
    assert (first.length, second.length) == (4, 5)  # the no-op after a lost life is no step
    assert policy.remembered == [[0, 0], [1, 1], [0, 2], [1, 3], [0, 4]]


def test_return_is_summed_in_float64():
    episode = run(make_batch("Probe/Counter-v0", lengths=(1000,), reward=0.1), [1])[0]
    assert episode.episode_return == pytest.approx(100, rel=1e-13)


def test_float64_policy_is_given_float64_observations():
    policy = Told()
    run(make_batch("Probe/Random-v0"), [1], policy, dtype=torch.float64)
    assert {x.dtype for x in policy.seen} == {torch.float64}


def test_failure_in_evaluation_names_the_environment():
    seed = derive_seed(seeds_of(3)[1], 2)
    environments = make_batch("Probe/Failing-v0", 3, how="nan reward", at=2, episode_seed=seed)
    with pytest.raises(
        EnvironmentFailure, match=rf"^environment 1 \(episode 2, seed {seed}, step 2\) returned reward nan"
    ):
        run(environments, [3, 3, 3])
