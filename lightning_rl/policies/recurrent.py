"""Recurrent cores: what a policy remembers of the episode so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.nested import Nested, map_leaves
from lightning_rl.rollouts.sequences import Segments
from lightning_rl.validation import check, check_bool, check_positive_int, is_int, is_one_of

Memory = str | dict[str, Any] | None
"""`lstm`, `gru`, or one of these with options: `{"kind": "lstm", "hidden_size": 256}`; None: no memory."""
_KINDS = ("lstm", "gru")


@dataclass(frozen=True)
class MemoryOptions:
    """The options of a memory.

    Attributes:
        kind: `lstm` or `gru`.
        hidden_size: Units of each layer.
        num_layers: Layers, one upon another.
        separate: Whether actor and critic have a core each; None: if they have an encoder each.
        sequence_length: Steps of the sequences that are learned from, each from the state that was stored at its
            beginning; None: as many as a rollout has.
        burn_in: Steps before each of them over which its state is made anew with the current parameters.
    """

    kind: str
    hidden_size: int = 128
    num_layers: int = 1
    separate: bool | None = None
    sequence_length: int | None = None
    burn_in: int = 0

    @classmethod
    def parse(cls, value: Any) -> MemoryOptions | None:  # noqa: ANN401 - what a user has given
        """Return the options that `memory` is set to; None where there is none.

        Raises:
            ConfigurationError: It is no kind of memory, or an option is unknown or out of range.
        """
        if value is None:
            return None
        names = [field.name for field in fields(cls)]
        expected = f"None, one of {', '.join(_KINDS)}, or a dict with 'kind' and some of {', '.join(names[1:])}"
        check(isinstance(value, str | Mapping), "memory", value, expected)
        given = {"kind": value} if isinstance(value, str) else dict(value)
        check("kind" in given and set(given) <= set(names), "memory", value, expected)
        options = cls(**given)
        check(is_one_of(options.kind, _KINDS), "memory", options.kind, f"one of {', '.join(_KINDS)}")
        for name in ("hidden_size", "num_layers"):
            check_positive_int(f"memory.{name}", getattr(options, name))
        if options.sequence_length is not None:
            check_positive_int("memory.sequence_length", options.sequence_length)
        if options.separate is not None:
            check_bool("memory.separate", options.separate)
        check(is_int(options.burn_in) and options.burn_in >= 0, "memory.burn_in", options.burn_in, "0 or more steps")
        has_before = options.burn_in == 0 or options.sequence_length is not None
        expected = "0 where sequence_length is None: there is nothing before the sequences of whole rollouts"
        check(has_before, "memory.burn_in", options.burn_in, expected)
        return options

    def are_separate(self, shared_encoder: bool) -> bool:
        """Return whether actor and critic have a core each.

        Raises:
            ConfigurationError: They are to share a core, but no encoder.
        """
        if self.separate is None:
            return not shared_encoder
        expected = "true or None, since actor and critic have an encoder each (shared_encoder)"
        check(self.separate or shared_encoder, "memory.separate", self.separate, expected)
        return self.separate

    def num_sequences(self, rollout_shape: tuple[int, int]) -> int:
        """Return into how many sequences a rollout of shape `(T, B)` is cut.

        Raises:
            ConfigurationError: `sequence_length` does not divide its length.
        """
        length, num_envs = rollout_shape
        size = self.sequence_length or length
        expected = f"a divisor of the {length} steps of a rollout (rollout_length)"
        check(length % size == 0, "memory.sequence_length", size, expected)
        return length // size * num_envs

    def stored_steps(self, length: int) -> list[int]:
        """Return the steps of a rollout at which the state is stored: for each sequence the one it is unrolled from."""
        return [max(0, begin - self.burn_in) for begin in range(0, length, self.sequence_length or length)]


class RecurrentCore(nn.Module):
    """An LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014) between encoder and heads.

    Weights are orthogonal with a gain of 1, all biases zero, that of the LSTM's forget gate too. It computes in at
    least float32 in every precision: what is rounded in one step goes on into all that follow.

    Args:
        in_features: Of what comes in at each step.
        options: Kind and size.

    Attributes:
        out_features: Of what goes out.
    """

    def __init__(self, in_features: int, options: MemoryOptions) -> None:
        super().__init__()
        self.out_features = options.hidden_size
        self.num_layers = options.num_layers
        self.is_lstm = options.kind == "lstm"
        self.rnn = (nn.LSTM if self.is_lstm else nn.GRU)(in_features, options.hidden_size, options.num_layers)
        with torch.no_grad():
            for weight in self.rnn.parameters():
                if weight.dim() == 1:
                    nn.init.zeros_(weight)
                else:  # the decomposition does not exist in half precision
                    exact = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
                    weight.copy_(nn.init.orthogonal_(exact))

    def initial(self, batch_size: int) -> Nested:
        """Return the state before an episode: zeros `[B, layers, hidden]`, of an LSTM a pair of them."""
        weight = self.rnn.all_weights[0][0]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        zeros = torch.zeros(batch_size, self.num_layers, self.out_features, dtype=dtype, device=weight.device)
        return (zeros, zeros.clone()) if self.is_lstm else zeros

    def step(self, features: Tensor, state: Nested) -> tuple[Tensor, Nested]:
        """Return outputs `[B, hidden]` and next state for features `[B, f]`."""
        with torch.autocast(features.device.type, enabled=False):
            x = features
            new_states: list[Nested] = []
            for layer, weights in enumerate(self._weights()):
                x = x.to(weights[0].dtype)
                if self.is_lstm:
                    new_states.append(torch.lstm_cell(x, [part[:, layer] for part in state], *weights))
                    x = new_states[-1][0]
                else:
                    x = torch.gru_cell(x, state[:, layer], *weights)
                    new_states.append(x)
            return x, map_leaves(lambda *parts: torch.stack(parts, 1), *new_states)

    def forward(self, features: Tensor, segments: Segments, memory: Nested) -> tuple[Tensor, Nested]:
        """Unroll over sequences, from zeros wherever an episode begins.

        Args:
            features: Of all rows, `[N, f]`.
            segments: Which rows follow one another.
            memory: Before the first row of each sequence, `[S, layers, hidden]`.

        Returns:
            Outputs `[N, hidden]` in the order of rows, and the state after the last row of each sequence.
        """
        with torch.autocast(features.device.type, enabled=False):
            weights = [weight for layer in self._weights() for weight in layer]
            if not len(features):  # no step at all: outputs depend on every parameter all the same, as other layers' do
                nothing = 0 * sum((w.sum() for w in weights), features.sum())
                return nothing + weights[0].new_zeros(0, self.out_features), memory
            x = features.to(weights[0].dtype)[segments.rows]
            state = map_leaves(
                lambda m: torch.where(segments.fresh, 0, m[segments.sequence]).transpose(0, 1).contiguous(), memory
            )
            unroll = self._unroll_packed if x.is_cuda else self._unroll_in_runs
            outputs, state = unroll(x, segments, state, weights)
            which, sequence = segments.last
            after = map_leaves(lambda m, new: m.index_copy(0, sequence, new[:, which].transpose(0, 1)), memory, state)
            return outputs[segments.indices], after

    def _weights(self) -> Sequence[Sequence[Tensor]]:
        """Return weights and biases of each layer."""
        weights = self.rnn.all_weights
        if weights[0][0].dtype in (torch.float32, torch.float64):
            return weights
        return [[weight.float() for weight in layer] for layer in weights]

    def _unroll_packed(
        self, x: Tensor, segments: Segments, state: Nested, weights: list[Tensor]
    ) -> tuple[Tensor, Nested]:
        """Unroll in one call of cuDNN, which knows of batches that grow smaller."""
        shape = (True, self.num_layers, 0.0, torch.is_grad_enabled(), False)
        if self.is_lstm:
            outputs, h, c = torch.lstm(x, segments.batch_sizes, state, weights, *shape)
            return outputs, (h, c)
        return torch.gru(x, segments.batch_sizes, state, weights, *shape)

    def _unroll_in_runs(
        self, x: Tensor, segments: Segments, state: Nested, weights: list[Tensor]
    ) -> tuple[Tensor, Nested]:
        """Unroll in one call for each stretch of steps at which the same segments go on.

        On the CPU a call for a rectangle of steps and segments takes a tenth of what the one for packed sequences does.
        """
        shape = (True, self.num_layers, 0.0, torch.is_grad_enabled(), False, False)
        outputs, ended = [], []
        parts = torch.split(x, [steps * width for steps, width in segments.runs])
        for part, (steps, width) in zip(parts, segments.runs, strict=True):
            ended.append(map_leaves(lambda s, w=width: s[:, w:], state))
            state = map_leaves(lambda s, w=width: s[:, :w].contiguous(), state)
            rectangle = part.view(steps, width, -1)
            if self.is_lstm:
                output, h, c = torch.lstm(rectangle, state, weights, *shape)
                state = (h, c)
            else:
                output, state = torch.gru(rectangle, state, weights, *shape)
            outputs.append(output.flatten(0, 1))
        states = map_leaves(lambda *parts: torch.cat(parts, 1), state, *reversed(ended))
        return torch.cat(outputs), states
