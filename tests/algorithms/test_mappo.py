"""MAPPO: actors get their own observations, the critic gets the state, and agents may leave early."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lightning_rl import MAPPO, PPO
from lightning_rl.environments.pettingzoo import ParallelEnvVector
from lightning_rl.masks import ActionMask
from lightning_rl.nested import without
from lightning_rl.policies.actor_critic import PolicyConfig
from lightning_rl.policies.networks.images import ImpalaEncoder
from lightning_rl.spaces import sampled_observations
from lightning_rl.tools.export import DeployedPolicy, export_program
from lightning_rl.validation import ConfigurationError
from tests.environments.test_pettingzoo import BOX, RELAY
from tests.helpers import Recorder, make_data, make_trainer, merged, parameters_of

SPACE = spaces.Dict(
    {
        "observation": spaces.Box(-1, 1, (3,), np.float32),
        "agent": spaces.Discrete(2),
        "state": spaces.Box(-1, 1, (6,), np.float32),
        "action_mask": ActionMask(4),
    }
)
FOUR = spaces.Discrete(4)
SMALL = {"policy": {"hidden_sizes": (16,)}, "num_epochs": 2}


def make_mappo(space=SPACE, actions=FOUR, **options):
    torch.manual_seed(0)
    return MAPPO(space, actions, **merged(SMALL, options))


def relay(**options):
    kwargs = {"state": "joint", "lives": (2, 4), "sizes": (2, 3), "choices": (2, 4)}
    return make_data(**RELAY, **{"num_envs": 4, "rollout_length": 6, "env": {"kwargs": kwargs}} | options)


def observed(space=SPACE, num_rows=6):
    rows = sampled_observations(space, torch.float32, num_rows, seed=1)
    return rows | {"agent": torch.arange(num_rows) % 2}


class Match:
    """Each agent sees a bit; it gets 1 if one agent takes its bit and the other one the opposite of its bit."""

    def __init__(self):
        self.possible_agents = ["zero", "one"]
        self.agents = []

    def observation_space(self, agent):
        return spaces.Box(0, 1, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.random = np.random.default_rng(seed)
        self.agents, self.steps = list(self.possible_agents), 0
        return self.see(), {agent: {} for agent in self.agents}

    def see(self):
        self.bits = self.random.integers(2, size=2)
        return {agent: np.eye(2, dtype=np.float32)[bit] for agent, bit in zip(self.agents, self.bits, strict=True)}

    def step(self, actions):
        self.steps += 1
        right = actions["zero"] == self.bits[0] and actions["one"] == 1 - self.bits[1]
        rewards = dict.fromkeys(self.agents, float(right))
        observations, over = self.see(), dict.fromkeys(self.agents, self.steps == 8)
        never = dict.fromkeys(self.agents, False)
        infos: dict = {agent: {} for agent in self.agents}
        self.agents = [] if self.steps == 8 else self.agents
        return observations, rewards, never, over, infos

    def close(self):
        pass


gymnasium.register(
    "Probe/Match-v0", vector_entry_point=lambda num_envs, **kwargs: ParallelEnvVector(Match, num_envs, **kwargs)
)


@pytest.mark.parametrize("share_policy", [True, False])
@pytest.mark.parametrize("observe", [True, False])
def test_critic_sees_the_state_and_the_actor_does_not(share_policy, observe):
    policy = make_mappo(share_policy=share_policy, normalization={"observations": observe}).policy
    rows = observed()
    other = rows | {"state": -rows["state"]}
    (one, value), (two, other_value) = policy(rows), policy(other)
    assert torch.equal(one.logits, two.logits) and (value - other_value).abs().max() > 1e-3
    assert torch.equal(policy.act(without(rows, ["state"]), deterministic=True).action, one.mode())


@pytest.mark.parametrize("share_policy", [True, False])
@pytest.mark.parametrize("observe", [{"images": True}, False])
@pytest.mark.parametrize("network", ["auto", "impala", {"state": "impala"}])
def test_state_that_is_an_image_has_the_network_of_images(share_policy, observe, network):
    space = spaces.Dict({**SPACE.spaces, "state": spaces.Box(0, 255, (8, 8, 3), np.uint8)})
    options = {"policy": {"network": network}, "normalization": {"observations": observe}}
    policy = make_mappo(space, share_policy=share_policy, **options).policy
    encoder = policy.critic_encoder if share_policy else policy.critic_encoder.encoders[1]
    assert isinstance(encoder.encoders[":state"], ImpalaEncoder)
    assert policy(observed(space))[1].shape == (6,)


def test_agents_of_a_shared_policy_are_told_apart():
    policy = make_mappo().policy
    rows = observed(num_rows=2)
    logits, values = policy(rows)[0].logits, policy(rows)[1]
    assert not torch.allclose(logits[0], logits[1]) and not torch.allclose(values[0], values[1])


def test_separate_policies_take_no_masked_choice_of_a_part():
    actions = spaces.Dict({"move": spaces.Discrete(4), "gift": spaces.Discrete(2)})
    space = spaces.Dict({**SPACE, "action_mask": spaces.Dict({"move": ActionMask(4)})})
    rows = observed(space, 40)
    rows["action_mask"] = {"move": torch.tensor([[False, True, False, False]]).expand(40, 4)}
    taken = make_mappo(space, actions, share_policy=False).policy.act(rows).action
    assert taken["move"].tolist() == [1] * 40 and {*taken["gift"].tolist()} == {0, 1}


@pytest.mark.parametrize("actions", [spaces.Discrete(4), BOX], ids=["discrete", "continuous"])
def test_agents_with_separate_policies_share_no_parameter(actions):
    """Parameters with a gradient of one agent's loss do not change the outputs of the other one."""
    space = SPACE if actions != BOX else without(SPACE, ["action_mask"])
    policy, rows = make_mappo(space, actions, share_policy=False).policy, observed(space)
    of_one = rows["agent"] == 1
    with torch.no_grad():
        taken = policy.act(rows).action

    def outputs():
        distribution, values = policy(rows)
        return torch.stack([distribution.log_prob(taken), distribution.entropy(), values])

    before = outputs()
    before[:, of_one].sum().backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.grad is not None:
                parameter.add_((parameter.grad != 0) * torch.randn_like(parameter))
    after = outputs()
    assert torch.equal(after[:, ~of_one], before[:, ~of_one])
    assert (after[:, of_one] - before[:, of_one]).abs().min() > 1e-4


