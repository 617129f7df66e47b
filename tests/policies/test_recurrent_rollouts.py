"""Rollouts of a policy with memory: states of each step, and training sequences."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from lightning_rl.environments.contract import derive_seed
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.rollouts.rollout import Rollout
from tests.helpers import merged
from tests.memory_probes import KINDS, check_against_steps, make_policy, step_by_step
from tests.probes import make_batch, make_collector, seeds_of

ENDS = {"lengths": (7, 4, 2), "ends": ("truncated", "both", "terminated")}
PLACES = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def counting_policy(memory: Any = "lstm", **options: Any) -> ActorCritic:
    return make_policy(memory, spaces=(PLACES, spaces.Discrete(3)), **options)


def collect_two(policy: ActorCritic, length: int, environments: Any) -> list[Rollout]:
    """Return two consecutive rollouts, with a copy of the first, whose memory is reused."""
    collector = make_collector(environments, length, torch.float64)
    first = collector.collect(policy)
    kept = Rollout(**first.state_dict())
    second = collector.collect(policy)
    environments.close()
    return [kept, second]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_rollout_stores_states_log_probs_and_values_of_every_step(mode, kind, shared):
    policy = counting_policy(kind, shared_encoder=shared)
    rollouts = collect_two(policy, 11, make_batch("Probe/Counter-v0", 3, mode=mode, **ENDS))
    memory = policy.initial_memory(3)
    for rollout in rollouts:
        assert all(map(torch.equal, leaves(map_leaves(lambda x: x[0], rollout.memory)), leaves(memory)))
        memory = check_against_steps(policy, rollout, memory, 1e-12)[-1]
        begins = rollout.dones[-1] if rollout.valid is None else rollout.dones[-1] | ~rollout.valid[-1]
        memory = map_leaves(lambda x, b=begins: x * ~b.view(-1, 1, 1), memory)
    assert any(x.any() for x in leaves(memory))  # an episode continued


def test_rollout_stores_episode_starts():
    environments = make_batch("Probe/Counter-v0", 2, lengths=(4,))
    for policy in (counting_policy(None), counting_policy()):
        first, second = collect_two(policy, 6, environments)
        environments = make_batch("Probe/Counter-v0", 2, lengths=(4,))
        assert first.starts[:, 1].tolist() == [True, False, False, False, True, False]
        assert second.starts[:, 0].tolist() == [False, False, True, False, False, False]


def test_replaced_environment_begins_with_zero_memory():
    """The environment fails in the third step of its second episode, whose value is from before the reset."""
    seed = derive_seed(seeds_of(2)[1], 1)
    options = {"how": "raise", "episode_seed": seed, "at": 3, "lengths": (5,), "env": {"on_failure": "restart"}}
    policy = counting_policy()
    (rollout, _) = collect_two(policy, 16, make_batch("Probe/Failing-v0", 2, **options))
    t = 5 + 2
    assert not rollout.valid[t, 1] and rollout.truncated[t - 1, 1] and rollout.starts[t + 1, 1]
    assert [t - 1, 1] in rollout.final_indices.tolist()
    check_against_steps(policy, rollout, policy.initial_memory(2), 1e-12)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_failure_after_an_episode_end_keeps_the_final_value(end):
    """The environment fails in the first step of its second episode, within a rollout and at its start."""
    seed = derive_seed(seeds_of(1)[0], 1)
    options = {"how": "raise", "episode_seed": seed, "at": 1, "lengths": (5,), "ends": (end,)}
    for length in (5, 8):
        policy = counting_policy()
        environments = make_batch("Probe/Failing-v0", **merged({"env": {"on_failure": "restart"}}, options))
        rollouts = collect_two(policy, length, environments)
        t = 5 % length
        failed = rollouts[0 if length > 5 else 1]
        assert not failed.valid[t, 0] and failed.starts[t + 1, 0]
        memory = policy.initial_memory(1)
        for rollout in rollouts[: 1 if length > 5 else 2]:
            memory = check_against_steps(policy, rollout, memory, 1e-12)[-1]
            memory = map_leaves(lambda x, ends=rollout.dones[-1]: x * ~ends.view(-1, 1, 1), memory)


@pytest.mark.parametrize("burn_in", [0, 2, 9])
@pytest.mark.parametrize("sequence_length", [None, 3, 6])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_batch_reproduces_acting_for_any_sequence_length(mode, sequence_length, burn_in):
    if burn_in and sequence_length is None:
        return
    policy = counting_policy({"kind": "lstm", "sequence_length": sequence_length, "burn_in": burn_in})
    for rollout in collect_two(policy, 12, make_batch("Probe/Counter-v0", 4, mode=mode, **ENDS)):
        batch = rollout.flatten(place=torch.arange(48).view(12, 4))
        assert len(batch) == rollout.num_steps
        assert len(batch.sequences) == 4 * 12 // (sequence_length or 12)
        assert (
            sorted(batch.place.tolist())
            == torch.arange(48)[
                torch.ones(48, dtype=torch.bool) if rollout.valid is None else rollout.valid.flatten()
            ].tolist()
        )
        for part in (batch, *batch.shuffled(torch.Generator().manual_seed(0)).split(2)):
            with torch.no_grad():
                distribution, values = policy(part.observations, part.sequences)
            assert (distribution.log_prob(part.actions) - part.log_probs).abs().max() <= 1e-12
            assert (values - part.values).abs().max() <= 1e-12


def test_minibatches_have_whole_sequences_and_count_valid_rows():
    policy = counting_policy({"kind": "gru", "sequence_length": 4})
    rollout = collect_two(policy, 12, make_batch("Probe/Counter-v0", 4, mode=AutoresetMode.NEXT_STEP, **ENDS))[1]
    batch = rollout.flatten(place=torch.arange(48).view(12, 4))
    sequences = {tuple(x.tolist()) for x in batch.place.split(batch.sequences.lengths.tolist())}
    assert all(len({(p // 16, p % 4) for p in places}) == 1 for places in sequences)  # one environment, one span
    generator = torch.Generator().manual_seed(0)
    parts = list(batch.shuffled(generator).split(4))
    assert [len(part.sequences) for part in parts] == [3, 3, 3, 3]
    assert {tuple(x.tolist()) for p in parts for x in p.place.split(p.sequences.lengths.tolist())} == sequences
    assert len({len(part) for part in parts}) > 1
    for part in parts:
        assert part.mean(torch.ones(len(part))) == pytest.approx(1)
        replaced = part.replace(returns=part.values)
        assert replaced.sequences is part.sequences
    others = [part.place.tolist() for part in batch.shuffled(generator).split(4)]
    assert others != [part.place.tolist() for part in parts]


def test_burn_in_recomputes_the_state_without_gradient():
    policy = counting_policy({"kind": "lstm", "sequence_length": 4, "burn_in": 3})
    plain = counting_policy({"kind": "lstm", "sequence_length": 4})
    rollout = collect_two(policy, 12, make_batch("Probe/Counter-v0", 2, lengths=(30,)))[1]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    plain.load_state_dict(policy.state_dict())
    batch = rollout.flatten()
    stored = [map_leaves(lambda x, k=k: x[k], rollout.memory) for k in range(3)]  # at steps 0, 1 and 5
    expected = []
    for k, begin in enumerate((0, 1, 5)):
        steps = slice(begin, 4 * (k + 1))
        with torch.no_grad():
            values = step_by_step(policy, rollout.observations[steps], rollout.starts[steps], stored[k])[1]
        expected.append(values[-4:].t().flatten())
    values = policy(batch.observations, batch.sequences)[1]
    torch.testing.assert_close(values, torch.cat(expected), rtol=0, atol=1e-12)
    # The gradient treats the memory as a constant.
    values.square().sum().backward()
    burn_in = batch.sequences.burn_in
    made_anew = policy._run_cores(batch.sequences.burn_in_observations, burn_in.segments, burn_in.memory)[2]
    batch.sequences.burn_in, batch.sequences.memory = None, map_leaves(torch.Tensor.detach, made_anew)
    plain(batch.observations, batch.sequences)[1].square().sum().backward()
    for one, other in zip(policy.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-10)


def test_recurrent_rollout_survives_a_state_dict():
    policy = counting_policy({"kind": "lstm", "sequence_length": 3, "burn_in": 1})
    rollout = collect_two(policy, 6, make_batch("Probe/Counter-v0", 2, **ENDS))[1]
    again = Rollout(**rollout.state_dict())
    one, other = rollout.flatten(), again.flatten()
    assert torch.equal(one.observations, other.observations)
    found = [policy(x.observations, x.sequences)[1] for x in (one, other)]
    assert torch.equal(*found)


def test_collector_restores_recurrent_state():
    policy = counting_policy("gru")
    collectors = [make_collector(make_batch("Probe/Random-v0", 3), 7, torch.float64) for _ in range(3)]
    policy = make_policy("gru", spaces=(spaces.Box(-9, 9, (3,), np.float64), spaces.Discrete(2)))
    collectors[0].collect(policy)
    state = collectors[0].state_dict()
    assert collectors[1].load_state_dict(state) == []
    kept = map_leaves(torch.clone, state["memory"])
    expected, found = collectors[0].collect(policy), collectors[1].collect(policy)
    assert all(map(torch.equal, leaves(state["memory"]), leaves(kept)))  # a copy
    assert torch.equal(expected.starts, found.starts) and torch.equal(expected.log_probs, found.log_probs)
    assert all(map(torch.equal, leaves(expected.memory), leaves(found.memory)))
    # An environment that cannot be restored begins with zero memory.
    exact = np.array([True, False, True])
    real = collectors[2].environments.load_state_dict
    collectors[2].environments.load_state_dict = lambda state: (exact, real(state)[1])
    assert collectors[2].load_state_dict(state) == [1]
    rollout = collectors[2].collect(policy)
    begun = map_leaves(lambda x: x[0], rollout.memory)
    assert rollout.starts[0, 1]
    assert all(
        (x[1] == 0).all() and torch.equal(x[::2], y[::2]) for x, y in zip(leaves(begun), leaves(kept), strict=True)
    )
