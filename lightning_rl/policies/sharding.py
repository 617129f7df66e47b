"""Policies whose parameters are sharded over ranks (FSDP2), and unsharded copies of these policies that act."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lightning_rl.policies.distributions import Distribution

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Methods that use parameters and are called from outside of the policy; before each call FSDP2 gathers the parameters.
_FORWARD = ("act", "log_prob", "value", "forward_auxiliary")


def shard(policy: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the parameters of a policy over the ranks of a mesh, in place, and return an unsharded copy for acting."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    whole_policy = copy.deepcopy(policy)
    # FSDP2 notices a backward pass by the gradients of tensors in the output, but does not look into distributions.
    policy.register_forward_hook(lambda module, inputs, output: (output, [*_tensors(output)]))
    # Parameters stay gathered for the loss, which also uses parameters in distributions and penalties.
    fully_shard(policy, mesh=mesh, reshard_after_forward=False)
    policy.register_forward_hook(lambda module, inputs, output: output[0])
    for name in _FORWARD:
        if hasattr(policy, name):
            register_fsdp_forward_method(policy, name)
    return whole_policy


def _tensors(x: Any) -> Iterator[Tensor]:  # the output of a policy
    if isinstance(x, Tensor) and not x.is_leaf:
        yield x
    elif isinstance(x, Distribution):
        yield from _tensors(vars(x))
    elif isinstance(x, dict | list | tuple):
        for part in x.values() if isinstance(x, dict) else x:
            yield from _tensors(part)


def reshard(policy: nn.Module) -> None:
    """Drop the gathered parameters: after a change of the shards they would be outdated."""
    if hasattr(policy, "reshard"):
        cast(Any, policy).reshard()


@torch.no_grad()
def copy_whole(policy: nn.Module, target: nn.Module) -> None:
    """Copy parameters and buffers of a sharded policy to its unsharded copy; a collective call."""
    first = next(policy.parameters())
    target.to(first.device, first.dtype)
    sources = (*policy.parameters(), *policy.buffers())
    for own, source in zip((*target.parameters(), *target.buffers()), sources, strict=True):
        own.copy_(whole(source))


def is_sharded(x: Tensor) -> bool:
    """Whether a tensor is the shard of this rank, a `DTensor`."""
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """Return the whole tensor of a shard, a collective call that averages gradients; other tensors unchanged."""
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import Partial

    return cast(Tensor, x.full_tensor(grad_placements=[Partial("avg")]))  # type: ignore[attr-defined]
