"""The actor-critic and its options: encoders, optional recurrent cores, action head and value head."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar, cast

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.masks import find_masks
from lightning_rl.nested import Nested, map_leaves, part_at, space_leaves, without
from lightning_rl.options import OrClass, changed
from lightning_rl.policies.distributions import Distribution, make_action_head
from lightning_rl.policies.distributions.continuous import BetaHead
from lightning_rl.policies.interface import PolicyOutput
from lightning_rl.policies.networks.make import Network, make_encoder, name_image_networks
from lightning_rl.policies.networks.mlp import Activation, DiscreteEncoding, HeadLinear
from lightning_rl.policies.normalization import (
    NestedNormalizer,
    ObservationNormalizer,
    ValueNormalization,
    make_normalizer,
    make_value_normalizer,
)
from lightning_rl.policies.recurrent import Memory, MemoryOptions, RecurrentCore, make_core
from lightning_rl.rollouts.sequences import Segments, Sequences
from lightning_rl.spaces import is_image
from lightning_rl.validation import ClassSpec, Range, check


@dataclass(frozen=True)
class PolicyConfig:
    """Networks, memory and action distributions.

    Args:
        network: `auto`, `mlp`, `nature`, `impala`, an encoder class, or a dict from the path of an observation leaf to
            one of these; see `lightning_rl.policies.networks.make.make_encoder`.
        hidden_sizes: Layer widths of the MLP.
        activation: Activation of the MLP.
        discrete_encoding: MLP input for `Discrete` and `MultiDiscrete`: `one_hot` vectors or a learned `embedding`.
        shared_encoder: Share one encoder between actor and critic. None does so for images unless critic_only is set.
        critic_only: Paths of parts of a `Dict` observation that only the critic sees: `goal`, `robot.mass`.
        memory: Recurrent core between encoder and heads: `lstm`, `gru`, `mingru`, `gtrxl`, or
            `{"kind": "lstm", option: value}` with `hidden_size`, `num_layers`, `separate`, `sequence_length`, `burn_in`
            and `context_length` (`gtrxl` only, 32 steps by default). None has no core. See
            docs/policies.md.
        initial_log_std: Initial logarithm of the standard deviation of continuous actions.
        action_distribution: `gaussian`, `squashed_gaussian`, `beta` or others, by name or as `{"kind": name, option:
            value}`; a dict from path to one of these for parts of a `Dict` or `Tuple` action (`{"arm.0": "beta"}`).
            None uses the default of each space. See docs/policies.md.
    """

    network: OrClass[Network] = "auto"
    hidden_sizes: Sequence[int] = (64, 64)
    activation: Activation = "tanh"
    discrete_encoding: DiscreteEncoding = "one_hot"
    shared_encoder: bool | None = None
    critic_only: Sequence[str] | None = None
    memory: Memory = None
    initial_log_std: Annotated[float, Range(at_least=-20, at_most=20)] = 0.0
    action_distribution: str | ClassSpec | None = None


POLICY_OPTIONS = {field.name: f"policy.{field.name}" for field in fields(PolicyConfig)} | {
    "normalize_observations": "normalization.observations",
    "value_normalization": "normalization.values",
}
"""Full name of the option for each argument of `ActorCritic`."""


T = TypeVar("T")


class ActorCritic(nn.Module):
    """Encoders and recurrent cores, shared by actor and critic or separate, with an action head and a value head.

    Value estimates are in units of return, whatever the `value_normalization`.

    Args:
        observation_space: `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, or any nesting of these in `Dict` and
            `Tuple`. `ActionMask`s in one part of it say which actions are valid; the encoders do not see them.
        action_space: `Discrete`, `MultiDiscrete`, `MultiBinary`, `Box`, or any nesting of these in `Dict` and `Tuple`.
        normalize_observations: Option `observations` of `NormalizationConfig`.
        value_normalization: Option `values` of `NormalizationConfig`.
        **options: Options of `PolicyConfig`.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        normalize_observations: bool | dict[str, bool | float] = False,
        value_normalization: ValueNormalization | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        config = changed("policy", PolicyConfig(), options)
        self.memory = MemoryOptions.parse(config.memory)
        self.observation_normalizer: ObservationNormalizer | NestedNormalizer | None = None
        # Normalized images are no images any more.
        encoded_space, network = observation_space, name_image_networks(observation_space, config.network)
        if normalize_observations is not False:
            moments = {} if normalize_observations is True else normalize_observations
            self.observation_normalizer, encoded_space = make_normalizer(observation_space, moments)
        self._mask_path = find_masks(observation_space)
        self._masks = frozenset(() if self._mask_path is None else (self._mask_path,))
        encoded_space = without(encoded_space, self._masks)
        self.critic_only = _check_critic_only(config, encoded_space, self._mask_path)
        actor_space = without(encoded_space, self.critic_only)
        # The leading dimensions of an observation are read off one leaf that both actor and critic see.
        self._first_path, first = next(iter(space_leaves(actor_space).items()))
        self._first_dims = len(first.shape or ())

        has_images = any(map(is_image, space_leaves(observation_space).values()))
        shared = has_images and not self.critic_only if config.shared_encoder is None else config.shared_encoder
        mlp = (config.hidden_sizes, config.activation, config.discrete_encoding)
        self.actor_encoder = make_encoder(actor_space, network, *mlp, whole=encoded_space)
        self.critic_encoder = None if shared else make_encoder(encoded_space, network, *mlp)
        width = value_width = int(self.actor_encoder.out_features)  # type: ignore[arg-type]
        if self.critic_encoder is not None:
            value_width = int(self.critic_encoder.out_features)  # type: ignore[arg-type]
        self.actor_core: RecurrentCore | None = None
        self.critic_core: RecurrentCore | None = None
        if self.memory is not None:
            self.actor_core = make_core(width, self.memory)
            if self.memory.are_separate(shared):
                self.critic_core = make_core(value_width, self.memory)
            width = value_width = self.memory.hidden_size

        mask_space = None if self._mask_path is None else part_at(observation_space, self._mask_path)
        self.action_head = make_action_head(
            action_space, width, config.initial_log_std, config.action_distribution, mask_space
        )
        self.value_head: nn.Linear = HeadLinear(value_width, 1, gain=1.0)
        self.value_normalizer = make_value_normalizer(value_normalization)

    @property
    def dtype(self) -> torch.dtype:
        return self.value_head.weight.dtype

    @property
    def chooses_rows_alone(self) -> bool:
        """Whether each action depends only on its own observation and a fixed amount of noise.

        False with memory, and with beta distributions: rejection sampling uses a varying number of random numbers.
        """
        return self.memory is None and not any(isinstance(module, BetaHead) for module in self.action_head.modules())

    @property
    def value_heads(self) -> list[nn.Linear]:
        return [self.value_head]

    def initial_memory(self, batch_size: int, critic: bool = True) -> Nested | None:
        """Return the recurrent state before an episode, `[B, ...]`; None without memory.

        With the state of the critic's own core, `act` also returns values and log-probabilities.
        """
        if self.actor_core is None:
            return None
        memory = {"actor": self.actor_core.initial(batch_size)}
        if critic and self.critic_core is not None:
            memory["critic"] = self.critic_core.initial(batch_size)
        return memory

    def forward(self, observations: Nested, sequences: Sequences | None = None) -> tuple[Distribution, Tensor]:
        """Return the action distribution `[...]` and the value `[...]` at observations `[..., *shape]`.

        A policy with memory needs the rows `[N, *shape]` of `sequences`; without them it raises a `ValueError`.
        """
        features, value_features = self._features(observations, sequences)
        return self._distribution(features, observations), self.value_of(value_features)

    def act(
        self,
        observations: Nested,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        memory: Nested | None = None,
    ) -> PolicyOutput:
        """Choose an action for every row; see `Policy.act`. `critic_only` parts may be missing.

        A policy with memory needs `initial_memory` at the start of episodes, then the state in the last output.
        """
        features, value_features, after = self._acting_features(self.prepare_observations(observations), memory)
        distribution = self._distribution(features, observations)
        action = distribution.mode() if deterministic else distribution.sample(generator)
        output = PolicyOutput(action, environment_action=distribution.to_space(action), memory=after)
        if value_features is not None:
            output.log_prob, output.value = distribution.log_prob(action), self.value_of(value_features)
        return output

    def log_prob(self, observations: Nested, actions: Nested) -> Tensor:
        """Return log-probabilities of actions; a policy with memory raises a `ValueError`: use `act` or `forward`."""
        if self.memory is not None:
            raise ValueError("log_prob is for policies without memory: use act or forward")
        features = self._encode_for_actor(self.prepare_observations(observations))
        return self._distribution(features, observations).log_prob(actions)

    def value(self, observations: Nested, memory: Nested | None = None) -> Tensor:
        """Return values of `[..., *shape]`; with memory of `[B, *shape]` and the recurrent state before them."""
        encoder = self.actor_encoder if self.critic_encoder is None else self.critic_encoder
        features = self._encode(encoder, self.prepare_observations(observations))
        if self.actor_core is not None:
            memory = _required(memory, "memory")
            core, state = (self.actor_core, "actor") if self.critic_core is None else (self.critic_core, "critic")
            features, _ = core.step(features, memory[state])
        return self.value_of(features)

    def value_of(self, features: Tensor) -> Tensor:
        """Return the value, in units of return, for features of the critic. A subclass may change the features."""
        return self._from_head(self.value_head, features)

    def saturation(self, observations: Nested, actions: Nested, valid: Tensor | None = None) -> Tensor | None:
        """Return the share of action components that the environment clips to the bounds; None without bounds.

        Only steps in the mask `valid` `[T, B]` count, and components that the action has.
        """
        head, parts = cast(Any, self.action_head), (actions, *self._mask_of(observations))
        if valid is not None:
            parts = map_leaves(lambda x: x[valid], parts)
        clipped: Tensor | None = head.clipped(*parts) if hasattr(head, "clipped") else None
        return None if clipped is None else clipped.sum() / max(clipped.numel(), 1)

    def prepare_observations(self, observations: Nested) -> Nested:
        """Remove masks, normalize, and cast floating-point observations to the dtype of the parameters."""
        if self._masks:
            observations = without(observations, self._masks)
        if self.observation_normalizer is not None:
            observations = self.observation_normalizer(observations)
        dtype = self.dtype
        if isinstance(observations, Tensor) and observations.dtype is dtype:  # saves time in every step
            return observations
        return map_leaves(lambda x: x.to(dtype) if x.is_floating_point() else x, observations)

    def _features(self, observations: Nested, sequences: Sequences | None) -> tuple[Tensor, Tensor]:
        if self.memory is None:
            x = self.prepare_observations(observations)
            features = self._encode_for_actor(x)
            return features, features if self.critic_encoder is None else self._encode(self.critic_encoder, x)
        sequences = _required(sequences, "sequences")
        memory = sequences.memory
        if sequences.burn_in is not None:
            with torch.no_grad():
                x, burn_in = self.prepare_observations(sequences.burn_in_observations), sequences.burn_in
                memory = self._run_cores(x, burn_in.segments, burn_in.memory)[2]
        return self._run_cores(self.prepare_observations(observations), sequences.padded_segments, memory)[:2]

    def _acting_features(self, x: Nested, memory: Nested | None) -> tuple[Tensor, Tensor | None, Nested | None]:
        """Return features of one step for actor and critic, and the next recurrent state.

        The critic's features are None if `memory` lacks the state of the critic's core; without recurrent cores, if the
        critic has its own encoder.
        """
        if self.actor_core is not None:
            return self._run_cores(x, None, _required(memory, "memory"))
        encoded = self._encode_for_actor(x)
        return encoded, encoded if self.critic_encoder is None else None, None

    def _run_cores(self, x: Nested, segments: Segments | None, memory: Nested) -> tuple[Tensor, Any, Nested]:
        """Return features for actor and critic, and the next state, after one step or after `segments`."""
        assert self.actor_core is not None
        encoded, after = self._encode_for_actor(x), {}
        features, after["actor"] = self.actor_core.run(encoded, segments, memory["actor"])
        if self.critic_core is None:
            return features, features, after
        if "critic" not in memory:
            return features, None, after
        if self.critic_encoder is not None:
            encoded = self._encode(self.critic_encoder, x)
        value_features, after["critic"] = self.critic_core.run(encoded, segments, memory["critic"])
        return features, value_features, after

    def _encode_for_actor(self, observations: Nested) -> Tensor:
        if self.critic_only:
            observations = without(observations, self.critic_only)
        return self._encode(self.actor_encoder, observations)

    def _encode(self, encoder: nn.Module, observations: Nested) -> Tensor:
        """Return features `[..., f]`. The encoder gets rows `[N, *shape]`, for any leading dimensions."""
        first = part_at(observations, self._first_path)
        num_leading = first.dim() - self._first_dims
        if num_leading == 1:
            return encoder(observations)  # type: ignore[no-any-return]
        leading = first.shape[:num_leading]
        rows = map_leaves(lambda x: x.flatten(0, num_leading - 1) if leading else x.unsqueeze(0), observations)
        features: Tensor = encoder(rows)
        return features.reshape(*leading, features.shape[-1])

    def _distribution(self, features: Tensor, observations: Nested) -> Distribution:
        return self.action_head(features, *self._mask_of(observations))  # type: ignore[no-any-return]

    def _mask_of(self, observations: Nested) -> tuple[Nested, ...]:
        """Return the masks of observations; nothing if they have none."""
        return () if self._mask_path is None else (part_at(observations, self._mask_path),)

    def _from_head(self, head: nn.Module, features: Tensor) -> Tensor:
        values: Tensor = head(features).squeeze(-1)
        return values if self.value_normalizer is None else self.value_normalizer.denormalize(values)


_SOURCES = {
    "memory": "initial_memory(batch_size) at the start of episodes, then the memory that act returned",
    "sequences": "actor_critic(batch) passes the sequences of self.batch(rollout); your own rows have none",
}


def _required(x: T | None, name: str) -> T:
    if x is None:
        raise ValueError(f"a policy with memory needs {name}: {_SOURCES[name]}")
    return x


def _check_critic_only(config: PolicyConfig, space: spaces.Space[Any], mask_path: str | None) -> frozenset[str]:
    if not (paths := config.critic_only):
        return frozenset()
    # The parts around each leaf; `without` removes no part of a Tuple.
    keys = [path.split(".") for path in space_leaves(space)]
    parts = dict.fromkeys(".".join(some[:n]) for some in keys for n in range(1, len(some) + 1))
    known = [path for path in parts if without(space, [path]) != space]
    unknown = ", ".join(repr(path) for path in paths if path not in known)
    check(not unknown, "policy.critic_only", paths, f"parts of a Dict ({', '.join(known)}), got {unknown}")
    left = space_leaves(without(space, paths))
    check(bool(left), "policy.critic_only", paths, "at least one part for the actor")
    expected = f"None or False, since critic_only={list(paths)}"
    check(config.shared_encoder is not True, "policy.shared_encoder", True, expected)
    hidden = (path for path in known if any(f"{path}.".startswith(f"{outer}.") for outer in paths))
    return frozenset(path for path in hidden if not f"{mask_path}.".startswith(f"{path}."))  # the actor needs masks


def check_modes_agree(policy: nn.Module) -> None:
    """Raise a `ConfigurationError` if a layer behaves differently during collection and updates."""
    for name, module in policy.named_modules():
        # A dropout layer with p=0 does nothing. Attention and recurrent layers have their rate in `dropout`.
        differs = re.search("Dropout|BatchNorm|RReLU", type(module).__name__) and getattr(module, "p", 1) > 0
        rate = getattr(module, "dropout", 0)
        differs = differs or (isinstance(rate, int | float) and rate > 0)
        expected = "no dropout or batch normalization, which differ between collection and updates; LayerNorm does not"
        check(not differs, f"policy: {name}", module, expected)


def copy_to_cpu(policy: nn.Module) -> nn.Module:
    """Return a copy of a policy with its parameters and buffers on the CPU; the policy stays on its device."""
    return copy.deepcopy(policy).cpu()
