"""The actor-critic: encoders, optional memory, action head and value head."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.masks import find_masks
from lightning_rl.nested import Nested, join, map_leaves, part_at, replace_leaves, space_leaves, without
from lightning_rl.policies.distributions import ActionDistribution, Distribution, make_action_head
from lightning_rl.policies.distributions.continuous import BetaHead
from lightning_rl.policies.interface import PolicyOutput
from lightning_rl.policies.networks import DiscreteEncoding, Network, is_image, make_encoder
from lightning_rl.policies.networks.mlp import HeadLinear
from lightning_rl.policies.normalization import (
    NestedNormalizer,
    ObservationNormalizer,
    ValueNormalization,
    make_value_normalizer,
)
from lightning_rl.policies.recurrent import Memory, MemoryOptions, RecurrentCore
from lightning_rl.rollouts.sequences import Sequences
from lightning_rl.validation import check, check_number


def make_normalizer(
    space: spaces.Space[Any], options: Mapping[str, float] | None = None
) -> tuple[ObservationNormalizer | NestedNormalizer, spaces.Space[Any]]:
    """Return a normaliser of every `Box` that is no image, and the space of what it gives.

    Args:
        space: Of observations.
        options: Some of `clip`, `epsilon` and `initial_variance`, see `ObservationNormalizer`.

    Raises:
        ConfigurationError: There is none, or an option is unknown or out of range.
    """
    options = dict(options or {})
    known = {"clip": {"above": 0}, "epsilon": {"at_least": 0}, "initial_variance": {"at_least": 0}}
    for name, value in options.items():
        check(name in known, "normalize_observations", options, f"true, false or some of {', '.join(known)}")
        check_number(f"normalize_observations.{name}", value, **known[name])
    shapes = {
        path: leaf.shape
        for path, leaf in space_leaves(space).items()
        if isinstance(leaf, spaces.Box) and not is_image(leaf)
    }
    expected = f"False, since normalisation is for a Box that is no image, and there is none in {space}"
    check(bool(shapes), "normalize_observations", True, expected)
    bound = ObservationNormalizer((), **options).clip

    def bounded(path: str, leaf: spaces.Space[Any]) -> spaces.Space[Any]:
        return spaces.Box(-bound, bound, leaf.shape, np.float32) if path in shapes else leaf

    normalizer = ObservationNormalizer(shapes[""], **options) if "" in shapes else NestedNormalizer(shapes, **options)
    return normalizer, replace_leaves(bounded, space)


def check_critic_only(
    paths: Sequence[str] | None, space: spaces.Space[Any], shared_encoder: bool | None
) -> frozenset[str]:
    """Return the paths that the actor does not see.

    Args:
        paths: What `critic_only` is set to.
        space: Of observations.
        shared_encoder: What that option is set to.

    Raises:
        ConfigurationError: A path leads nowhere, nothing is left for the actor, or the encoder is shared.
    """
    if not paths:
        return frozenset()
    known = list(_dict_paths(space))
    check(bool(known), "critic_only", paths, f"None, since observations are no Dict but {space}")
    for path in paths:
        check(path in known, "critic_only", paths, f"some of {', '.join(known)}, got {path!r}")
    left = space_leaves(without(space, paths))
    check(bool(left), "critic_only", paths, "to leave something that the actor sees")
    check(shared_encoder is not True, "shared_encoder", True, f"None or False, since critic_only={list(paths)}")
    return frozenset(paths)


def _dict_paths(space: spaces.Space[Any], path: str = "") -> Iterator[str]:
    """Yield the paths to parts of dicts that are in no tuple."""
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield join(path, key)
            yield from _dict_paths(part, join(path, key))


def network_of_actor(network: Network, actor_space: spaces.Space[Any], space: spaces.Space[Any]) -> Network:
    """Leave out the encoders of leaves that the actor does not see; unknown ones stay, to be refused."""
    if isinstance(network, str) or "class_path" in network:
        return network
    hidden = space_leaves(space).keys() - space_leaves(actor_space).keys()
    return {path: one for path, one in network.items() if path not in hidden}


T = TypeVar("T")


class Trunk(nn.Module):
    """Normaliser, encoders and recurrent cores, shared by actor and critic or one for each.

    All arguments but the space are options: see `PolicyConfig`, and for `normalize_observations` the option
    `observations` of `NormalizationConfig`.

    Args:
        observation_space: Of one environment; masks in it are not seen.

    Attributes:
        memory: Options of the memory; None without one.
        width: Number of features for the actor.
        value_width: Number of features for the critic.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        *,
        network: Network,
        hidden_sizes: Sequence[int],
        activation: str,
        discrete_encoding: DiscreteEncoding,
        shared_encoder: bool | None,
        critic_only: Sequence[str] | None,
        memory: Memory,
        normalize_observations: bool | dict[str, float],
    ) -> None:
        super().__init__()
        self.memory = MemoryOptions.parse(memory)
        self.observation_normalizer: ObservationNormalizer | NestedNormalizer | None = None
        encoded_space = observation_space
        if normalize_observations is not False:
            options = None if normalize_observations is True else normalize_observations
            self.observation_normalizer, encoded_space = make_normalizer(observation_space, options)
        self._mask_path = find_masks(observation_space)
        self._masks = frozenset(() if self._mask_path is None else (self._mask_path,))
        encoded_space = without(encoded_space, self._masks)
        self.critic_only = check_critic_only(critic_only, encoded_space, shared_encoder)
        actor_space = without(encoded_space, self.critic_only)
        # Any leaf that both see tells how many dimensions come before those of an observation.
        self._first_path, first = next(iter(space_leaves(actor_space).items()))
        self._first_dims = len(first.shape or ())
        images = any(map(is_image, space_leaves(observation_space).values()))
        shared = images and not self.critic_only if shared_encoder is None else shared_encoder
        mlp: Any = (hidden_sizes, activation, discrete_encoding)
        self.actor_encoder = make_encoder(actor_space, network_of_actor(network, actor_space, encoded_space), *mlp)
        self.critic_encoder: nn.Module | None = None
        if not shared:
            self.critic_encoder = make_encoder(encoded_space, network, *mlp)
        self.width = self.value_width = int(self.actor_encoder.out_features)  # type: ignore[arg-type]
        if self.critic_encoder is not None:
            self.value_width = int(self.critic_encoder.out_features)  # type: ignore[arg-type]
        self.actor_core: RecurrentCore | None = None
        self.critic_core: RecurrentCore | None = None
        if self.memory is not None:
            self.actor_core = RecurrentCore(self.width, self.memory)
            if self.memory.are_separate(shared):
                self.critic_core = RecurrentCore(self.value_width, self.memory)
            self.width = self.value_width = self.memory.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return next(self.parameters()).dtype

    def initial_memory(self, batch_size: int, critic: bool = True) -> Nested | None:
        """Return the memory before an episode, `[B, ...]`; None for a policy without one.

        Args:
            batch_size: `B`.
            critic: With that of a critic that has its own, to get values and log-probabilities too while acting.
        """
        if self.actor_core is None:
            return None
        memory = {"actor": self.actor_core.initial(batch_size)}
        if critic and self.critic_core is not None:
            memory["critic"] = self.critic_core.initial(batch_size)
        return memory

    def _features(self, observations: Nested, sequences: Sequences | None) -> tuple[Tensor, Tensor]:
        """Return features for actor and critic; with memory of rows `[N, *shape]`, those of `sequences`."""
        if self.memory is None:
            return self._encode_for_both(self.prepare_observations(observations))
        sequences = given(sequences, "sequences")
        memory = sequences.memory
        if sequences.burn_in is not None:
            with torch.no_grad():
                _, _, memory = self._run_cores(sequences.burn_in_observations, sequences.burn_in)
        features, value_features, _ = self._run_cores(observations, sequences, memory)
        return features, value_features

    def _acting_features(self, x: Nested, memory: Nested | None) -> tuple[Tensor, Tensor | None, Nested | None]:
        """Return, one step on, features for the actor, for the critic where they cost nothing more, and the memory.

        A critic with a core of its own has features where its memory is given.

        Args:
            x: Prepared observations.
            memory: Before the step.
        """
        encoded = self._encode_for_actor(x)
        if self.actor_core is None:
            return encoded, encoded if self.critic_encoder is None else None, None
        memory = given(memory, "memory")
        features, actor = self.actor_core.step(encoded, memory["actor"])
        if self.critic_core is None:
            return features, features, {"actor": actor}
        if "critic" not in memory:
            return features, None, {"actor": actor}
        if self.critic_encoder is not None:
            encoded = self._encode(self.critic_encoder, x)
        value_features, critic = self.critic_core.step(encoded, memory["critic"])
        return features, value_features, {"actor": actor, "critic": critic}

    def _actor_features(self, observations: Nested) -> Tensor:
        """Return those for the actor alone, without memory."""
        return self._encode_for_actor(self.prepare_observations(observations))

    def _value_features(self, observations: Nested, memory: Nested | None) -> Tensor:
        """Return those for the critic alone, with memory one step on."""
        encoder = self.actor_encoder if self.critic_encoder is None else self.critic_encoder
        features = self._encode(encoder, self.prepare_observations(observations))
        if self.actor_core is None:
            return features
        memory = given(memory, "memory")
        if self.critic_core is None:
            return self.actor_core.step(features, memory["actor"])[0]
        return self.critic_core.step(features, memory["critic"])[0]

    def prepare_observations(self, observations: Nested) -> Nested:
        """Leave out masks, normalise, and bring floating-point observations to the dtype of the parameters."""
        if self._masks:
            observations = without(observations, self._masks)
        if self.observation_normalizer is not None:
            observations = self.observation_normalizer(observations)
        dtype = self.dtype
        if isinstance(observations, Tensor) and observations.dtype is dtype:  # at each step of an environment
            return observations
        return map_leaves(lambda x: x.to(dtype) if x.is_floating_point() else x, observations)

    def _run_cores(
        self, observations: Nested, sequences: Sequences, memory: Nested | None = None
    ) -> tuple[Tensor, Tensor, Nested]:
        """Return features for actor and critic, and the memory after each sequence."""
        assert self.actor_core is not None
        memory = sequences.memory if memory is None else memory
        features, value_features = self._encode_for_both(self.prepare_observations(observations))
        after: dict[str, Nested] = {}
        actor, after["actor"] = self.actor_core(features, sequences.segments, memory["actor"])
        if self.critic_core is None:
            return actor, actor, after
        critic, after["critic"] = self.critic_core(value_features, sequences.segments, memory["critic"])
        return actor, critic, after

    def _encode_for_both(self, x: Nested) -> tuple[Tensor, Tensor]:
        """Return what the encoders make of prepared observations, for actor and critic."""
        features = self._encode_for_actor(x)
        return features, features if self.critic_encoder is None else self._encode(self.critic_encoder, x)

    def _encode_for_actor(self, observations: Nested) -> Tensor:
        if self.critic_only:
            observations = without(observations, self.critic_only)
        return self._encode(self.actor_encoder, observations)

    def _encode(self, encoder: nn.Module, observations: Nested) -> Tensor:
        """Return features `[..., f]`; encoders see rows `[N, *shape]`, whatever the leading dimensions are."""
        first = part_at(observations, self._first_path)
        num_leading = first.dim() - self._first_dims
        if num_leading == 1:
            return encoder(observations)  # type: ignore[no-any-return]
        leading = first.shape[:num_leading]
        rows = map_leaves(lambda x: x.flatten(0, num_leading - 1) if leading else x.unsqueeze(0), observations)
        features: Tensor = encoder(rows)
        return features.reshape(*leading, features.shape[-1])


