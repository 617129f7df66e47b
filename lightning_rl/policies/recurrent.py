"""The memory of a policy: its options, recurrent cores, and the recurrent state while acting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from lightning_rl.nested import Nested, first_leaf, map_leaves, map_stacked
from lightning_rl.options import changed
from lightning_rl.policies.networks.mlp import at_least_float32, orthogonal_
from lightning_rl.rollouts.sequences import Segments
from lightning_rl.validation import NonNegativeInt, PositiveInt, check, is_one_of

Array = np.ndarray[Any, Any]
Memory = str | dict[str, Any] | None
"""`lstm`, `gru`, `mingru`, `gtrxl`, `{"kind": "lstm", option: value}`, or None for no memory."""
_KINDS = ("lstm", "gru", "mingru", "gtrxl")


@dataclass(frozen=True)
class MemoryOptions:
    """Options of a policy's memory.

    Attributes:
        kind: `lstm`, `gru`, `mingru` or `gtrxl`.
        hidden_size: Units of each layer.
        num_layers: Number of stacked layers.
        separate: Use separate cores for actor and critic. None uses separate cores if the encoders are separate.
        sequence_length: Steps of a training sequence, which starts from a recurrent state stored during collection.
            None uses the whole rollout.
        burn_in: Steps before each sequence over which its first state is recomputed with the current parameters.
        context_length: Earlier steps of the episode that each step of `gtrxl` sees. None is 32.
    """

    kind: str
    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 1
    separate: bool | None = None
    sequence_length: PositiveInt | None = None
    burn_in: NonNegativeInt = 0
    context_length: PositiveInt | None = None

    @classmethod
    def parse(cls, value: Any) -> MemoryOptions | None:  # unchecked input of a user
        """Return the checked options for a value of `memory`."""
        if value is None:
            return None
        options: MemoryOptions = changed("policy.memory", cls(""), {"kind": value} if isinstance(value, str) else value)
        check(is_one_of(options.kind, _KINDS), "policy.memory: kind", options.kind, f"one of {', '.join(_KINDS)}")
        is_used = options.context_length is None or options.kind == "gtrxl"
        check(is_used, "policy.memory.context_length", options.context_length, "None unless kind is gtrxl")
        has_before = options.burn_in == 0 or options.sequence_length is not None
        expected = "0 if sequence_length is None: no steps precede the sequence of a whole rollout"
        check(has_before, "policy.memory.burn_in", options.burn_in, expected)
        return options

    def are_separate(self, shared_encoder: bool) -> bool:
        if self.separate is None:
            return not shared_encoder
        expected = "true or None, since actor and critic have an encoder each (shared_encoder)"
        check(self.separate or shared_encoder, "policy.memory.separate", self.separate, expected)
        return self.separate

    def num_sequences(self, rollout_shape: tuple[int, int]) -> int:
        """Return the number of sequences in a rollout of shape `(T, B)`, whose `T` must be divisible."""
        length, num_envs = rollout_shape
        size = self.sequence_length or length
        expected = f"a divisor of the {length} steps of a rollout (rollout_length)"
        check(length % size == 0, "policy.memory.sequence_length", size, expected)
        return length // size * num_envs

    def stored_steps(self, length: int) -> list[int]:
        """Return the step of a rollout from whose state each sequence is unrolled."""
        return [max(0, begin - self.burn_in) for begin in range(0, length, self.sequence_length or length)]


class RecurrentCore(nn.Module):
    """An LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014) between encoder and heads.

    Weights are orthogonal with a gain of 1. All biases are zero, including the bias of the LSTM's forget gate. The core
    computes in at least float32, because rounding errors add up over the steps.
    """

    can_be_packed = True

    def __init__(self, in_features: int, options: MemoryOptions) -> None:
        super().__init__()
        self.out_features = options.hidden_size
        self.num_layers = options.num_layers
        self.is_lstm = options.kind == "lstm"
        self.rnn = (nn.LSTM if self.is_lstm else nn.GRU)(in_features, options.hidden_size, options.num_layers)
        for weight in self.rnn.parameters():
            if weight.dim() == 1:
                nn.init.zeros_(weight)
            else:
                orthogonal_(weight, 1.0)

    def initial(self, batch_size: int) -> Nested:
        """Return the state before an episode: zeros `[B, layers, hidden]`, for an LSTM a pair of them."""
        zeros = self._weights()[0][0].new_zeros(batch_size, self.num_layers, self.out_features)
        return (zeros, zeros.clone()) if self.is_lstm else zeros

    def run(self, features: Tensor, segments: Segments | None, memory: Nested) -> tuple[Tensor, Nested]:
        """Unroll `segments`, or take one step without them."""
        return self.step(features, memory) if segments is None else self(features, segments, memory)

    def step(self, features: Tensor, state: Nested) -> tuple[Tensor, Nested]:
        """Return outputs `[B, hidden]` and next state for features `[B, f]`."""
        with torch.autocast(features.device.type, enabled=False):
            x, cell = features, torch.lstm_cell if self.is_lstm else torch.gru_cell
            new_states: list[Nested] = []
            for layer, weights in enumerate(self._weights()):
                before = map_leaves(lambda x, k=layer: x[:, k], state)
                new_states.append(cell(x.to(weights[0].dtype), before, *weights))
                x = first_leaf(new_states[-1])
            return x, map_leaves(lambda *parts: torch.stack(parts, 1), *new_states)

    def forward(self, features: Tensor, segments: Segments, memory: Nested) -> tuple[Tensor, Nested]:
        """Return outputs `[N, hidden]` of rows `[N, f]`, and the state after the last row of each sequence.

        `memory` `[S, layers, hidden]` is the state before each sequence; it is zero where an episode begins.
        """
        with torch.autocast(features.device.type, enabled=False):
            weights = [weight for layer in self._weights() for weight in layer]
            if not len(features):  # no rows on this rank: the outputs must depend on every parameter, for DDP
                nothing = 0 * sum((w.sum() for w in weights), features.sum())
                return nothing + weights[0].new_zeros(0, self.out_features), memory
            x = features.to(weights[0].dtype)[segments.rows]
            state = map_leaves(
                lambda m: torch.where(segments.fresh, 0, m[segments.sequence]).transpose(0, 1).contiguous(), memory
            )
            if x.is_cuda and self.can_be_packed:  # one call of cuDNN, with decreasing batch sizes
                outputs, state = self._run(x, state, weights, segments.batch_sizes)
            else:
                outputs, state = self._unroll_in_runs(x, segments, state, weights)
            which, sequence = segments.last
            after = map_leaves(lambda m, new: m.index_copy(0, sequence, new[:, which].transpose(0, 1)), memory, state)
            return outputs[segments.indices], after

    def _weights(self) -> Sequence[Sequence[Tensor]]:
        return [[at_least_float32(weight) for weight in layer] for layer in self.rnn.all_weights]

    def _unroll_in_runs(
        self, x: Tensor, segments: Segments, state: Nested, weights: list[Tensor]
    ) -> tuple[Tensor, Nested]:
        """Unroll in one call for each range of steps with the same segments; on the CPU 10 × as fast as packing."""
        outputs, ended = [], []
        parts = torch.split(x, [steps * width for steps, width in segments.runs])
        for part, (steps, width) in zip(parts, segments.runs, strict=True):
            ended.append(map_leaves(lambda s, w=width: s[:, w:], state))
            state = map_leaves(lambda s, w=width: s[:, :w].contiguous(), state)
            output, state = self._run(part.view(steps, width, -1), state, weights)
            outputs.append(output.flatten(0, 1))
        states = map_leaves(lambda *parts: torch.cat(parts, 1), state, *reversed(ended))
        return torch.cat(outputs), states

    def _run(self, x: Tensor, state: Nested, weights: list[Tensor], *batch_sizes: Tensor) -> tuple[Tensor, Nested]:
        """Return outputs and last state for steps `[T, B, f]`, or with `batch_sizes` for packed rows `[N, f]`."""
        run: Any = torch.lstm if self.is_lstm else torch.gru
        batch_first = () if batch_sizes else (False,)  # the call for packed rows has no such argument
        options = (True, self.num_layers, 0.0, torch.is_grad_enabled(), False, *batch_first)
        outputs, *after = run(x, *batch_sizes, state, weights, *options)
        return outputs, tuple(after) if self.is_lstm else after[0]


class MinGRU(nn.Module):
    """Stacked minimal GRUs, whose gates depend on the input only (Feng et al. 2024, section 3.1.3).

    h[t] = (1 - z) · h[t - 1] + z · (W x), with z = sigmoid(V x)
    """

    def __init__(self, in_features: int, options: MemoryOptions) -> None:
        super().__init__()
        sizes = [in_features, *[options.hidden_size] * options.num_layers]
        self.layers = nn.ModuleList(nn.Linear(n, 2 * options.hidden_size) for n in sizes[:-1])
        self.state_size = options.hidden_size

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs `[T, B, hidden]` of T steps `[T, B, f]`, and the state `[B, layers, hidden]` after them."""
        states = []
        for layer, h in zip(self.layers, state.unbind(1), strict=True):
            gates, candidates = layer(x).chunk(2, -1)
            outputs = [h := torch.lerp(h, c, z) for z, c in zip(gates.sigmoid(), candidates, strict=True)]
            x = torch.stack(outputs)
            states.append(h)
        return x, torch.stack(states, 1)


