"""Adam for small networks: one vector per parameter group, so that each operation needs one kernel per group."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
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


def default_optimizer(model: Any) -> ClassSpec | None:  # an algorithm
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

    Adam's own step is used if a group is not `fused`, has more than 2**18 entries, mixes dtypes or devices, or contains
    parameters without a gradient. The arguments are Adam's.
    """

    _vectors: list[Vectors] | None = None  # one per group; [] if Adam takes the steps, None if not known yet
    _has_step_hooks = False

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:  # a type that is private to PyTorch
        self._has_step_hooks = True
        return super().register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:  # a type that is private to PyTorch
        self._has_step_hooks = True
        return super().register_step_post_hook(hook)

    @property
    def is_watched(self) -> bool:
        """Whether hooks or a scheduler, which replaces `step` to count, need a call of `step`."""
        hooks = (self._has_step_hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)
        return any(hooks) or "step" in vars(self)

    def vectors(self) -> list[Vectors]:
        """Return the vectors of all groups with the current gradients; an empty list if Adam takes the step itself.

        The next step uses these gradients; clip or scale them in place after the backward pass.
        """
        found = self._vectors
        if found is None or not all(vectors.gather(self) for vectors in found):
            have_gradients = [x.grad is not None for group in self.param_groups for x in group["params"]]
            suited = all(have_gradients) and all(map(self._can_lay_out, self.param_groups))
            found = [Vectors(self, group) for group in self.param_groups] if suited else []
            if any(have_gradients):
                # After a step without some gradients, a resumed run would use vectors, whose steps round differently.
                self._vectors = found if all(have_gradients) else None
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; return the result of `closure`, which computes loss and gradients again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not (found := self.vectors()):
            inspect.unwrap(Adam.step)(self)  # the wrapper of `Adam.step` would call the hooks once more
        for vectors in found:
            vectors.take_step(self)
        return loss

    def step_alone(self) -> None:
        """Take a step without the profiling and hooks of `step()`, which take longer than the step of a small network.

        Calls `step()` if the optimizer has hooks. Call `vectors` before, and only change their gradients in between.
        """
        found = self._vectors
        if not found or self.is_watched or not all(vectors.have_gradients() for vectors in found):
            self.step()
            return
        for vectors in found:
            vectors.take_step(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._vectors = None  # they lack the new group

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._vectors = None  # they hold the previous groups, even if the moments are the same tensors

    def _can_lay_out(self, group: dict[str, Any]) -> bool:
        parameters: list[Tensor] = group["params"]
        first = parameters[0]
        return (
            bool(group["fused"])
            and not (group["amsgrad"] or group["decoupled_weight_decay"])
            and first.device.type in ("cpu", "cuda")
            and sum(parameter.numel() for parameter in parameters) <= _MOST_ENTRIES
            and all(
                parameter.dtype == first.dtype and parameter.device == first.device and parameter.is_contiguous()
                for parameter in parameters
            )
            # The vector has one step count for all parameters.
            and len({float(self.state[parameter].get("step", 0)) for parameter in parameters}) == 1
        )


class Vectors:
    """Parameters, gradients and state of a parameter group as one vector each.

    Attributes:
        values: Vector of the parameters.
        gradient: Vector of the gradients, which is also `values.grad`.
        exp_avg: Vector of the first moments.
        exp_avg_sq: Vector of the second moments.
        paddings: Number of zeros after each parameter in the vectors.
        steps: Number of steps, one equal entry per parameter.
    """

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self.group = group
        self.parameters: list[nn.Parameter] = group["params"]
        first = self.parameters[0]
        alignment = _ALIGNMENT_BYTES // first.element_size()
        sizes = [-(-parameter.numel() // alignment) * alignment for parameter in self.parameters]
        self.begins = [0, *itertools.accumulate(sizes)]
        self.paddings = [size - parameter.numel() for size, parameter in zip(sizes, self.parameters, strict=True)]
        states = [optimizer.state[parameter] for parameter in self.parameters]
        self.values, values = self._side_by_side([parameter.detach() for parameter in self.parameters])
        self.exp_avg, self._moments = self._side_by_side([state.get("exp_avg") for state in states])
        self.exp_avg_sq, squares = self._side_by_side([state.get("exp_avg_sq") for state in states])
        self.gradient, self._gradients = self._side_by_side([parameter.grad for parameter in self.parameters])
        self.values.grad = self.gradient
        steps = float(states[0].get("step", 0))
        # Adam's kernels for GPUs read float32, whatever the default dtype is.
        self.steps = torch.full((len(states),), steps, dtype=torch.float32, device=first.device)
        for state, *entries in zip(states, self.steps.unbind(), self._moments, squares, strict=True):
            state |= dict(zip(("step", "exp_avg", "exp_avg_sq"), entries, strict=True))
        for parameter, view, gradient in zip(self.parameters, values, self._gradients, strict=True):
            parameter.data, parameter.grad = view, gradient
        self._places = [parameter.data_ptr() for parameter in self.parameters]
        # Not a scalar, which PyTorch's compiler takes for a number first, and then starts again.
        self._rate, self._rate_tensor = -1.0, torch.zeros(1, dtype=torch.float64, device=first.device)

    def places(self) -> list[tuple[nn.Parameter, tuple[int, int, torch.Size]]]:
        """Return each parameter with its offset in the vector, its size and its shape."""
        pairs = zip(self.parameters, self.begins, strict=False)
        return [(parameter, (begin, parameter.numel(), parameter.shape)) for parameter, begin in pairs]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return parameters, gradients, first and second moments, numbers of steps, and the learning rate."""
        self.update_rate()
        return self.values, self.gradient, self.exp_avg, self.exp_avg_sq, self.steps, self._rate_tensor

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
            pairs = [(cast(Tensor, p.grad), view) for p, view in zip(self.parameters, self._gradients, strict=True)]
            given = [x.clone() if x.data_ptr() == view.data_ptr() else x for x, view in pairs]  # if some were replaced
            # Clipping non-finite gradients also writes NaN into the padding.
            self.gradient.zero_()
            for parameter, view, gradient in zip(self.parameters, self._gradients, given, strict=True):
                parameter.grad = view.copy_(gradient)
        return True

    def have_gradients(self) -> bool:
        """Whether the gradients of the parameters are views of the vector."""
        return all(p.grad is view for p, view in zip(self.parameters, self._gradients, strict=True))

    def take_step(self, optimizer: Optimizer) -> None:
        """Take a step with the kernel of fused Adam."""
        group, found_inf = self.group, getattr(optimizer, "found_inf", None)
        self.steps += 1
        # Private to PyTorch (2.8 and 2.13 tested): `Adam.step` takes longer than its kernel.
        torch._fused_adam_(
            *([self.values], [self.gradient], [self.exp_avg], [self.exp_avg_sq], [], [self.steps[0]]),
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
