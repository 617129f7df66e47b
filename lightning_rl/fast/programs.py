"""Programs compiled by `torch.compile`: loss with gradient, and loss with gradient and Adam step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_rl.distributed import world_size
from lightning_rl.fast.capture import Graph, fresh
from lightning_rl.fast.flat_adam import Vectors


class Gradient:
    """The gradient of a captured loss with respect to the `parameters` it depends on."""

    def __init__(self, graph: Graph, parameters: Sequence[nn.Parameter]) -> None:
        self._module, self._total = graph.module, graph.total
        self._count, self._sizes = len(graph.inputs), graph.sizes
        known = {id(parameter): parameter for parameter in parameters}
        given = {k: known[id(x)] for k, x in enumerate(graph.inputs) if id(x) in known}
        # Autograd finds parameters without a gradient; optimizers skip them.
        with torch.enable_grad():
            total = graph.module(*graph.inputs)[graph.total]
        found = torch.autograd.grad(total, [*given.values()], allow_unused=True)
        self._places = [k for k, gradient in zip(given, found, strict=True) if gradient is not None]
        self._other_places = [k for k in range(self._count) if k not in self._places and k not in graph.sizes]
        self.parameters = [given[k] for k in self._places]

    def __call__(self, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return the gradients and the outputs of the graph; the compiler traces this method."""

        def of_parameters(given: Sequence[Tensor]) -> tuple[Tensor, Any]:
            outputs = self._module(*self.inputs(given, others))
            return outputs[self._total], outputs

        gradients, outputs = torch.func.grad(of_parameters, has_aux=True)(tuple(parameters))
        return gradients, outputs

    def inputs(self, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> list[Any]:
        """Return the inputs of the graph, given parameters and other inputs."""
        inputs: list[Any] = [None] * self._count
        for places, given in ((self._places, parameters), (self._other_places, others)):
            for k, x in zip(places, given, strict=True):
                inputs[k] = x
        for k, (place, dim) in self._sizes.items():
            inputs[k] = inputs[place].shape[dim]
        return inputs

    def others(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs that are not parameters."""
        return [inputs[k] for k in self._other_places]


def compiled(function: Callable[..., Any], graph: Graph, device: torch.device) -> Callable[..., Any]:
    """Return a compiled function without guards, which the graph has; call it first with the graph's current inputs."""
    for k, dim in graph.dynamic_dims:
        torch._dynamo.mark_dynamic(graph.inputs[k], dim)  # documented by PyTorch despite the private module
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    if device.type == "cpu":
        options["cpp_wrapper"] = True
    dynamic = None if graph.dynamic_dims else False
    return torch.compile(fresh(function), fullgraph=True, dynamic=dynamic, options=options)


class GradientProgram:
    """Computes loss and gradient of a minibatch in one program; `gradients` belong to `gradient.parameters`."""

    def __init__(self, graph: Graph, gradient: Gradient) -> None:
        self.gradient = gradient
        self.gradients: Sequence[Tensor] = ()
        on_several_ranks = world_size() > 1

        def program(learned: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Any, Any]:
            gradients, outputs = gradient(learned, others)
            if on_several_ranks:  # a non-finite loss on one rank must reach the averaged gradient
                factor = 1 + 0 * outputs[graph.total]
                gradients = [x * factor for x in gradients]
            return gradients, outputs

        self._program = compiled(program, graph, gradient.parameters[0].device)

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute `gradients`, and return the outputs of the graph."""
        with torch.no_grad():
            learned = [parameter.detach() for parameter in self.gradient.parameters]
            self.gradients, outputs = self._program(learned, self.gradient.others(inputs))
        return outputs  # type: ignore[no-any-return]


class StepState(NamedTuple):
    """Conditions of a step, as scalars on the device.

    Attributes:
        is_open: Whether the updates from this rollout have not been stopped.
        finite: Whether every loss and gradient so far was finite.
        num_updates: Number of updates so far.
    """

    is_open: Tensor
    finite: Tensor
    num_updates: Tensor


class StepResult(NamedTuple):
    """Result of a whole step.

    Attributes:
        names: Names of the recorded values.
        values: The recorded values, `[len(names)]`.
        observed: Names of the values that may be NaN or infinite.
        log_ratios: Logarithms of the importance ratios, `[N]`.
        has_value: Whether the loss contains a value loss.
        state: State after the step.
    """

    names: tuple[str, ...]
    values: Tensor
    observed: tuple[str, ...]
    log_ratios: Tensor | None
    has_value: bool
    state: StepState


class StepProgram:
    """Computes loss, gradient, clipping and the steps of `FlatAdam` for a minibatch in one program.

    `optimizers` has the vectors of each optimizer; together they hold all parameters of the gradient. `norm_names` are
    the names of the optimizers' gradient norms; `max_norm` and `max_value` are as in `OptimizerConfig`.
    """

    result: StepResult

    def __init__(
        self,
        graph: Graph,
        gradient: Gradient,
        optimizers: Sequence[Sequence[Vectors]],
        norm_names: Sequence[str],
        max_norm: float | None,
        max_value: float | None,
    ) -> None:
        self._graph, self._gradient = graph, gradient
        sizes = [len(some) for some in optimizers]
        groups = [vectors for some in optimizers for vectors in some]
        places = {id(p): (k, *place) for k, vectors in enumerate(groups) for p, place in vectors.places()}
        learned_places = [places[id(parameter)] for parameter in gradient.parameters]
        lengths = [vectors.values.numel() for vectors in groups]
        constants = [constants_of(vectors.group) for vectors in groups]
        before = graph.outline(graph.inputs, graph.outputs)
        self._names = (*before.names, *norm_names, "total_abs_loss")
        self._observed, self._has_value = before.observed, before.has_value
        keeps_all, has_ratios = graph.has_side_effects, before.log_ratios is not None

        def program(
            given: Sequence[Sequence[Tensor]], others: Sequence[Tensor], state: Sequence[Tensor]
        ) -> tuple[Any, ...]:
            learned = [given[k][0][begin : begin + size].view(shape) for k, begin, size, shape in learned_places]
            gradients, outputs = gradient(learned, others)
            loss = graph.outline(gradient.inputs(learned, others), outputs)
            flat = _side_by_side(gradients, learned_places, lengths)
            is_open, finite, num_updates = state
            for name, limit in zip(loss.limit_names, loss.limits, strict=True):
                is_open = is_open & (loss.values[loss.names.index(name)] <= limit)
            norms, first = [], 0
            for count in sizes:
                own = flat[first : first + count]
                norm = _norm(own)
                norms.append((norm + 0 * loss.total).reshape(1).to(loss.values.dtype))
                if max_value is not None:
                    own = [x.clamp(-max_value, max_value) for x in own]
                    norm = _norm(own)
                if max_norm is not None:
                    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
                    own = [x * factor for x in own]
                flat[first : first + count] = own
                first += count
            recorded = torch.cat([loss.values, *norms, loss.terms.abs().sum().reshape(1)])
            are_finite = torch.cat(norms)
            finite = finite & (are_finite - are_finite == 0).all()
            is_open = is_open & finite
            for tensors, x, numbers in zip(given, flat, constants, strict=True):
                _take_adam_step(tensors, x, is_open, *numbers)
            kept = outputs if keeps_all else (loss.log_ratios,) if has_ratios else ()
            return recorded, (is_open, finite, num_updates + is_open), kept

        self._program = compiled(program, graph, gradient.parameters[0].device)

    def __call__(self, inputs: Sequence[Tensor], groups: Sequence[Sequence[Tensor]], state: StepState) -> Sequence[Any]:
        """Take a step from `state`, and return the outputs of the graph if the loss has side effects."""
        with torch.no_grad():
            values, after, outputs = self._program(groups, self._gradient.others(inputs), tuple(state))
        if self._graph.has_side_effects:
            ratios = self._graph.outline(inputs, outputs).log_ratios
        else:
            ratios = outputs[0] if outputs else None
        given = (self._names, values, self._observed, ratios, self._has_value)
        self.result = StepResult(*given, StepState(*after))
        return outputs  # type: ignore[no-any-return]


def constants_of(group: dict[str, Any]) -> tuple[float, float, float, float, bool]:
    """Return the options of a parameter group that are constants in a program."""
    first, second = map(float, group["betas"])
    return first, second, group["eps"], group["weight_decay"], group["maximize"]


def _side_by_side(
    gradients: Sequence[Tensor], places: Sequence[tuple[int, int, int, Any]], lengths: Sequence[int]
) -> list[Tensor]:
    """Return the gradients concatenated in the layout of `Vectors`, with zeros as padding."""
    parts: list[list[Tensor]] = [[] for _ in lengths]
    ends = [0] * len(lengths)
    in_order = sorted(zip(places, gradients, strict=True), key=lambda pair: pair[0][:2])
    for (k, begin, size, _), gradient in in_order:
        if begin > ends[k]:
            parts[k].append(gradient.new_zeros(begin - ends[k]))
        parts[k].append(gradient.reshape(-1))
        ends[k] = begin + size
    for k, length in enumerate(lengths):
        if length > ends[k]:
            parts[k].append(parts[k][0].new_zeros(length - ends[k]))
    return [torch.cat(some) for some in parts]


def _norm(vectors: Sequence[Tensor]) -> Tensor:
    norms: list[Tensor] = [torch.linalg.vector_norm(x) for x in vectors]
    if len(norms) == 1:
        return norms[0]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _take_adam_step(
    tensors: Sequence[Tensor],
    gradient: Tensor,
    condition: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Take a step of Adam (Kingma and Ba 2015) as `torch.optim.Adam(fused=True)` does, if `condition` is true."""
    values, kept, exp_avg, exp_avg_sq, steps, rate = tensors
    kept.copy_(gradient)
    if maximize:
        gradient = -gradient
    if weight_decay:
        gradient = gradient + weight_decay * values
    count = steps[0].double() + condition
    step_size = (rate / (1 - beta1**count)).to(values.dtype)
    scale = (1 - beta2**count).sqrt().to(values.dtype)
    first = torch.lerp(exp_avg, gradient, 1 - beta1)
    second = beta2 * exp_avg_sq + (1 - beta2) * gradient * gradient
    stepped = values - step_size * first / (second.sqrt() / scale + eps)
    for tensor, new in ((values, stepped), (exp_avg, first), (exp_avg_sq, second)):
        tensor.copy_(torch.where(condition, new, tensor))
    steps.add_(condition)
