"""Recurrent cores: unrolled over sequences they equal steps one by one, within episodes."""

import pytest
import torch

from lightning_rl import PPO
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.policies.actor_critic import ActorCritic, copy_to_cpu
from lightning_rl.policies.recurrent import GRUGate, MemoryOptions, RecurrentCore, make_core
from lightning_rl.rollouts.sequences import Sequences
from lightning_rl.validation import ConfigurationError
from tests.helpers import CONTINUOUS, DISCRETE, VECTOR
from tests.memory_probes import KINDS, make_policy, random_episodes, random_memory, step_by_step, whole

LENGTH, NUM_ENVS = 13, 4


def unroll(policy, observations, starts, memory):
    """Log-probabilities and values `[T, B]` at once."""
    rows = observations.transpose(0, 1).flatten(0, 1)
    distribution, values = policy(rows, whole(starts, memory))
    shape = starts.shape[::-1]
    return distribution.log_probs.unflatten(0, shape).transpose(0, 1), values.view(shape).t()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_unrolled_and_stepwise_forward_agree(kind, num_layers, shared, dtype, bound):
    policy = make_policy({"kind": kind, "num_layers": num_layers}, dtype, shared_encoder=shared)
    observations, starts, _ = random_episodes(LENGTH, NUM_ENVS)
    memory = random_memory(policy, NUM_ENVS)
    expected = step_by_step(policy, observations, starts, memory)
    found = unroll(policy, observations, starts, memory)
    assert (found[0].exp() - expected[0].exp()).abs().max() <= bound
    assert (found[1] - expected[1]).abs().max() <= bound
    assert found[0].std(0).min() > 0.01  # values differ between steps


