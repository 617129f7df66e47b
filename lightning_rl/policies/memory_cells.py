"""The recurrent cores `mingru` (Feng et al. 2024) and `gtrxl` (Parisotto et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_rl.nested import Nested
from lightning_rl.policies.networks.mlp import at_least_float32
from lightning_rl.policies.recurrent import MemoryOptions, RecurrentCore
from lightning_rl.rollouts.sequences import Segments


class MinGRU(nn.Module):
    """Stacked minimal GRUs, whose gates depend on the input only (section 3.1.3 of Feng et al. 2024).

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
    """Gate between a residual stream x and the output y of a layer, initially close to x (section 3.2)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.of_output, self.of_stream = nn.Linear(size, 3 * size), nn.Linear(size, 2 * size, bias=False)
        self.candidate = nn.Linear(size, size, bias=False)
        nn.init.constant_(self.of_output.bias[size : 2 * size], -2.0)

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
    """Gated transformer over the current and the last `context_length` steps of the episode.

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
        slots_of_layers = state.reshape(*state.shape[:2], self.context_length, -1)
        for layer, slots in zip(self.layers, slots_of_layers.unbind(1), strict=True):
            slots = torch.cat([slots, torch.cat([x, torch.ones_like(x[..., :1])], -1)], 1)  # [B, L + T, hidden + 1]
            states.append(slots[:, -self.context_length :].flatten(1))
            x = layer(slots[..., :-1], slots[..., -1] > 0)
        return x.transpose(0, 1), torch.stack(states, 1)


class CellCore(RecurrentCore):
    """Runs one of these cells, in at least float32."""

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

    def _unroll_run(self, steps: Tensor, state: Nested, weights: list[Tensor]) -> tuple[Tensor, Nested]:
        outputs, state = self._compute(steps, state.transpose(0, 1))
        return outputs, state.transpose(0, 1)

    def _unroll_packed(
        self, x: Tensor, segments: Segments, state: Nested, weights: list[Tensor]
    ) -> tuple[Tensor, Nested]:
        return self._unroll_in_runs(x, segments, state, weights)


def make_core(in_features: int, options: MemoryOptions) -> RecurrentCore:
    """Return the recurrent core of a kind."""
    return (RecurrentCore if options.kind in ("lstm", "gru") else CellCore)(in_features, options)