def test_separate_critics_are_initialized_as_a_single_one():
    weights = (
        make_mappo(SPACE, spaces.Discrete(4), share_policy=False).policy.value_head.weight[0].unflatten(0, (2, -1))
    )
    torch.testing.assert_close(weights[:, :-1].norm(dim=1), torch.ones(2))
    assert weights[:, -1].tolist() == [0, 0]  # the biases


@pytest.mark.parametrize("share_policy", [True, False])
def test_agents_that_differ_and_leave_early_are_trained_on_their_own_steps(share_policy):
    data = relay(rollouts_per_epoch=3, evaluation={"episodes": 4, "num_envs": 2})
    model = make_mappo(data.observation_space, data.action_space, share_policy=share_policy)
    before, rollouts = parameters_of(model), []
    model.on_train_batch_start = lambda rollout, _: rollouts.append(rollout)
    make_trainer(limit_val_batches=1.0).fit(model, data)
    assert model.env_steps == 2 * (4 * 6 + 4)  # two copies; four episodes and two steps of both agents
    changed = {name for name, x in parameters_of(model).items() if not torch.equal(x, before[name])}
    assert {name for name, x in model.named_parameters() if x.requires_grad} <= changed
    batch = model.estimator.batch(rollouts[2])
    agent, state, actions = batch.observations["agent"], batch.observations["state"], batch.actions
    # Steps 0 and 1, or 0 to 3, of an episode, and steps 0 and 1 of the next one.
    assert [int((agent == i).sum()) for i in (0, 1)] == [8, 12]
    assert actions[agent == 0].max() < 2 <= actions[agent == 1].max()
    has_left = state[:, 4] > 2
    assert (agent[has_left] == 1).all() and (state[has_left, 0] == 0).all() and (state[~has_left, 0] > 0).all()


def test_separate_policies_tell_agents_apart_by_the_newest_of_stacked_frames():
    kwargs = {"state": "joint", "lives": (2, 4), "sizes": (2, 3), "choices": (2, 4)}
    data = relay(env={"kwargs": kwargs, "frame_stack": 2})
    model = make_mappo(data.observation_space, data.action_space, share_policy=False)
    rows = sampled_observations(data.observation_space, torch.float32, 4, seed=1)
    rows["agent"] = torch.tensor([[0, 1], [1, 1], [1, 0], [0, 0]])
    features = model.policy.actor_encoder(rows).unflatten(-1, (2, -1))
    assert (features[..., -1] == torch.tensor([[0, 1], [0, 1], [1, 0], [1, 0]])).all()
    make_trainer().fit(model, data)
    assert model.env_steps > 0