@pytest.mark.parametrize("kind", KINDS)
def test_unrolled_and_stepwise_gradients_agree(kind):
    policy = make_policy(kind)
    observations, starts, _ = random_episodes(LENGTH, NUM_ENVS)
    memory = random_memory(policy, NUM_ENVS)
    gradients = []
    for forward in (unroll, lambda *args: step_by_step(*args)[:2]):
        policy.zero_grad()
        logits, values = forward(policy, observations, starts, memory)
        (logits[..., 0] * torch.arange(LENGTH).unsqueeze(1)).sum().add(values.square().sum()).backward()
        gradients.append([p.grad.clone() for p in policy.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_episode_end_resets_state_and_stops_gradient(kind):
    policy = make_policy(kind)
    observations, starts, _ = random_episodes(LENGTH, NUM_ENVS)
    starts[:] = False
    starts[5, 1] = True
    memory = map_leaves(lambda x: x.requires_grad_(), random_memory(policy, NUM_ENVS))
    observations.requires_grad_()
    logits, values = unroll(policy, observations, starts, memory)
    (logits[5:, 1, 0].sum() + values[5:, 1].sum()).backward()
    assert (observations.grad[:5] == 0).all() and (observations.grad[:, [0, 2, 3]] == 0).all()
    assert all((x.grad == 0).all() for x in leaves(memory))
    assert (observations.grad[5:, 1] != 0).any(-1).all()
    # Another past gives the same future, bit for bit.
    with torch.no_grad():
        changed = observations.detach().clone()
        changed[:5, 1] += 1
        others = unroll(policy, changed, starts, memory)
        assert torch.equal(others[0][5:, 1], logits[5:, 1]) and not torch.equal(others[0][4, 1], logits[4, 1])
    # Without the episode end there is a gradient.
    observations.grad = None
    logits, values = unroll(policy, observations, torch.zeros_like(starts), memory)
    (logits[5:, 1, 0].sum() + values[5:, 1].sum()).backward()
    assert (observations.grad[:, 1] != 0).any(-1).all() and all((x.grad[1] != 0).any() for x in leaves(memory))


@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_splitting_a_sequence_at_stored_states_changes_nothing(size):
    policy = make_policy()
    observations, starts, _ = random_episodes(12, NUM_ENVS)
    memory = random_memory(policy, NUM_ENVS)
    expected = unroll(policy, observations, starts, memory)
    stored = step_by_step(policy, observations, starts, memory)[2]
    for begin in range(0, 12, size):
        part = slice(begin, begin + size)
        found = unroll(policy, observations[part], starts[part], stored[begin])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other[part], rtol=0, atol=1e-12)


def test_sequences_of_unequal_lengths_give_the_values_of_single_steps():
    """Burn-in makes one call for each length of segments; learning pads steps to 4, 8, 16, … segments."""
    lengths = torch.tensor([5, 0, 3, 8])
    starts = torch.zeros(16, dtype=torch.bool)
    starts[[2, 5, 10]] = True  # segments: 2 and 3 rows of the first, 3 of the third, 2 and 6 of the last
    policy = make_policy()
    sequences = Sequences(lengths, starts, random_memory(policy, 4))
    segments = sequences.segments
    assert segments.batch_sizes.tolist() == [5, 5, 3, 1, 1, 1]
    assert segments.runs == [(2, 5), (1, 3), (3, 1)]
    assert sum(steps * width for steps, width in segments.runs) == 16
    assert sorted(segments.rows.tolist()) == list(range(16))
    padded = sequences.padded_segments
    assert padded.batch_sizes.tolist() == [5, 5, 4, 4, 4, 4]
    assert padded.runs == [(2, 5), (4, 4)]
    for one in (segments, padded):
        assert one.rows[one.indices].tolist() == list(range(16))
    observations = torch.randn(16, 3, dtype=torch.float64)
    found = policy(observations, sequences)[1]
    for index, rows in enumerate(torch.arange(16).split(lengths.tolist())):
        if len(rows):
            alone = map_leaves(lambda x, i=index: x[i : i + 1], sequences.memory)
            expected = step_by_step(policy, observations[rows].unsqueeze(1), starts[rows].unsqueeze(1), alone)[1]
            torch.testing.assert_close(found[rows], expected.squeeze(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["segments", "padded_segments"])
def test_segments_of_one_long_and_many_short_episodes_need_little_memory(name):
    """A mask of all steps and segments would have 256 entries for each row, and would grow with their square."""
    starts = torch.arange(1024) >= 512
    sequences = Sequences(torch.tensor([1024]), starts, torch.zeros(1, 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        getattr(sequences, name)
    assert 0 < max(event.self_cpu_memory_usage for event in profile.events()) <= 32 * 1024


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_packed_unroll_equals_unroll_in_runs(kind):
    torch.manual_seed(0)
    core = RecurrentCore(3, MemoryOptions(kind, hidden_size=4, num_layers=2)).double()
    _, starts, _ = random_episodes(LENGTH, NUM_ENVS)
    sequences = whole(starts, map_leaves(lambda x: x + 0.3, core.initial(NUM_ENVS)))
    x = torch.randn(LENGTH * NUM_ENVS, 3, dtype=torch.float64)
    expected = core(x, sequences.segments, sequences.memory)
    core._unroll_in_runs = lambda x, segments, *others: core._run(x, *others, segments.batch_sizes)
    found = core(x, sequences.segments, sequences.memory)
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_memory_after_a_sequence_is_the_state_of_its_last_step():
    policy = make_policy()
    observations, starts, _ = random_episodes(LENGTH, NUM_ENVS)
    memory = random_memory(policy, NUM_ENVS)
    expected = step_by_step(policy, observations, starts, memory)[2][-1]
    segments = whole(starts, memory).segments
    after = policy._run_cores(observations.transpose(0, 1).flatten(0, 1), segments, memory)[2]
    for one, other in zip(leaves(after), leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_minibatch_without_rows_has_zero_gradients():
    policy = make_policy()
    empty = Sequences(torch.zeros(2, dtype=torch.long), torch.zeros(0, dtype=torch.bool), random_memory(policy, 2))
    distribution, values = policy(torch.zeros(0, 3), empty)
    (distribution.entropy().sum() + values.sum()).backward()
    assert all((p.grad == 0).all() for p in policy.parameters())


@pytest.mark.parametrize(
    ("options", "cores"),
    [
        ({"shared_encoder": True}, 1),
        ({"shared_encoder": False}, 2),
        ({"shared_encoder": True, "memory": {"kind": "gru", "separate": True}}, 2),
        ({"shared_encoder": True, "memory": {"kind": "gru", "separate": False}}, 1),
    ],
)
def test_actor_and_critic_share_a_core_or_have_separate_cores(options, cores):
    policy = ActorCritic(VECTOR, DISCRETE, **{"memory": "lstm", "hidden_sizes": (8,)} | options)
    assert sum(isinstance(module, RecurrentCore) for module in policy.modules()) == cores
    memory = policy.initial_memory(2)
    assert list(memory) == ["actor", "critic"][:cores]
    changed = map_leaves(lambda x: x + 1, memory["actor"])
    values = [policy.value(torch.zeros(2, 3), memory | {"actor": actor}) for actor in (memory["actor"], changed)]
    assert torch.equal(*values) == (cores == 2)
    output = policy.act(torch.zeros(2, 3), memory=policy.initial_memory(2, critic=False))
    assert (output.value is None) == (cores == 2) and list(output.memory) == ["actor"]


def test_initial_memory_is_zero_with_environments_first():
    memory = make_policy({"kind": "lstm", "num_layers": 2}, shared_encoder=True).initial_memory(3)
    assert [x.shape for x in leaves(memory)] == [(3, 2, 5), (3, 2, 5)]
    assert all((x == 0).all() and x.dtype == torch.float64 for x in leaves(memory))
    assert make_policy("gru", torch.bfloat16).initial_memory(3)["actor"].dtype == torch.float32
    assert ActorCritic(VECTOR, DISCRETE).initial_memory(3) is None


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_orthogonal_and_biases_zero(kind, dtype):
    torch.set_default_dtype(dtype)
    try:
        core = RecurrentCore(6, MemoryOptions(kind, hidden_size=8, num_layers=2))
    finally:
        torch.set_default_dtype(torch.float32)
    for name, parameter in core.rnn.named_parameters():
        if "bias" in name:
            assert (parameter == 0).all()
        else:
            identity = torch.eye(parameter.shape[1])
            bound = 1e-5 if dtype == torch.float32 else 2e-2
            assert (parameter.float().t() @ parameter.float() - identity).abs().max() < bound


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("rnn", "memory: kind='rnn' is not valid: expected one of lstm, gru, mingru, gtrxl"),
        (3, "memory=3 is not valid: expected MemoryOptions.* or a dict of its options"),
        ({"hidden_size": 3}, "memory: kind='' is not valid: expected one of lstm"),
        ({"kind": "gru", "size": 3}, "memory.size=3 is no option; .*hidden_size"),
        ({"kind": "gru", "hidden_size": 0}, "memory.hidden_size=0 is not valid: expected an integer of at least 1"),
        ({"kind": "gru", "num_layers": 1.5}, r"memory.num_layers=1.5 is not valid"),
        ({"kind": "gru", "sequence_length": 0}, "memory.sequence_length=0 is not valid"),
        (
            {"kind": "gru", "burn_in": -1, "sequence_length": 4},
            "memory.burn_in=-1 is .* an integer of at least 0",
        ),
        ({"kind": "gru", "burn_in": 2}, "memory.burn_in=2 is not valid: expected 0 if sequence_length is None"),
        ({"kind": "gtrxl", "context_length": 0}, "memory.context_length=0 is not valid"),
        (
            {"kind": "gru", "context_length": 8},
            "memory.context_length=8 is not valid: expected None unless",
        ),
        ({"kind": "gru", "separate": "no"}, "memory.separate='no' is not valid: expected true or false"),
        ({"kind": "gru", "separate": False}, "memory.separate=False is not valid: expected true or None"),
    ],
)
def test_invalid_memory_options_raise(memory, message):
    with pytest.raises(ConfigurationError, match=message):
        ActorCritic(VECTOR, DISCRETE, memory=memory, shared_encoder=False)


def test_algorithms_take_memory_as_plain_data_only():
    with pytest.raises(ConfigurationError, match=r"policy.memory=MemoryOptions\(.*\) cannot be stored in a checkpoint"):
        PPO(VECTOR, DISCRETE, policy={"memory": MemoryOptions("lstm")})


def test_missing_memory_or_sequences_raise():
    policy = make_policy(dtype=torch.float32)
    x = torch.zeros(2, 3)
    for call in (lambda: policy.act(x), lambda: policy.value(x)):
        with pytest.raises(ValueError, match="needs memory: initial_memory"):
            call()
    with pytest.raises(ValueError, match="needs sequences"):
        policy(x)
    with pytest.raises(ValueError, match="without memory"):
        policy.log_prob(x, torch.zeros(2, dtype=torch.long))


def test_copy_to_cpu_gives_the_same_memory():
    policy = make_policy()
    observations, starts, _ = random_episodes(LENGTH, NUM_ENVS)
    copied, memory = copy_to_cpu(policy), random_memory(policy, NUM_ENVS)
    with torch.no_grad():
        expected = unroll(policy, observations, starts, memory)
        for parameter in policy.parameters():
            parameter.zero_()
        assert all(map(torch.equal, unroll(copied, observations, starts, memory), expected))


@pytest.mark.parametrize("kind", KINDS)
def test_act_with_memory_can_be_exported(kind):
    class Actor(torch.nn.Module):
        def __init__(self, policy):
            super().__init__()
            self.policy = policy

        def forward(self, observations, memory):
            output = self.policy.act(observations, deterministic=True, memory=memory)
            return output.environment_action, output.memory

    actor = Actor(make_policy(kind, torch.float32, spaces=(VECTOR, CONTINUOUS)))
    memory, observations = random_memory(actor.policy, 2), torch.randn(2, 3)
    exported = torch.export.export(actor, (observations, memory)).module()
    for _ in range(3):
        expected, found = actor(observations, memory), exported(observations, memory)
        for own, other in zip(leaves(expected), leaves(found), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
        memory = expected[1]


def test_transformer_attends_to_the_last_steps_of_the_episode_alone():
    """The output of a layer depends on its `context_length` inputs before the current one, and on no earlier one."""
    core = make_core(3, MemoryOptions("gtrxl", hidden_size=8, context_length=4)).double()
    steps = torch.randn(10, 1, 3, dtype=torch.float64, requires_grad=True)
    state = core.initial(1)
    for x in steps:
        output, state = core.step(x, state)
    output.sum().backward()
    assert (steps.grad[:5] == 0).all() and (steps.grad[5:] != 0).any(-1).all()


def test_transformer_layer_has_the_equations_of_its_paper():
    """Parisotto et al. 2020, sections 3.1 and 3.2, step by step; the bias of each distance is learned here."""
    torch.manual_seed(0)
    core = make_core(3, MemoryOptions("gtrxl", hidden_size=8, context_length=4)).double()
    (layer,) = core.cell.layers
    with torch.no_grad():
        layer.distance_bias.normal_()

    def gated(gate, x, y):
        w, v = gate.of_output, gate.of_stream.weight
        r = (y @ w.weight[:8].T + w.bias[:8] + x @ v[:8].T).sigmoid()
        z = (y @ w.weight[8:16].T + w.bias[8:16] + x @ v[8:].T).sigmoid()
        h = (y @ w.weight[16:].T + w.bias[16:] + (r * x) @ gate.candidate.weight.T).tanh()
        return (1 - z) * x + z * h

    steps, state = torch.randn(7, 1, 3, dtype=torch.float64), core.initial(1)
    inputs = core.cell.encode(steps)[:, 0]
    for t, step in enumerate(steps):
        output, state = core.step(step, state)
        seen = layer.norms[0](inputs[max(0, t - 4) : t + 1])
        query, (keys, values) = layer.query(seen[-1]), layer.key_value(seen).chunk(2, -1)
        heads = []
        for head in range(4):
            part = slice(2 * head, 2 * head + 2)
            scores = keys[:, part] @ query[part] / 2**0.5 + layer.distance_bias[head, -len(seen) :]
            heads.append(scores.softmax(0) @ values[:, part])
        x = gated(layer.gates[0], inputs[t], layer.output(torch.cat(heads)).relu())
        torch.testing.assert_close(output[0], gated(layer.gates[1], x, layer.feed_forward(layer.norms[1](x)).relu()))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_no_actions(kind):
    policy = make_policy(kind)
    memory = policy.initial_memory(0)
    output = policy.act(torch.zeros(0, 3), memory=memory)
    assert [x.shape for x in leaves(output.memory)] == [x.shape for x in leaves(memory)]
    assert output.action.shape == output.value.shape == policy.value(torch.zeros(0, 3), memory).shape == (0,)


def test_minimal_gru_is_the_recurrence_of_its_paper():
    core = make_core(3, MemoryOptions("mingru", hidden_size=2))
    x, before = torch.randn(4, 3), torch.randn(4, 1, 2)
    output, after = core.step(x, before)
    gate, candidate = (x @ core.cell.layers[0].weight.T + core.cell.layers[0].bias).split(2, dim=-1)
    z = torch.sigmoid(gate)
    torch.testing.assert_close(output, (1 - z) * before[:, 0] + z * candidate)
    assert torch.equal(after[:, 0], output)


def test_gates_of_the_transformer_pass_their_input_on_at_first():
    """A bias of 2 keeps most of the residual stream, as the paper recommends."""
    gate = GRUGate(64)
    assert ((gate.of_output.bias == -2) == (torch.arange(3 * 64) // 64 == 1)).all()  # of z alone
    x = torch.randn(32, 64)
    assert (gate(x, torch.zeros_like(x)) - x).abs().mean() < 0.3 * x.abs().mean()
