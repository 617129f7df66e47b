"""What of an observation actor and critic see, and how it is normalised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from lightning_rl.nested import join, replace_leaves, space_leaves, without
from lightning_rl.networks import Network, is_image
from lightning_rl.normalization import NestedNormalizer, ObservationNormalizer
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
