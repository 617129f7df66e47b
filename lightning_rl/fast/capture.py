"""Captures the loss of an algorithm as a graph of tensor operations, with PyTorch's compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_rl.nested import leaves
from lightning_rl.rollouts.batch import Batch

# More graphs of one loss mean that a value in it changes with every rollout.
_MOST_GRAPHS = 8


class Outline(NamedTuple):
    """The parts of a loss over a minibatch, as names and tensors.

    Attributes:
        names: Names of the recorded values.
        observed: Names of the values that may be NaN or infinite.
        limit_names: Names of the values that stop the updates when they exceed their limit.
        has_value: Whether the loss contains a value loss.
        total: The loss, a scalar.
        values: The recorded values, `[len(names)]`.
        terms: The weighted terms of the loss, `[M]`.
        log_ratios: Logarithms of the importance ratios, `[N]`.
        limits: The limit of each of `limit_names`, numbers or scalars.
    """

    names: tuple[str, ...]
    observed: tuple[str, ...]
    limit_names: tuple[str, ...]
    has_value: bool
    total: Tensor
    values: Tensor
    terms: Tensor
    log_ratios: Tensor | None
    limits: list[Any]


def _outline(loss: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a `Loss`, whose module imports this folder
    names, values, observed = loss.recorded()
    terms = torch.stack([term.detach() for term in loss.terms])
    limits = list(loss.limits.values())
    given = (tuple(names), tuple(observed), tuple(loss.limits), loss.has_value)
    return (*given, loss.total, values, terms, loss.first_log_ratios, limits)


class ComputedLoss:
    """A loss with a computed gradient for each of the `parameters` it depends on, instead of an autograd graph."""

    def __init__(self, outline: Outline, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        self.outline = outline
        self.total, self.terms, self.has_value = outline.total, outline.terms, outline.has_value
        self.first_log_ratios = outline.log_ratios
        self.limits = dict(zip(outline.limit_names, outline.limits, strict=True))
        self.observed = {name: outline.values[outline.names.index(name)] for name in outline.limit_names}
        self.parameters, self.gradients = parameters, gradients

    def recorded(self) -> tuple[tuple[str, ...], Tensor, Sequence[str]]:
        """Return the names and values to record, and the names of values that may be NaN or infinite."""
        return self.outline.names, self.outline.values, self.outline.observed


class Graph:
    """A captured loss: a function of tensors without side effects on Python objects.

    Attributes:
        module: The operations.
        inputs: Inputs of the last call: tensors, and dynamic sizes.
        sizes: For each input that is a size: the input tensor and the dimension with this size.
        dynamic_dims: Input tensors, by position, with their dynamic dimensions.
        outputs: Outputs of the last call.
        total: Position of the loss among the outputs.
        has_side_effects: Whether the loss also stores outputs in attributes.
        gradient: Gradient of the graph; None before `understand`.
        places: Inputs that come from the minibatch, with their position among its leaves. Empty if the origin of an
            input is unknown; None before the first call.
        layouts: Layout of the minibatches that passed the guards, by number of rows.
        programs: Compiled programs of the graph.
    """

    total: int
    has_side_effects: bool

    def __init__(self, capture: Capture, module: GraphModule) -> None:
        self.module = with_quick_tanh(module)
        self.sizes, self.dynamic_dims = _dynamic_sizes(module)
        self.inputs: Sequence[Any] = ()
        self.outputs: Sequence[Tensor] = ()
        self.gradient: Any = None
        self.places: list[tuple[int, int]] | None = None
        self.layouts: dict[int, list[Any]] = {}
        self.programs: dict[Any, Any] = {}
        self._capture = capture
        self._template: list[Any] = []

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:  # noqa: ANN401
        """Compute the outputs; Dynamo calls this after the guards passed."""
        capture, self.inputs = self._capture, inputs
        capture.graph = self
        if self.gradient is None:
            with torch.no_grad():
                self.outputs = self.module(*inputs)
        elif self.has_side_effects:  # otherwise the caller only needs the guards
            self.outputs = capture.compute(self)
        return self.outputs

    def understand(self, outline: Sequence[Any]) -> None:
        """Store which outputs are the parts of the last call's outline, or raise a `ValueError` if one is missing."""
        places = {id(x): ("inputs", k) for k, x in enumerate(self.inputs)}
        places |= {id(x): ("outputs", k) for k, x in enumerate(self.outputs)}

        def place(x: Any) -> tuple[str, Any]:  # noqa: ANN401
            if not isinstance(x, Tensor):
                return "value", x
            if id(x) not in places:
                raise ValueError("a part of the loss is not computed by the graph")
            return places[id(x)]

        self._template = [list(map(place, x)) if isinstance(x, list) else place(x) for x in outline]
        flat = [entry for x in self._template for entry in (x if isinstance(x, list) else [x])]
        used = {which for kind, which in flat if kind == "outputs"}
        self.has_side_effects = used != set(range(len(self.outputs)))
        kind, self.total = self._template[Outline._fields.index("total")]
        if kind != "outputs":
            raise ValueError("the loss does not depend on the parameters")

    def outline(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Outline:
        """Return the outline of a loss, given inputs and outputs of the graph."""

        def filled(entry: tuple[str, Any]) -> Any:  # noqa: ANN401
            kind, which = entry
            if kind == "value":
                return which
            return outputs[which] if kind == "outputs" else inputs[which]

        parts: Any = (list(map(filled, x)) if isinstance(x, list) else filled(x) for x in self._template)
        return Outline(*parts)


class QuickTanh(torch.autograd.Function):
    """The hyperbolic tangent in float32, with one exponential and an absolute error of at most 1e-7.

    The compiled function takes a quarter of the time of a compiled `torch.tanh`.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Return (1 - exp(-2 |x|)) / (1 + exp(-2 |x|)) with the sign of x."""
        decayed = torch.exp(-2 * x.abs())
        return torch.copysign((1 - decayed) / (1 + decayed), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ANN401
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        y: Tensor = ctx.saved_tensors[0]
        return gradient * (1 - y * y)


def _tanh(x: Tensor) -> Tensor:
    if x.dtype is torch.float32 and x.is_cpu:
        return cast(Tensor, QuickTanh.apply(x))  # type: ignore[no-untyped-call]
    return torch.tanh(x)


def with_quick_tanh(module: GraphModule) -> GraphModule:
    """Replace the hyperbolic tangents of a graph."""
    for node in module.graph.nodes:
        if node.target in (torch.tanh, nn.functional.tanh) or (node.op == "call_method" and node.target == "tanh"):
            node.op, node.target = "call_function", _tanh
    module.recompile()
    return module


def _dynamic_sizes(module: GraphModule) -> tuple[dict[int, tuple[int, int]], list[tuple[int, int]]]:
    """Return the inputs that are sizes, with a tensor and dimension of this size, and all dynamic dimensions.

    A number that is not the size of another input raises a `ValueError`.
    """
    examples = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
    places: dict[str, tuple[int, int]] = {}
    dims: list[tuple[int, int]] = []
    for k, x in enumerate(examples):
        for dim, size in enumerate(x.shape if isinstance(x, Tensor) else ()):
            if isinstance(size, torch.SymInt):
                places.setdefault(str(size), (k, dim))
                dims.append((k, dim))
    numbers = {k: str(x) for k, x in enumerate(examples) if not isinstance(x, Tensor)}
    if not set(numbers.values()) <= places.keys():
        raise ValueError("a number that the loss depends on changes from rollout to rollout")
    return {k: places[name] for k, name in numbers.items()}, dims


class Capture:
    """Captures the loss method of an algorithm as graphs: one graph for each path through its Python code.

    `graph` is the graph of the last call, and `compute` computes the outputs of a graph from its `inputs`.
    """

    def __init__(self, loss_of: Callable[[Any], Any]) -> None:
        self.graph: Graph | None = None
        self.compute: Callable[[Graph], Sequence[Tensor]] = lambda graph: graph.outputs
        self.count = 0

        def outline_of(batch: Any) -> tuple[Any, ...]:  # noqa: ANN401
            return _outline(loss_of(batch))

        self._guarded = torch.compile(fresh(outline_of), backend=self._made, fullgraph=True)

    def __call__(self, batch: Any) -> Sequence[Any]:  # noqa: ANN401
        """Check the guards, and return the outline of the loss."""
        if isinstance(batch, Batch):  # the number of rows may differ between rollouts
            for x in leaves(batch.fields):
                torch._dynamo.maybe_mark_dynamic(x, 0)  # documented by PyTorch despite the private module
        found: Sequence[Any] = self._guarded(batch)
        return found

    def _made(self, module: GraphModule, examples: Sequence[Any]) -> Graph:
        self.count += 1
        if self.count > _MOST_GRAPHS:
            raise RuntimeError("a number or shape that the loss depends on changes from rollout to rollout")
        return Graph(self, module)


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function with a copy of its code: PyTorch's compiler caches by code object."""
    assert isinstance(function, FunctionType)
    code, given = function.__code__.replace(), function.__globals__
    return FunctionType(code, given, function.__name__, function.__defaults__, function.__closure__)
