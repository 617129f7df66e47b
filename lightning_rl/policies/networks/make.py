"""Makes the encoder of an observation space from plain data."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import torch
from gymnasium import spaces
from torch import nn

from lightning_rl.nested import space_leaves
from lightning_rl.policies.networks.images import ImpalaEncoder, NatureEncoder, network_for_image
from lightning_rl.policies.networks.mlp import DiscreteEncoding, MLPEncoder
from lightning_rl.spaces import is_image, sampled_observations
from lightning_rl.validation import ClassSpec, check, instantiate, to_class_spec

# Not `dict[str, Any]`: jsonargparse would instantiate the class specs of leaves.
Network = str | dict[str, str | dict[str, Any] | None]
"""A name, a class spec, or these by the path of a leaf: `{"camera": "impala", "arm.0": {"class_path": ...}}`."""


_OF_IMAGES = ("auto", "nature", "impala")


def is_by_path(network: Network) -> TypeGuard[dict[str, Any]]:
    """Whether a value of `network` has a network for each of some leaves, by path."""
    return isinstance(network, dict) and "class_path" not in network


def make_encoder(
    space: spaces.Space[Any],
    network: Network = "auto",
    hidden_sizes: Sequence[int] = (64, 64),
    activation: str = "tanh",
    discrete_encoding: DiscreteEncoding = "one_hot",
    whole: spaces.Space[Any] | None = None,
) -> nn.Module:
    """Return an encoder for an observation space, an `nn.Module` with an integer attribute `out_features`.

    In a nested space every image gets its own convolutional network. One MLP takes the concatenation of their features
    and all other leaves.

    Args:
        space: `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, or any nesting of these in `Dict` and `Tuple`.
        network: `auto` (Nature CNN for images of at least 36×36 pixels, IMPALA CNN for smaller ones, else MLP), `mlp`
            (also for images), `nature`, `impala`, or `{"class_path": ..., "init_args": ...}` of an `nn.Module` whose
            first argument is the observation space and which has `out_features`. For a nested space also a dict from
            the paths of some leaves to one of these; other leaves stay at `auto`.
        hidden_sizes: Layer widths of each MLP, for leaves with the network `mlp` too.
        activation: See `PolicyConfig`.
        discrete_encoding: See `PolicyConfig`.
        whole: Space of which `space` is a part; `network` is for its leaves. None: `space`.

    Raises:
        ConfigurationError: The space is not supported, or a name, a path or a class is not valid.
    """
    mlp = (hidden_sizes, activation, discrete_encoding)
    leaves = space_leaves(space) if isinstance(space, spaces.Dict | spaces.Tuple) else {}
    whole = space if whole is None else whole
    if is_by_path(network):
        known = f"paths of leaves ({', '.join(space_leaves(whole))})" if leaves else "a dict with 'class_path'"
        unknown = ", ".join(map(repr, network.keys() - space_leaves(whole)))
        check(not unknown, "policy.network", network, f"{known}, got {unknown}")
    chosen = name_image_networks(whole, network)
    if not is_by_path(chosen):
        expected = f"auto or mlp, since there is no image in {space}"
        check(not leaves or chosen not in ("nature", "impala"), "policy.network", network, expected)
        return _flat_encoder("policy.network", space, chosen, mlp)
    own = {path: one for path, one in chosen.items() if path in leaves}
    made = {path: _flat_encoder(f"policy.network.{path}", leaves[path], one, mlp) for path, one in own.items()}
    return MLPEncoder(space, *mlp, {path: made[path] for path in leaves if path in made})


def name_image_networks(space: spaces.Space[Any], network: Network = "auto") -> Network:
    """Return `network`, by path if nested, with names of the image networks, which `auto` would not choose later."""
    images = {path: network_for_image(leaf) for path, leaf in space_leaves(space).items() if is_image(leaf)}
    named: dict[str, Any]
    if is_by_path(network):
        images.pop("", None)  # paths do not suit a flat image, which `make_encoder` refuses
        named = network | {path: name for path, name in images.items() if network.get(path, "auto") == "auto"}
    elif network in _OF_IMAGES:
        named = images if network == "auto" else dict.fromkeys(images, network)
    else:
        return network
    return cast(Network, named.get("", named or network))


def network_to_plain_data(network: Any) -> Network:  # names, classes, or dicts of them
    """Replace the classes in a value of `network` by their class paths and arguments."""
    if isinstance(network, str):
        return network
    if is_by_path(network):
        return {
            path: one if isinstance(one, str) else to_class_spec(f"policy.network.{path}", one)
            for path, one in network.items()
        }
    return to_class_spec("policy.network", network)


def _flat_encoder(
    field: str, space: spaces.Space[Any], network: str | ClassSpec, mlp: tuple[Sequence[int], str, DiscreteEncoding]
) -> nn.Module:
    if network in ("auto", "mlp"):
        return MLPEncoder(space, *mlp)
    if network == "nature":
        return NatureEncoder(space)
    if network == "impala":
        return ImpalaEncoder(space)
    expected = "auto, mlp, nature, impala or a class_path"
    check(not isinstance(network, str) or "." in network, field, network, expected)
    spec = to_class_spec(field, network)
    encoder: nn.Module = instantiate(field, spec, nn.Module, space)
    has_width = isinstance(getattr(encoder, "out_features", None), int)
    expected = "an nn.Module with an integer attribute out_features, the number of features of one observation"
    check(has_width, field, spec["class_path"], expected)
    weight = next(encoder.parameters(), torch.zeros(0))
    found = [2, encoder.out_features]
    # A network that fails here, such as one for GPUs alone, works or fails with its own error when it acts. The copy
    # may count what it sees.
    with contextlib.suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = list(copy.deepcopy(encoder)(sampled_observations(space, weight.dtype, num_rows=2, seed=0)).shape)
    expected = f"features {[2, encoder.out_features]} for 2 observations, by its out_features, got {found}"
    check(found == [2, encoder.out_features], field, spec["class_path"], expected)
    return encoder
