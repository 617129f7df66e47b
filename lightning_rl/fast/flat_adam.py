"""Adam for small networks: one vector per parameter group, so that each operation needs one kernel per group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

# PyTorch has no public way to find the hooks of all optimizers. Checked with PyTorch 2.8 and 2.13.
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from lightning_rl.validation import ClassSpec

# PyTorch's allocator has the same alignment; kernels round differently at other alignments.
_ALIGNMENT_BYTES = 64
# Copying the gradients of larger networks takes longer than starting one kernel per tensor.
_MOST_ENTRIES = 2**18


def default_optimizer(model: Any) -> ClassSpec | None:  # noqa: ANN401 - an algorithm
    """Return `FlatAdam` for whole parameters on CPU and CUDA devices, None for others or without fast paths."""
    has_vectors = model.device.type in ("cpu", "cuda") and model.device_mesh is None
    if model.options["debug.fast_paths"] == "none" or not has_vectors:
        return None
    return {"class_path": "lightning_rl.fast.FlatAdam", "init_args": {"eps": 1e-5, "fused": True}}


class FlatAdam(Adam):
    """`torch.optim.Adam` with the parameters, gradients and moments of each group in one vector each.

    A step runs one kernel per group instead of one per tensor; with small networks, starting kernels takes most of the
    time. Parameters and moments become views of the vectors. The state dict has Adam's format, so that either class
    loads state of the other.

    Adam's own step is used for groups that are not `fused`, have more than 2**18 entries, mix dtypes or devices, or
    contain parameters without a gradient. The arguments are Adam's.
    """

    _laid_out: dict[int, Vectors | None] | None = None  # by id of the group; None: Adam's own step

    _has_step_hooks = False

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:  # noqa: ANN401 - a type that is private to PyTorch
        self._has_step_hooks = True
        return super().register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:  # noqa: ANN401 - a type that is private to PyTorch
        self._has_step_hooks = True
        return super().register_step_post_hook(hook)

    def vectors(self) -> list[Tensor]:
        """Return tensors whose `grad` together hold all gradients: one vector per group, or the group's parameters.

        The next step uses these gradients; clip or scale them in place after the backward pass.
        """
        found: list[Tensor] = []
        for group in self.param_groups:
            vectors = self._vectors_of(group)
            own = group["params"] if vectors is None else [vectors.values]
            found += [tensor for tensor in own if tensor.grad is not None]
        return found

    def all_vectors(self) -> list[Vectors] | None:
        """Return the vectors of all groups, with the parameters' gradients as views; None if a group has no vectors."""
        if self._is_watched():
            return None
        found: list[Vectors] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            vectors = self._vectors_of(group)
            if vectors is None:
                return None
            found.append(vectors)
        return found

    def step_alone(self) -> None:
        """Take a step without the profiling and hooks of `step()`, which take longer than the step of a small network.

        Calls `step()` if the optimizer has hooks. Call `vectors` before, and only change their gradients in between.
        """
        found = [(self._laid_out or {}).get(id(group)) for group in self.param_groups]
        ready = [vectors for vectors in found if vectors is not None and vectors.have_gradients()]
        if len(ready) < len(found) or self._is_watched():
            self.step()
            return
        for vectors in ready:
            vectors.take_step(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._laid_out = None  # the vectors hold the previous state

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Take the step of a group with vectors, and give Adam nothing to do; leave other groups to Adam.

        Overrides a private method of PyTorch, because an override of `step` would run the hooks twice.
        """
        vectors = self._vectors_of(group)
        if vectors is None:
            return super()._init_group(group, *lists)  # type: ignore[no-any-return, no-untyped-call]
        vectors.take_step(self)
        return False

    def _is_watched(self) -> bool:
        """Whether hooks or a scheduler, which replaces `step` to count, need a call of `step`."""
        hooks = (self._has_step_hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)
        return any(hooks) or "step" in vars(self)

    def _vectors_of(self, group: dict[str, Any]) -> Vectors | None:
        """Return the vectors of a group with the current gradients; None if the group has no vectors."""
        if self._laid_out is None:
            self._laid_out = {}
        key = id(group)
        if key in self._laid_out:
            vectors = self._laid_out[key]
            if vectors is None or vectors.gather(self):
                return vectors
        vectors = Vectors(self, group) if self._can_lay_out(group) else None
        if any(parameter.grad is not None for parameter in group["params"]):
            self._laid_out[key] = vectors
        return vectors

    def _can_lay_out(self, group: dict[str, Any]) -> bool:
        parameters: list[Tensor] = group["params"]
        first = parameters[0]
        return (
            bool(group["fused"])
            and not (group["amsgrad"] or group["decoupled_weight_decay"])
            and first.device.type in ("cpu", "cuda")
            and sum(parameter.numel() for parameter in parameters) <= _MOST_ENTRIES
            and all(
                parameter.grad is not None
                and parameter.dtype == first.dtype
                and parameter.device == first.device
                and parameter.is_contiguous()
                for parameter in parameters
            )
            # The vector has one step count for all parameters.
            and len({float(self.state[parameter].get("step", 0)) for parameter in parameters}) == 1
        )


class Vectors:
    """Parameters, gradients and state of a parameter group as one vector each.

    Attributes:
        values: Vector of the parameters; `values.grad` is the vector of the gradients.
        exp_avg: Vector of the first moments.
        exp_avg_sq: Vector of the second moments.
        steps: Number of steps, one equal entry per parameter.
    """

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self.group = group
        self.parameters: list[nn.Parameter] = group["params"]
        first = self.parameters[0]
        alignment = _ALIGNMENT_BYTES // first.element_size()
        sizes = [-(-parameter.numel() // alignment) * alignment for parameter in self.parameters]
        self.begins = [0, *itertools.accumulate(sizes)]
        states = [optimizer.state[parameter] for parameter in self.parameters]
        self.values, values = self._side_by_side([parameter.detach() for parameter in self.parameters])
        self.exp_avg, self._moments = self._side_by_side([state.get("exp_avg") for state in states])
        self.exp_avg_sq, squares = self._side_by_side([state.get("exp_avg_sq") for state in states])
        self.values.grad, self._gradients = self._side_by_side([parameter.grad for parameter in self.parameters])
        self.steps = torch.full((len(states),), float(states[0].get("step", 0)), device=first.device)
        for state, *entries in zip(states, self.steps.unbind(), self._moments, squares, strict=True):
            state |= dict(zip(("step", "exp_avg", "exp_avg_sq"), entries, strict=True))
        for parameter, view, gradient in zip(self.parameters, values, self._gradients, strict=True):
            parameter.data, parameter.grad = view, gradient
        self._places = [parameter.data_ptr() for parameter in self.parameters]
        self._rate, self._rate_tensor = -1.0, torch.zeros((), dtype=torch.float64)

    def places(self) -> list[tuple[nn.Parameter, tuple[int, int, torch.Size]]]:
        """Return each parameter with its offset in the vector, its size and its shape."""
        pairs = zip(self.parameters, self.begins, strict=False)
        return [(parameter, (begin, parameter.numel(), parameter.shape)) for parameter, begin in pairs]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return parameters, gradients, first and second moments, numbers of steps, and the learning rate."""
        assert self.values.grad is not None
        self.update_rate()
        return self.values, self.values.grad, self.exp_avg, self.exp_avg_sq, self.steps, self._rate_tensor

    def update_rate(self) -> None:
        """Copy the learning rate of the group into the tensor that `tensors` returns."""
        if self.group["lr"] != self._rate:
            self._rate = float(self.group["lr"])
            self._rate_tensor.fill_(self._rate)

    def gather(self, optimizer: Optimizer) -> bool:
        """Copy the gradients into their vector.

        Return False if a gradient is missing, or if parameters or state were replaced and are not views any more. The
        state stays correct in this case: each parameter keeps its view.
        """
        states = optimizer.state
        for parameter, place, moments in zip(self.parameters, self._places, self._moments, strict=True):
            is_here = parameter.data_ptr() == place and states[parameter].get("exp_avg") is moments
            if not is_here or parameter.grad is None:
                return False
        if not self.have_gradients():
            assert self.values.grad is not None
            # Clipping non-finite gradients also writes NaN into the padding.
            self.values.grad.zero_()
            # Private to PyTorch: one kernel instead of one per gradient.
            torch._foreach_copy_(self._gradients, [cast(Tensor, parameter.grad) for parameter in self.parameters])
            for parameter, view in zip(self.parameters, self._gradients, strict=True):
                parameter.grad = view
        return True

    def have_gradients(self) -> bool:
        """Whether the gradients of the parameters are views of the vector."""
        return all(p.grad is view for p, view in zip(self.parameters, self._gradients, strict=True))

    def take_step(self, optimizer: Optimizer) -> None:
        """Take a step with the kernel of fused Adam."""
        assert self.values.grad is not None
        group, found_inf = self.group, getattr(optimizer, "found_inf", None)
        self.steps += 1
        # Private to PyTorch (2.8 and 2.13 tested): `Adam.step` takes longer than its kernel.
        torch._fused_adam_(
            *([self.values], [self.values.grad], [self.exp_avg], [self.exp_avg_sq], [], [self.steps[0]]),
            lr=group["lr"],
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=group["maximize"],
            grad_scale=getattr(optimizer, "grad_scale", None),
            found_inf=found_inf,
        )
        if found_inf is not None:  # the kernel skipped the step
            self.steps -= found_inf

    def _side_by_side(self, parts: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
        """Return a vector of `parts`, with zeros for None and padding, and its views in the parameters' shapes."""
        first = self.parameters[0]
        vector = torch.zeros(self.begins[-1], dtype=first.dtype, device=first.device)
        places = zip(self.begins, self.parameters, strict=False)
        views = [vector[begin : begin + parameter.numel()].view_as(parameter) for begin, parameter in places]
        for view, part in zip(views, parts, strict=True):
            if part is not None:
                view.copy_(part)
        return vector, views