class GRUGate(nn.Module):
    """Gate between a residual stream x and the output y of a layer (Parisotto et al. 2020, section 3.2)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.of_output, self.of_stream = nn.Linear(size, 3 * size), nn.Linear(size, 2 * size, bias=False)
        self.candidate = nn.Linear(size, size, bias=False)
        nn.init.constant_(self.of_output.bias[size : 2 * size], -2.0)  # the first results are close to x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        (r, z, h), (r_x, z_x) = self.of_output(y).chunk(3, -1), self.of_stream(x).chunk(2, -1)
        h = torch.tanh(h + self.candidate((r + r_x).sigmoid() * x))
        return torch.lerp(x, h, (z + z_x).sigmoid())


class GatedAttention(nn.Module):
    """Self-attention and a feed-forward layer with gates, after layer normalization of their inputs.

    A learned bias for each head and distance in time replaces the relative positional encoding of the paper.
    """

    def __init__(self, size: int, context_length: int) -> None:
        super().__init__()
        self.num_heads = math.gcd(size, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.gates = nn.ModuleList(GRUGate(size) for _ in range(2))
        self.query, self.output = (nn.Linear(size, size, bias=False) for _ in range(2))
        self.key_value = nn.Linear(size, 2 * size, bias=False)
        self.distance_bias = nn.Parameter(torch.zeros(self.num_heads, context_length + 1))
        self.feed_forward = nn.Linear(size, size)

    def forward(self, inputs: Tensor, is_filled: Tensor) -> Tensor:
        """Return outputs `[B, T, size]` of the last T of the inputs `[B, L + T, size]`; each sees the L before it."""
        length = self.distance_bias.shape[1]
        rows, x = self.norms[0](inputs), inputs[:, length - 1 :]
        query = self.query(rows[:, length - 1 :]).unflatten(-1, (self.num_heads, -1))
        heads = (y.unflatten(-1, (self.num_heads, -1)) for y in self.key_value(rows).chunk(2, -1))
        keys, values = (y.unfold(1, length, 1) for y in heads)  # windows `[B, T, heads, size / heads, L + 1]`
        scores = torch.einsum("bthd,bthdl->bthl", query, keys) / math.sqrt(query.shape[-1]) + self.distance_bias
        visible = is_filled.unfold(1, length, 1).unsqueeze(2)
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        attended = self.output(torch.einsum("bthl,bthdl->bthd", weights, values).flatten(-2))
        x = self.gates[0](x, attended.relu())
        return self.gates[1](x, self.feed_forward(self.norms[1](x)).relu())  # type: ignore[no-any-return]


class GTrXL(nn.Module):
    """Gated transformer (Parisotto et al. 2020) over the current and the last `context_length` steps of the episode.

    The state contains the inputs of each layer at the last steps, and flags of the steps that exist. Gradients flow
    through all steps of a sequence, but not into the state before the sequence.
    """

    def __init__(self, in_features: int, options: MemoryOptions) -> None:
        super().__init__()
        self.context_length = options.context_length or 32
        self.state_size = self.context_length * (options.hidden_size + 1)
        self.encode = nn.Linear(in_features, options.hidden_size)
        self.layers = nn.ModuleList(
            GatedAttention(options.hidden_size, self.context_length) for _ in range(options.num_layers)
        )

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs `[T, B, hidden]` of T steps `[T, B, f]`, and the state `[B, layers, size]` after them."""
        x, states = self.encode(x).transpose(0, 1), []
        slots_of_layers = state.reshape(*state.shape[:2], self.context_length, self.state_size // self.context_length)
        for layer, slots in zip(self.layers, slots_of_layers.unbind(1), strict=True):
            slots = torch.cat([slots, torch.cat([x, torch.ones_like(x[..., :1])], -1)], 1)  # [B, L + T, hidden + 1]
            states.append(slots[:, -self.context_length :].flatten(1))
            x = layer(slots[..., :-1], slots[..., -1] > 0)
        return x.transpose(0, 1), torch.stack(states, 1)


class CellCore(RecurrentCore):
    """Runs a `MinGRU` or `GTrXL`, in at least float32."""

    can_be_packed = False

    def __init__(self, in_features: int, options: MemoryOptions) -> None:
        nn.Module.__init__(self)
        self.out_features, self.num_layers = options.hidden_size, options.num_layers
        self.cell = (MinGRU if options.kind == "mingru" else GTrXL)(in_features, options)

    def initial(self, batch_size: int) -> Nested:
        return self._weights()[0][0].new_zeros(batch_size, self.num_layers, self.cell.state_size)

    def step(self, features: Tensor, state: Nested) -> tuple[Tensor, Nested]:
        with torch.autocast(features.device.type, enabled=False):
            outputs, state = self._compute(features.to(state.dtype).unsqueeze(0), state)
            return outputs[0], state

    def _compute(self, steps: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if next(self.cell.parameters()).dtype == state.dtype:
            return self.cell(steps, state)  # type: ignore[no-any-return]
        weights = dict(zip(dict(self.cell.named_parameters()), self._weights()[0], strict=True))
        return functional_call(self.cell, weights, (steps, state))  # type: ignore[no-any-return]

    def _weights(self) -> Sequence[Sequence[Tensor]]:
        return [[at_least_float32(weight) for weight in self.cell.parameters()]]

    def _run(self, x: Tensor, state: Nested, weights: list[Tensor], *batch_sizes: Tensor) -> tuple[Tensor, Nested]:
        outputs, state = self._compute(x, state.transpose(0, 1))
        return outputs, state.transpose(0, 1)


def make_core(in_features: int, options: MemoryOptions) -> RecurrentCore:
    """Return the recurrent core of a kind."""
    return (RecurrentCore if options.kind in ("lstm", "gru") else CellCore)(in_features, options)


def reset_memory(memory: Nested, episode_starts: Array | Tensor) -> Nested:
    """Return a recurrent state `[B, ...]` with zeros where a new episode begins, `[B]`."""
    if isinstance(episode_starts, np.ndarray):
        if not episode_starts.any():
            return memory
        episode_starts = torch.from_numpy(episode_starts)
    mask = episode_starts.to(first_leaf(memory).device)
    return map_leaves(lambda x: torch.where(mask.view(-1, *[1] * (x.dim() - 1)), 0, x), memory)


class RecurrentState:
    """The recurrent state across rollouts, and the states that learning needs.

    Attributes:
        state: State before the next step, `[B, ...]`; None before the first rollout, and without memory.
        stored: States of this rollout from which sequences are unrolled.
        burn_in: Number of steps from each of these states to the beginning of its sequence.
    """

    def __init__(self) -> None:
        self.state: Nested | None = None
        self.stored: list[Nested] = []
        self.burn_in = 0
        self._steps: Sequence[int] = ()
        # States of single environments after steps that bootstrap from another observation than the next one.
        self._after: dict[tuple[int, int], Nested] = {}

    def start_rollout(self, policy: Any, num_envs: int, length: int) -> None:  # a `RecurrentPolicy`
        """Drop the stored states of the last rollout; the first rollout begins with the initial state."""
        self.stored, self._after = [], {}
        self._steps, self.burn_in = policy.memory.stored_steps(length), policy.memory.burn_in
        initial = policy.initial_memory(num_envs)
        # A resumed run may have another precision.
        self.state = initial if self.state is None else map_leaves(lambda x, y: x.to(y.dtype), self.state, initial)

    def before(self, t: int) -> Nested | None:
        """Return the state before step `t`, and store it if a sequence is unrolled from it."""
        self.stored += [self.state] * self._steps.count(t)
        return self.state

    def after(
        self, t: int, state: Nested, episode_starts: Array | Tensor, truncated: Sequence[int], failed: Sequence[int]
    ) -> None:
        """Continue with the state `[B, ...]` that the policy returned for step `t`.

        `truncated` environments bootstrap from a final observation. Episodes of `failed` ones ended a step earlier.
        """
        self.store(t, truncated, state)
        # An episode that had ended anyway keeps the state that was stored then.
        self.store(t - 1, [index for index in failed if (t - 1, index) not in self._after], self.state)
        self.state = reset_memory(state, episode_starts)

    def store(self, t: int, indices: Sequence[int], state: Nested) -> None:
        """Store the rows `indices` of a state `[B, ...]` as the states after step `t`."""
        for index in indices:
            self._after[t, index] = map_leaves(itemgetter(index), state)

    def at(self, places: Sequence[Sequence[int]]) -> Nested | None:
        """Return the stored states after steps `(t, environment)`, `[K, ...]`; None if there are none."""
        kept = [self._after[t, index] for t, index in places] if self._after else []
        return map_stacked(torch.stack, kept) if kept else None

    def state_dict(self) -> Nested | None:
        return None if self.state is None else map_leaves(lambda x: x.to("cpu", copy=True), self.state)

    def load_state_dict(self, state: Nested | None, exact: Array, device: torch.device) -> None:
        """Restore a state; environments that are new or not `exact`, `[B]`, get the initial state."""

        def load(stored: Tensor) -> Tensor:
            return pad(stored, (0, 0) * (stored.dim() - 1) + (0, len(exact) - len(stored))).to(device)

        self.state = None if state is None else reset_memory(map_leaves(load, state), ~exact)
