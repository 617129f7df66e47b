"""Policies whose parameters are sharded over ranks (FSDP2), and unsharded copies of these policies that act."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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


def leave_optimizers_to_module(strategy: Any) -> None:
    """Keep a `ModelParallelStrategy` from loading optimizers: it expects a state of each parameter, in model order."""
    load_all = strategy.load_checkpoint

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        optimizers, strategy.optimizers = strategy.optimizers, []
        try:
            return load_all(*args, **kwargs)
        finally:
            strategy.optimizers = optimizers

    strategy.load_checkpoint = load_checkpoint


def load_optimizer(optimizer: Optimizer, stored: Mapping[str, Any]) -> None:
    """Load a state with whole tensors by the order of its parameters; any parameter may lack one. A collective call."""
    from torch.distributed.tensor import distribute_tensor

    def local(x: Any, parameter: Any) -> Any:
        if not (isinstance(x, Tensor) and is_sharded(parameter) and x.shape == parameter.shape):
            return x
        return distribute_tensor(x.to(parameter.device), parameter.device_mesh, parameter.placements)

    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    numbers = [number for group in stored["param_groups"] for number in group["params"]]
    state = {
        number: {name: local(x, parameter) for name, x in stored["state"][number].items()}
        for number, parameter in zip(numbers, parameters, strict=True)
        if number in stored["state"]
    }
    optimizer.load_state_dict({**stored, "state": state})


def is_sharded(x: Tensor) -> bool:
    """Whether a tensor is the shard of this rank, a `DTensor`."""
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """Return the whole tensor of a shard, a collective call that averages gradients; other tensors unchanged."""
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import Partial

    return cast(Tensor, x.full_tensor(grad_placements=[Partial("avg")]))  # type: ignore[attr-defined]
