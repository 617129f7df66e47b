"""Losses as graphs of operations, which PyTorch's compiler captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lightning_rl.nested import leaves
from lightning_rl.rollouts.batch import Batch

# Graphs of one loss, beyond which something in the loss changes with every rollout.
_MOST_GRAPHS = 8


class Outline(NamedTuple):
    """A loss over a minibatch as plain names and tensors.

    Attributes:
        names: Names of the recorded values.
        observed: Those of the names that may be NaN or infinite.
        limit_names: Names of recorded values that end the updates where they exceed a limit.
        has_value: Whether the loss has a value loss.
        total: The loss.
        values: The recorded values, `[len(names)]`.
        terms: The terms of the sum, `[M]`.
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


class Graph:
    """A captured loss: a function of tensors alone.

    Attributes:
        module: The operations.
        inputs: What the last guarded call has passed: tensors, and sizes that change.
        sizes: For each input that is a size, the input that has it and the dimension.
        dynamic_dims: Inputs and their dimensions whose size changes.
        outputs: What the graph has returned last.
        total: Place of the loss among the outputs.
        has_side_effects: Whether the loss keeps outputs elsewhere than in what it returns.
        gradient: Gradient of the graph; None before it is known.
        places: Inputs that come from a minibatch, each with its place among the leaves of the minibatch; empty where
            an input is neither from there nor a parameter, buffer or option; None before it is known.
        layouts: By their number of rows, the layouts of minibatches for which the guards have held.
        programs: What the graph was compiled into.
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
        """Compute the outputs: Dynamo calls this once the guards hold."""
        capture, self.inputs = self._capture, inputs
        capture.graph = self
        if self.gradient is None:
            with torch.no_grad():
                self.outputs = self.module(*inputs)
        elif self.has_side_effects:  # otherwise the call is for its guards alone
            self.outputs = capture.compute(self)
        return self.outputs

    def understand(self, outline: Sequence[Any]) -> None:
        """Note which outputs make up an outline, given the outline of the last guarded call.

        Raises:
            ValueError: A part of the loss is no output of the graph.
        """
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
        """Return the loss that outputs make up."""

        def filled(entry: tuple[str, Any]) -> Any:  # noqa: ANN401
            kind, which = entry
            if kind == "value":
                return which
            return outputs[which] if kind == "outputs" else inputs[which]

        parts: Any = (list(map(filled, x)) if isinstance(x, list) else filled(x) for x in self._template)
        return Outline(*parts)


class QuickTanh(torch.autograd.Function):
    """The hyperbolic tangent in float32 by one exponential.

    It is right to 1e-7, as numbers about 1 are, and takes a quarter of the time of what the compiler makes of `tanh`.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Return (1 - exp(-2 |x|)) / (1 + exp(-2 |x|)) with the sign of x."""
        decayed = torch.exp(-2 * x.abs())
        return torch.copysign((1 - decayed) / (1 + decayed), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ANN401
        """Keep the result."""
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        """Return the gradient of the argument."""
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
    """Return which inputs are sizes, each with another input and the dimension that has it, and all such dimensions.

    Raises:
        ValueError: A number is an input that is the size of no other one.
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
    """Captures a loss as graphs, one for each way in which the loss can be computed.

    Args:
        loss_of: The loss of an algorithm, a method.

    Attributes:
        graph: Graph of the last call.
        compute: Computes the outputs of a graph that is understood, from its `inputs`.
        count: Number of graphs.
    """

    def __init__(self, loss_of: Callable[[Any], Any]) -> None:
        self.graph: Graph | None = None
        self.compute: Callable[[Graph], Sequence[Tensor]] = lambda graph: graph.outputs
        self.count = 0

        def outline_of(batch: Any) -> tuple[Any, ...]:  # noqa: ANN401
            return _outline(loss_of(batch))

        self._guarded = torch.compile(fresh(outline_of), backend=self._made, fullgraph=True)

    def __call__(self, batch: Any) -> Sequence[Any]:  # noqa: ANN401
        """Return the outline of the loss, by the graph whose guards hold."""
        if isinstance(batch, Batch):  # of which rollouts have more or fewer rows
            for x in leaves(batch.fields):
                torch._dynamo.maybe_mark_dynamic(x, 0)  # documented, in spite of the name
        found: Sequence[Any] = self._guarded(batch)
        return found

    def _made(self, module: GraphModule, examples: Sequence[Any]) -> Graph:
        self.count += 1
        if self.count > _MOST_GRAPHS:
            raise RuntimeError("a number or shape that the loss depends on changes from rollout to rollout")
        return Graph(self, module)


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function with code of its own: PyTorch's compiler keeps what it has compiled by code."""
    assert isinstance(function, FunctionType)
    code, given = function.__code__.replace(), function.__globals__
    return FunctionType(code, given, function.__name__, function.__defaults__, function.__closure__)