@pytest.mark.parametrize("share_policy", [True, False])
def test_components_that_an_agent_lacks_are_not_learned_from(share_policy):
    """Loss, entropy, KL and gradients are equal to a computation agent by agent, over the agent's own components."""
    choices = (BOX, spaces.Box(-1, 1, (1,), np.float32))
    kwargs = {"state": "joint", "lives": (2, 4), "choices": choices}
    data = relay(env={"kwargs": kwargs}, rollouts_per_epoch=2, evaluation={"episodes": 2, "num_envs": 2})
    options = {"share_policy": share_policy, "entropy_coef": 0.1, "policy": {"initial_log_std": 1.0}}
    model, recorder = make_mappo(data.observation_space, data.action_space, **options), Recorder()
    model.on_train_batch_start = lambda rollout, _: setattr(model, "rollout", rollout)
    make_trainer(precision="64-true", callbacks=[recorder]).fit(model, data)
    batch = model.estimator.batch(model.rollout)
    agent, actions = batch.observations["agent"], batch.actions
    is_narrow = agent == 1
    assert (actions[is_narrow, 1] == 0).all() and (actions[~is_narrow] != 0).all()
    owned = torch.cat([actions[~is_narrow].flatten(), actions[is_narrow, 0]])
    assert 0.1 < recorder.rows[-1]["action_saturation"] == pytest.approx((owned.abs() > 1).double().mean().item())

    loss, (distribution, _) = model.loss(batch), model.policy(batch.observations)
    advantages = model.estimator.normalized(batch)
    old = {name: x + 0.1 for name, x in distribution.parameters().items()}
    divergence = distribution.with_parameters(old).kl(distribution)
    policy_loss, entropy = 0.0, 0.0
    for rows, count in ((~is_narrow, 2), (is_narrow, 1)):
        mean, log_std = (x[rows, :count] for x in distribution.parameters().values())
        own = torch.distributions.Normal(mean, log_std.exp())
        ratio = (own.log_prob(actions[rows, :count]).sum(1) - batch.log_probs[rows]).exp()
        gains = ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows]
        policy_loss = policy_loss - torch.minimum(*gains).sum() / len(agent)
        entropy = entropy + own.entropy().sum() / len(agent)
        of_old = torch.distributions.Normal(mean + 0.1, (log_std + 0.1).exp())
        expected = torch.distributions.kl_divergence(of_old, own).sum(1)
        torch.testing.assert_close(divergence[rows], expected)
    torch.testing.assert_close(loss.metrics["policy_loss"], policy_loss.detach())
    torch.testing.assert_close(loss.metrics["entropy"], entropy.detach())
    parameters = [*model.policy.actor_encoder.parameters(), *model.policy.action_head.parameters()]
    pairs = (torch.autograd.grad(x, parameters) for x in (sum(loss.terms[:2]), policy_loss - 0.1 * entropy))
    for found, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("share_policy", [True, False])
def test_two_agents_learn_to_act_together(share_policy):
    options = {"backend": "native", "num_envs": 32, "rollout_length": 16, "rollouts_per_epoch": 12}
    fast = {"learning_rate": 1e-2, "num_epochs": 8}
    evaluation = {"episodes": 4, "num_envs": 4}
    data = make_data("Probe/Match-v0", **options, env={"kwargs": {"state": "joint"}}, evaluation=evaluation)
    model = make_mappo(data.observation_space, data.action_space, share_policy=share_policy, **fast)
    trainer = make_trainer(limit_val_batches=1.0)
    trainer.fit(model, data)
    assert trainer.callback_metrics["val/episode_return"] == 8


def test_exported_actor_needs_no_state():
    model = make_mappo(share_policy=False, normalization={"observations": True})
    program = export_program(DeployedPolicy(model.policy, model.observation_space, model.action_space)).module()
    rows = without(observed(), ["state"])
    assert torch.equal(program(rows), model.policy.act(rows, deterministic=True).action)


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        (
            SPACE["observation"],
            {},
            r"observation_space=Box.* a Dict with agent and state, as from data",
        ),
        (SPACE, {"share_policy": False, "policy": {"memory": "gru"}}, r"policy.memory='gru' .* None with share_policy"),
        (SPACE, {"share_policy": 1}, r"share_policy=1 is not valid"),
        (SPACE, {"policy": PolicyConfig(hidden_sizes=(8,))}, r"policy.critic_only=None .* must not get the state"),
        (
            SPACE,
            {"share_policy": False, "policy": {"critic_only": ["state", "agent"]}},
            r"policy.critic_only=\['state', 'agent'\] .* needs the part agent",
        ),
    ],
)
def test_invalid_options_are_errors(space, options, message):
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        make_mappo(space, **options)


def test_loss_is_that_of_ppo():
    assert MAPPO.loss is PPO.loss and MAPPO.update is PPO.update
