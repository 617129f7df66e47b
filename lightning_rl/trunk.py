"""From observations to features: what comes before the heads of an actor-critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.masks import find_masks
from lightning_rl.memory import Memory, MemoryOptions, RecurrentCore
from lightning_rl.nested import Nested, map_leaves, part_at, space_leaves, without
from lightning_rl.networks import DiscreteEncoding, Network, is_image, make_encoder
from lightning_rl.normalization import NestedNormalizer, ObservationNormalizer
from lightning_rl.observations import check_critic_only, make_normalizer, network_of_actor
from lightning_rl.rollouts.sequences import Sequences

T = TypeVar("T")


class Trunk(nn.Module):
    """Normaliser, encoders and recurrent cores, shared by actor and critic or one for each.

    Args:
        observation_space: Of one environment; masks in it are not seen.
        network: See `lightning_rl.networks.make_encoder`.
        hidden_sizes: Layers of the MLP.
        activation: Activation of the MLP.
        discrete_encoding: `one_hot` or `embedding`.
        shared_encoder: One encoder for actor and critic; None shares it where there is an image and nothing is for the
            critic only.
        critic_only: Paths of parts of a `Dict` that the actor does not see.
        memory: What a recurrent core is like; None: there is none.
        normalize_observations: Whether and how to standardise every `Box` that is no image.

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
            "acting gave; evaluate(batch) of the algorithm for the sequences of a batch"
        )
    return x
