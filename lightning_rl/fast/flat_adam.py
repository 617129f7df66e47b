"""Adam for small networks: the tensors of a group side by side in memory, so that few kernels see to all of them."""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from lightning_rl.validation import ClassSpec

# Tensors begin where PyTorch's allocator would have them begin, so that kernels round alike wherever they lie.
_ALIGNMENT_BYTES = 64
# Gradients are copied together; those of large networks take longer to copy than their kernels take to start.
_MOST_ENTRIES = 2**18


def default_optimizer(model: Any) -> ClassSpec | None:  # noqa: ANN401 - an algorithm
    """Return `FlatAdam` for an algorithm on a device that it is made for, None elsewhere."""
    if not model.hparams["fast_paths"] or model.device.type not in ("cpu", "cuda"):
        return None
    return {"class_path": "lightning_rl.fast.FlatAdam", "init_args": {"eps": 1e-5, "fused": True}}


class FlatAdam(Adam):
    """`torch.optim.Adam` that keeps the parameters, gradients and moments of each group in one vector each.

    A step then is one kernel, and so is what is done to gradients by way of `vectors`. With small networks the time of
    an update is that of starting kernels, one for each tensor. The parameters become views of the vector, as moments in
    the state do; the state has Adam's form, so that either class loads what the other has saved.

    Groups that are not `fused`, are large, mix dtypes, or have parameters without a gradient are treated as Adam does.

    It has Adam's arguments.
    """

    _laid_out: dict[int, _Vectors | None] | None = None  # by identity of the group; None: as Adam does
    _is_hooked = False

    def vectors(self) -> list[Tensor]:
        """Return what has all parameters that have a gradient, and in `grad` those gradients: some may be views.

        Call it between backward pass and step: what is done to these gradients the step takes for the parameters'.
        """
        found: list[Tensor] = []
        for group in self.param_groups:
            vectors = self._vectors_of(group)
            if vectors is None:
                found += [parameter for parameter in group["params"] if parameter.grad is not None]
            else:
                vectors.gather()
                found.append(vectors.values)
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or set them to zero."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._laid_out = None  # another state than the one that was laid out

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Give Adam what it steps: values, gradients, first and second moments, their maxima, numbers of steps."""
        vectors = (self._laid_out or {}).get(id(group))
        if vectors is None or not vectors.has_gathered():  # as after `vectors`
            vectors = self._vectors_of(group)
            if vectors is None:
                return super()._init_group(group, *lists)  # type: ignore[no-any-return, no-untyped-call]
            vectors.gather()
        assert vectors.values.grad is not None
        of_step = (vectors.values, vectors.values.grad, vectors.exp_avg, vectors.exp_avg_sq, None, vectors.step)
        for entries, tensor in zip(lists, of_step, strict=True):
            if tensor is not None:
                entries.append(tensor)
        return False

    def _vectors_of(self, group: dict[str, Any]) -> _Vectors | None:
        """Return the vectors of a group, made if they are not there or no longer what parameters and state refer to."""
        if self._laid_out is None:
            self._laid_out = {}
        if not self._is_hooked:
            # Not by overriding `step`: PyTorch wraps that of every class, and hooks would be called twice.
            self.register_step_post_hook(_tell_steps)
            self._is_hooked = True
        key = id(group)
        if key in self._laid_out:
            vectors = self._laid_out[key]
            if vectors is None or vectors.are_those_of(self):
                return vectors
        vectors = _Vectors(self, group) if self._can_lay_out(group) else None
        if any(parameter.grad is not None for parameter in group["params"]):
            self._laid_out[key] = vectors
        return vectors

    def _can_lay_out(self, group: dict[str, Any]) -> bool:
        parameters: list[Tensor] = group["params"]
        first = parameters[0]
        states = [self.state[parameter] for parameter in parameters if self.state.get(parameter)]
        return (
            bool(group["fused"])
            and not group["amsgrad"]
            and first.device.type in ("cpu", "cuda")
            and first.is_floating_point()
            and sum(parameter.numel() for parameter in parameters) <= _MOST_ENTRIES
            and all(
                parameter.grad is not None
                and parameter.dtype == first.dtype
                and parameter.device == first.device
                and parameter.is_contiguous()
                for parameter in parameters
            )
            # One number of steps is for all of them.
            and len(states) in (0, len(parameters))
            and len({float(state["step"]) for state in states}) <= 1
        )


class _Vectors:
    """What a group of Adam has, side by side.

    Attributes:
        values: Parameters, with their gradients in `grad`.
        exp_avg: First moments.
        exp_avg_sq: Second moments.
        step: Number of steps, of all parameters.
    """

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self.parameters: list[Tensor] = group["params"]
        first = self.parameters[0]
        alignment = _ALIGNMENT_BYTES // first.element_size()
        sizes = [-(-parameter.numel() // alignment) * alignment for parameter in self.parameters]
        self._begins = [0, *itertools.accumulate(sizes)]
        states = [optimizer.state[parameter] for parameter in self.parameters]
        self.values = self._vector([parameter.detach() for parameter in self.parameters])
        self.values.grad = torch.zeros_like(self.values)
        self.exp_avg, self.exp_avg_sq = (
            self._vector([state.get(name) for state in states]) for name in ("exp_avg", "exp_avg_sq")
        )
        self.step = torch.zeros((), dtype=torch.float32, device=first.device)
        if "step" in states[0]:
            self.step.copy_(states[0]["step"])
        self.steps = self.step.repeat(len(states))
        self._gradients, self._moments = self._views(self.values.grad), self._views(self.exp_avg)
        entries = (states, self._moments, self._views(self.exp_avg_sq), self.steps.unbind())
        for state, exp_avg, exp_avg_sq, step in zip(*entries, strict=True):
            state |= {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        for parameter, values in zip(self.parameters, self._views(self.values), strict=True):
            parameter.data = values
        ends = [begin + parameter.numel() for begin, parameter in zip(self._begins, self.parameters, strict=False)]
        between = zip(ends, self._begins[1:], strict=True)
        self._gaps = [self.values.grad[end:begin] for end, begin in between if end < begin]
        self._places = [parameter.data_ptr() for parameter in self.parameters]

    def are_those_of(self, optimizer: Optimizer) -> bool:
        """Whether parameters and state still refer to these vectors: something may have put others in their place.

        If not, or if a gradient is missing, the state stays correct: each parameter has its own part of it.
        """
        states = optimizer.state
        return [parameter.data_ptr() for parameter in self.parameters] == self._places and all(
            parameter.grad is not None and states[parameter].get("exp_avg") is moments
            for parameter, moments in zip(self.parameters, self._moments, strict=True)
        )

    def gather(self) -> None:
        """Bring the gradients side by side, where they are not yet."""
        if self.has_gathered():
            return
        gradients = [cast(Tensor, parameter.grad) for parameter in self.parameters]
        torch._foreach_copy_(self._gradients, gradients)
        # Gradients that were not finite are scaled by NaN, and so is what lies between them.
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        for parameter, view in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = view

    def has_gathered(self) -> bool:
        """Whether the gradients are side by side."""
        return all(p.grad is view for p, view in zip(self.parameters, self._gradients, strict=True))

    def tell_steps(self) -> None:
        """Tell the state of each parameter how many steps were taken."""
        self.steps.fill_(self.step)

    def _vector(self, parts: list[Tensor | None]) -> Tensor:
        """Return parts, 0 where there are none, side by side."""
        vector = torch.zeros(self._begins[-1], dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        for view, part in zip(self._views(vector), parts, strict=True):
            if part is not None:
                view.copy_(part)
        return vector

    def _views(self, vector: Tensor) -> list[Tensor]:
        """Return the part of each parameter, in its shape."""
        return [
            vector[begin : begin + parameter.numel()].view_as(parameter)
            for begin, parameter in zip(self._begins, self.parameters, strict=False)
        ]


def _tell_steps(optimizer: Optimizer, *_: Any) -> None:  # noqa: ANN401 - a hook's
    """Tell the state of each parameter how many steps were taken."""
    assert isinstance(optimizer, FlatAdam)
    for vectors in (optimizer._laid_out or {}).values():
        if vectors is not None:
            vectors.tell_steps()
