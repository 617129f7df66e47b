"""Policies with memory, and what they should compute, written out step by step."""

from typing import Any

import torch
from torch import Tensor

from lightning_rl.nested import map_leaves
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.rollouts.sequences import Sequences
from tests.helpers import DISCRETE, VECTOR

KINDS = ("lstm", "gru", "mingru", "gtrxl")


def make_policy(memory: Any = "lstm", dtype: torch.dtype = torch.float64, **options: Any) -> ActorCritic:
    """An actor-critic of vectors whose heads are wide awake, unlike those of a new policy."""
    torch.manual_seed(0)
    kind = {"kind": memory} if isinstance(memory, str) else memory
    given = None if kind is None else {"hidden_size": 5} | kind
    spaces = options.pop("spaces", (VECTOR, DISCRETE))
    policy = ActorCritic(*spaces, **{"hidden_sizes": (8,), "memory": given} | options)
    with torch.no_grad():
        for parameter in policy.action_head.parameters():
            parameter.mul_(100)
        for name, parameter in policy.named_parameters():
            if "rnn.bias" in name:
                parameter.uniform_(-0.5, 0.5)
    return policy.to(dtype)


def random_episodes(length: int, num_envs: int, seed: int = 0) -> tuple[Tensor, Tensor, Any]:
    """Observations `[T, B, 3]`, starts of episodes `[T, B]`, and a generator to go on with."""
    generator = torch.Generator().manual_seed(seed)
    observations = torch.randn(length, num_envs, 3, generator=generator, dtype=torch.float64)
    return observations, torch.rand(length, num_envs, generator=generator) < 0.2, generator


def random_memory(policy: ActorCritic, batch_size: int, seed: int = 1) -> Any:
    """A memory of some past."""
    generator = torch.Generator().manual_seed(seed)

    def fill(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).mul(0.5).to(x.dtype)

    return map_leaves(fill, policy.initial_memory(batch_size))


def whole(starts: Tensor, memory: Any) -> Sequences:
    """The sequences of all environments `[T, B]`, whose rows are in the order of environments."""
    length, num_envs = starts.shape
    return Sequences(torch.full((num_envs,), length), starts.t().flatten(), memory)


def step_by_step(policy: ActorCritic, observations: Tensor, starts: Tensor, memory: Any) -> tuple[Any, Tensor, list]:
    """Log-probabilities of all choices `[T, B, n]`, values `[T, B]` and the memories before each step, one by one."""
    logits, values, memories = [], [], []
    for observation, begins in zip(observations, starts, strict=True):
        memory = map_leaves(lambda x, b=begins: x * ~b.view(-1, 1, 1), memory)
        memories.append(memory)
        values.append(policy.value(observation, memory))
        encoded = policy.actor_encoder(policy.prepare_observations(observation))
        features, _ = policy.actor_core.step(encoded, memory["actor"])
        logits.append(policy.action_head(features).log_probs)
        memory = policy.act(observation, deterministic=True, memory=memory).memory
    memories.append(memory)
    return torch.stack(logits), torch.stack(values), memories


def check_against_steps(policy: ActorCritic, rollout: Rollout, memory: Any, bound: float) -> list:
    """That a rollout from `memory` has the numbers of the policy going through it step by step; return the memories."""
    assert rollout.starts is not None
    with torch.no_grad():
        logits, values, memories = step_by_step(policy, rollout.observations[:-1], rollout.starts, memory)
        log_probs = logits.gather(-1, rollout.actions.unsqueeze(-1)).squeeze(-1)
        valid = torch.ones(rollout.shape, dtype=torch.bool) if rollout.valid is None else rollout.valid
        assert (log_probs - rollout.log_probs)[valid].abs().max() <= bound
        assert (values - rollout.values)[valid].abs().max() <= 10 * bound
        # Where nothing ends, the next value is that of the next observation, with what is remembered then.
        last = policy.value(rollout.observations[-1], memories[-1])
        expected = torch.cat([values[1:], last.unsqueeze(0)])
        for (t, index), final in zip(rollout.final_indices.tolist(), rollout.final_observations, strict=True):
            # Before a reset: as if the step after it were not an episode's first.
            after = policy.act(rollout.observations[t], deterministic=True, memory=memories[t]).memory
            expected[t, index] = policy.value(final.expand(valid.shape[1], -1), after)[index]
        expected[rollout.terminated] = 0
        assert (expected - rollout.next_values)[valid].abs().max() <= 10 * bound
    return memories
