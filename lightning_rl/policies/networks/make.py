"""From the space of observations and plain data to an encoder."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.nested import space_leaves
from lightning_rl.policies.networks.images import ImpalaEncoder, NatureEncoder, network_for_image
from lightning_rl.policies.networks.mlp import DiscreteEncoding, MLPEncoder
from lightning_rl.spaces import is_image, sampled_observations
from lightning_rl.validation import ClassSpec, ConfigurationError, check, instantiate, to_class_spec

# Not `dict[str, Any]`: a parser of configurations would make objects of the class specs of leaves.
Network = str | dict[str, str | dict[str, Any] | None]
"""A name, a class spec, or these by the path of a leaf: `{"camera": "impala", "arm.0": {"class_path": ...}}`."""
_NAMES = ("auto", "mlp", "nature", "impala")


def make_encoder(
    space: spaces.Space[Any],
    network: Network = "auto",
    hidden_sizes: Sequence[int] = (64, 64),
    activation: str = "tanh",
    discrete_encoding: DiscreteEncoding = "one_hot",
) -> nn.Module:
    """Return an encoder for an observation space; it has `out_features`.

    Of a nested space every image has a convolutional network of its own. One MLP takes their features and all other
    leaves, side by side, so that what is seen in one can be weighed by another.

    Args:
        space: `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, or any nesting of these in `Dict` and `Tuple`.
        network: `auto` (Nature CNN for images of at least 36×36 pixels, IMPALA CNN for smaller ones, else MLP),
            `mlp` (for images too), `nature`, `impala`, or `{"class_path": ..., "init_args": ...}` of an `nn.Module`
            whose first argument is the observation space and which has an integer attribute `out_features`. For a
            nested space also a dict that gives some leaves an encoder of their own, by path; others stay at `auto`.
        hidden_sizes: Layers of each MLP: of the one that joins the leaves, and of leaves whose network is `mlp`.
        activation: Activation of each MLP.
        discrete_encoding: What an MLP makes of `Discrete` and `MultiDiscrete` leaves: `one_hot` vectors, or an
            `embedding` that is learned, of round(1.6 · n^0.56) numbers for n classes.

    Raises:
        ConfigurationError: The space, the name, a path or the class cannot be used.
    """
    is_nested = isinstance(space, spaces.Dict | spaces.Tuple)
    mlp = (hidden_sizes, activation, discrete_encoding)
    if isinstance(network, dict) and "class_path" not in network:
        leaves = space_leaves(space) if is_nested else {}
        known = f"paths of leaves ({', '.join(leaves)})" if is_nested else "a dict with 'class_path'"
        for path in network:
            check(path in leaves, "network", network, f"{known}, got {path!r}")
        given = {
            path: _flat_encoder(f"network.{path}", leaves[path], cast(str | ClassSpec, one), *mlp)
            for path, one in network.items()
        }
        return MLPEncoder(space, *mlp, _encoders_of_images(space, "auto", given))
    if not is_nested or network == "mlp" or not isinstance(network, str) or network not in _NAMES:
        return _flat_encoder("network", space, network, *mlp)
    encoders = _encoders_of_images(space, network, {})
    if network != "auto":
        check(bool(encoders), "network", network, f"auto or mlp, since there is no image in {space}")
    return MLPEncoder(space, *mlp, encoders)


def network_to_plain_data(network: Any) -> Network:  # noqa: ANN401 - names, classes, or dicts of them
    """Reduce the classes in what `make_encoder` takes to their class paths and arguments.

    Raises:
        ConfigurationError: One cannot be rebuilt from these.
    """
    if isinstance(network, str):
        return network
    if isinstance(network, dict) and "class_path" not in network:
        return {
            path: one if isinstance(one, str) else to_class_spec(f"network.{path}", one)
            for path, one in network.items()
        }
    return to_class_spec("network", network)


def _encoders_of_images(space: spaces.Space[Any], network: str, given: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return, in the order of leaves, the given encoders, and one for each other image."""
    encoders: dict[str, nn.Module] = {}
    for path, leaf in space_leaves(space).items():
        if path in given:
            encoders[path] = given[path]
        elif is_image(leaf):
            encoders[path] = _flat_encoder("network", leaf, network, (), "tanh", "one_hot")
    return encoders


def _flat_encoder(
    field: str,
    space: spaces.Space[Any],
    network: str | ClassSpec,
    hidden_sizes: Sequence[int],
    activation: str,
    discrete_encoding: DiscreteEncoding,
) -> nn.Module:
    """Return one encoder for all of `space`."""
    if network == "auto":
        network = network_for_image(space) if is_image(space) else "mlp"
    if network == "mlp":
        return MLPEncoder(space, hidden_sizes, activation, discrete_encoding)
    if network == "nature":
        return NatureEncoder(space)
    if network == "impala":
        return ImpalaEncoder(space)
    if isinstance(network, str) and "." not in network:
        raise ConfigurationError(
            f"{field}={network!r} is not valid: expected auto, mlp, nature, impala or a class_path"
        )
    spec = to_class_spec(field, network)
    encoder: nn.Module = instantiate(field, spec, nn.Module, space)
    if not isinstance(getattr(encoder, "out_features", None), int):
        raise ConfigurationError(
            f"{field}: {spec['class_path']} is not an encoder: expected an nn.Module with an integer attribute "
            "'out_features', the size of what its forward returns for one observation"
        )
    _check_width(field, spec["class_path"], encoder, space)
    return encoder


def _check_width(field: str, name: str, encoder: nn.Module, space: spaces.Space[Any], rows: int = 2) -> None:
    """Raise where an encoder makes of observations what is not as wide as it says.

    Raises:
        ConfigurationError: Says what was to come, and what came.
    """
    dtype = next((x.dtype for x in encoder.parameters()), torch.get_default_dtype())
    try:
        # A run is to begin, and to draw numbers, as it would without this.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            made = copy.deepcopy(encoder)(sampled_observations(space, dtype, rows))
    except Exception:  # it may need the device that it will be on; otherwise it says the same in the first rollout
        return
    came = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
    expected = [rows, encoder.out_features]
    if came != expected:
        raise ConfigurationError(
            f"{field}: {name} has out_features={encoder.out_features}, but its forward made {came} of {rows} "
            f"observations: expected {expected}"
        )