def given(x: T | None, name: str) -> T:
    """Return what a policy with memory cannot do without."""
    if x is None:
        raise ValueError(
            f"a policy with memory needs {name}: initial_memory(batch_size) where episodes begin, then the memory that "
            "acting gave; actor_critic(batch) of the algorithm for the sequences of a batch"
        )
    return x


class ActorCritic(Trunk):
    """A trunk, which makes features of observations, with an action head and a value head upon it.

    All arguments but the spaces are options: see `PolicyConfig`, and for `normalize_observations` and
    `value_normalization` the options `observations` and `values` of `NormalizationConfig`. Values that this class
    returns are in units of return, whatever `value_normalization` is.

    Args:
        observation_space: `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, or any nesting of these in `Dict` and
            `Tuple`. `ActionMask`s in one part of it say which actions are valid; no encoder sees them.
        action_space: `Discrete`, `MultiDiscrete`, `MultiBinary`, `Box`, or any nesting of these in `Dict` and `Tuple`.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        network: Network = "auto",
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        discrete_encoding: DiscreteEncoding = "one_hot",
        shared_encoder: bool | None = None,
        critic_only: Sequence[str] | None = None,
        memory: Memory = None,
        value_normalization: ValueNormalization | None = None,
        normalize_observations: bool | dict[str, float] = False,
        initial_log_std: float = 0.0,
        action_distribution: ActionDistribution = None,
    ) -> None:
        super().__init__(
            observation_space,
            network=network,
            hidden_sizes=hidden_sizes,
            activation=activation,
            discrete_encoding=discrete_encoding,
            shared_encoder=shared_encoder,
            critic_only=critic_only,
            memory=memory,
            normalize_observations=normalize_observations,
        )
        mask_space = None if self._mask_path is None else part_at(observation_space, self._mask_path)
        self.action_head = make_action_head(action_space, self.width, initial_log_std, action_distribution, mask_space)
        self.value_head = HeadLinear(self.value_width, 1, gain=1.0)
        self.value_normalizer = make_value_normalizer(value_normalization)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.value_head.weight.dtype

    @property
    def chooses_rows_alone(self) -> bool:
        """Whether each action depends only on its own observation and a fixed amount of noise.

        False with memory, and with beta distributions, whose sampler rejects a varying number of draws.
        """
        return self.memory is None and not any(isinstance(module, BetaHead) for module in self.action_head.modules())

    def forward(self, observations: Nested, sequences: Sequences | None = None) -> tuple[Distribution, Tensor]:
        """Return the action distribution `[...]` and the value `[...]` at observations `[..., *shape]`.

        Args:
            observations: For a policy with memory rows `[N, *shape]`, those of `sequences`.
            sequences: Which rows follow one another; for a policy with memory.

        Raises:
            ValueError: A policy with memory was not given them.
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
        """Choose an action for every row; see `Policy.act`. What is for the critic only may be missing.

        Args:
            observations: `[B, *shape]`.
            generator: Draws the actions.
            deterministic: Take the mode of the action distribution.
            memory: Of a policy that has one: `initial_memory` where an episode begins, then that of the last output.

        Raises:
            ValueError: A policy with memory was not given one.
        """
        features, value_features, after = self._acting_features(self.prepare_observations(observations), memory)
        distribution = self._distribution(features, observations)
        action = distribution.mode() if deterministic else distribution.sample(generator)
        output = PolicyOutput(action, environment_action=distribution.to_space(action), memory=after)
        if value_features is not None:
            output.log_prob, output.value = distribution.log_prob(action), self.value_of(value_features)
        return output

    def log_prob(self, observations: Nested, actions: Nested) -> Tensor:
        """Return log-probabilities of actions; see `Policy.log_prob`. With memory `act` and `forward` give them."""
        if self.memory is not None:
            raise ValueError(
                "log_prob is for policies without memory: act and forward give log-probabilities of others"
            )
        return self._distribution(self._actor_features(observations), observations).log_prob(actions)

    def value(self, observations: Nested, memory: Nested | None = None) -> Tensor:
        """Return value estimates; see `Policy.value`. With memory of observations `[B, *shape]`, one step from there.

        Raises:
            ValueError: A policy with memory was not given one.
        """
        return self.value_of(self._value_features(observations, memory))

    def saturation(self, actions: Nested) -> Tensor | None:
        """Return the share of components of `actions` that are clipped to the bounds; None where none may be."""
        head: Any = self.action_head
        clipped: Tensor | None = head.clipped(actions) if hasattr(head, "clipped") else None
        return None if clipped is None else clipped.sum() / max(clipped.numel(), 1)

    def _distribution(self, features: Tensor, observations: Nested) -> Distribution:
        if self._mask_path is None:
            return self.action_head(features)  # type: ignore[no-any-return]
        return self.action_head(features, part_at(observations, self._mask_path))  # type: ignore[no-any-return]

    @property
    def value_heads(self) -> list[HeadLinear]:
        """Every head that predicts returns."""
        return [self.value_head]

    def value_of(self, features: Tensor) -> Tensor:
        """Return the value, in units of return, of features for the critic; a subclass may change the features."""
        return self._from_head(self.value_head, features)

    def _from_head(self, head: nn.Module, features: Tensor) -> Tensor:
        """Return what a value head predicts, in units of return."""
        values: Tensor = head(features).squeeze(-1)
        return values if self.value_normalizer is None else self.value_normalizer.denormalize(values)


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LAZY_BATCH_NORM = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)
_ALWAYS_DIFFERENT = (*_BATCH_NORM, *_LAZY_BATCH_NORM, nn.RReLU)


def check_modes_agree(policy: nn.Module) -> None:
    """Raise if a policy acts otherwise than it learns: rollouts would not be those of the policy that is updated.

    Raises:
        ConfigurationError: It has a layer of dropout or batch normalisation; names it.
    """
    for name, module in policy.named_modules():
        differs = isinstance(module, _ALWAYS_DIFFERENT) or (isinstance(module, _DROPOUT) and module.p > 0)
        expected = "no dropout or batch normalisation, which act otherwise than they learn; LayerNorm does not"
        check(not differs, f"policy: {name}", module, expected)


def copy_to_cpu(policy: nn.Module) -> nn.Module:
    """Return a copy of a policy whose parameters and buffers are on the CPU; the policy stays where it is."""
    tensors = [*policy.parameters(), *policy.buffers()]
    # Taken for copies that were made already.
    copies: dict[int, Any] = {id(x): x.detach().to("cpu", copy=True) for x in tensors}
    copies |= {id(x): nn.Parameter(copies[id(x)]) for x in policy.parameters()}
    return copy.deepcopy(policy, copies)
