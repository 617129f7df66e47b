"""Graphs of tensor operations that PyTorch's compiler captures from `loss(batch)`, and programs compiled from them.

A program computes loss and gradient, or loss, gradient and Adam step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._dynamo import config, lookup_backend, mark_dynamic, maybe_mark_dynamic  # documented, if private
from torch.fx import GraphModule
from torch.nn.functional import pad

from lightning_rl.distributed import world_size
from lightning_rl.fast.flat_adam import Vectors
from lightning_rl.nested import Nested, leaves, map_leaves
from lightning_rl.rollouts.batch import Batch

# More graphs of one loss mean that a value in it changes with every rollout.
_MOST_GRAPHS = 8


class ComputedLoss(NamedTuple):
    """The attributes of a `Loss` that a gradient step reads, without an autograd graph.

    Attributes:
        recorded: Names and values of recorded numbers, `[len(names)]`, and the names that may be NaN or infinite.
        terms: The weighted terms of the loss, a list or `[M]`.
        first_log_ratios: Logarithms of the importance ratios, `[N]`.
        limits: Maximum of recorded values, by name.
        has_value: Whether the loss contains a value loss.
    """

    recorded: tuple[tuple[str, ...], Tensor, Collection[str]]
    total: Any
    terms: Any
    first_log_ratios: Tensor | None
    limits: dict[str, Any]
    has_value: bool


KnownLoss = tuple[ComputedLoss, list[tuple[nn.Parameter, Tensor]]]
"""A loss, and its gradient for each parameter that it depends on."""


class Graph:
    """A captured loss: a function of tensors without side effects on Python objects.

    Attributes:
        inputs: Inputs of the last call: tensors, and dynamic sizes.
        sizes: For each input that is a size: the input tensor and the dimension with this size.
        dynamic_dims: Input tensors, by position, with their dynamic dimensions.
        total: Position of the loss among the outputs.
        has_side_effects: Whether the loss also stores outputs in attributes.
        parameters: Parameters that the loss depends on.
        is_understood: Whether `understand` has set the attributes above.
        places: Inputs that come from the minibatch, with their position among its leaves. Empty if the origin of an
            input is unknown; None before the first call.
        layouts: Layout of the minibatches that passed the guards, by number of rows.
        programs: Programs that compute the graph, by what they were made for.
    """

    total: int
    has_side_effects: bool
    parameters: list[nn.Parameter]
    is_understood = False

    def __init__(self, capture: Capture, module: GraphModule) -> None:
        self.module = with_quick_functions(module)
        self.sizes, self.dynamic_dims = _dynamic_sizes(module)
        self.inputs: Sequence[Any] = ()
        self.outputs: Sequence[Tensor] = ()
        self.places: list[tuple[int, int]] | None = None
        self.layouts: dict[int, list[Any]] = {}
        self.programs: dict[Any, Any] = {}
        self._capture = capture
        self._template: Any = None

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        """Compute the outputs; Dynamo calls this after the guards passed."""
        capture, self.inputs = self._capture, inputs
        capture.graph = self
        if not self.is_understood:
            with torch.no_grad():
                self.outputs = self.module(*inputs)
        elif self.has_side_effects:  # otherwise the caller only needs the guards
            self.outputs = capture.compute(self)
        return self.outputs

    def understand(self, loss: ComputedLoss, parameters: Sequence[nn.Parameter]) -> None:
        """Find the parts of the last loss in the outputs, and its parameters; without a part, raise a `ValueError`."""
        self._template = origins(loss, self.inputs, self.outputs)
        used = {which for kind, which in leaves(self._template) if kind == "outputs"}
        self.has_side_effects = used != set(range(len(self.outputs)))
        kind, self.total = self._template[ComputedLoss._fields.index("total")]
        if kind != "outputs":
            raise ValueError("the loss does not depend on the parameters")
        known = {id(parameter): parameter for parameter in parameters}
        given = {k: known[id(x)] for k, x in enumerate(self.inputs) if id(x) in known}
        # Autograd finds parameters without a gradient; optimizers skip them.
        with torch.enable_grad():
            total = self.module(*self.inputs)[self.total]
        found = torch.autograd.grad(total, [*given.values()], allow_unused=True)
        self._learned = [k for k, gradient in zip(given, found, strict=True) if gradient is not None]
        self._others = [k for k in range(len(self.inputs)) if k not in self._learned and k not in self.sizes]
        self.parameters, self.is_understood = [given[k] for k in self._learned], True

    def gradients(self, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return the gradients of the loss and the outputs of the graph; the compiler traces this method."""

        def of_parameters(given: Sequence[Tensor]) -> tuple[Tensor, Any]:
            outputs = self.module(*self.inputs_of(given, others))
            return outputs[self.total], outputs

        gradients, outputs = torch.func.grad(of_parameters, has_aux=True)(tuple(parameters))
        return gradients, outputs

    def inputs_of(self, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> list[Any]:
        """Return the inputs of the graph, given parameters and other inputs."""
        given: dict[int, Any] = dict(zip((*self._learned, *self._others), (*parameters, *others), strict=True))
        given.update({k: given[place].shape[dim] for k, (place, dim) in self.sizes.items()})
        return [given[k] for k in range(len(given))]

    def others(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs that are neither parameters nor sizes."""
        return [inputs[k] for k in self._others]

    def moving(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs that come from the minibatch; an empty list if the origin of an input is unknown."""
        return [inputs[k] for k, _ in self.places or ()]

    def loss(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> ComputedLoss:
        """Return the loss, given inputs and outputs of the graph."""
        return ComputedLoss(*map_leaves(lambda origin: found(origin, inputs, outputs), self._template))


def origins(results: Nested, inputs: Sequence[Any], outputs: Sequence[Any]) -> Nested:
    """Return for each leaf of `results` where it comes from: `["inputs" or "outputs", index]`, or `["value", number]`.

    A tensor from elsewhere raises a `ValueError`.
    """
    places = {id(x): ["inputs", k] for k, x in enumerate(inputs)}
    places |= {id(x): ["outputs", k] for k, x in enumerate(outputs)}

    def origin(x: Any) -> list[Any]:
        if not isinstance(x, Tensor):
            return ["value", x]
        if id(x) not in places:
            raise ValueError("a part of the loss is not computed by the graph")
        return places[id(x)]

    return map_leaves(origin, results)


def found(origin: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Return what is at an origin, for other inputs and outputs."""
    kind, which = origin
    if kind == "value":
        return which
    return outputs[which] if kind == "outputs" else inputs[which]


class QuickTanh(torch.autograd.Function):
    """The hyperbolic tangent in float32, with one exponential and an absolute error of at most 1e-7."""

    # The compiled function takes a quarter of the time of a compiled `torch.tanh`.

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Return (1 - exp(-2 |x|)) / (1 + exp(-2 |x|)) with the sign of x."""
        decayed = torch.exp(-2 * x.abs())
        return torch.copysign((1 - decayed) / (1 + decayed), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return gradient * (1 - y * y)


def _tanh(x: Tensor) -> Tensor:
    if x.dtype is torch.float32 and x.is_cpu:
        return cast(Tensor, QuickTanh.apply(x))  # type: ignore[no-untyped-call]
    return torch.tanh(x)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = nn.functional.linear(x, weight)
    if bias is None or not x.is_cpu or product.dtype is torch.bfloat16:  # which would round twice
        return nn.functional.linear(x, weight, bias)
    # The compiler fuses a difference with the function that follows it. It would turn a sum into a product that is
    # added to a copy of the bias for each row, which takes longer.
    return product - (-bias)


def with_quick_functions(module: GraphModule) -> GraphModule:
    """Replace hyperbolic tangents and linear layers of a graph by functions that take less time when compiled."""
    for node in module.graph.nodes:
        if node.target in (torch.tanh, nn.functional.tanh) or (node.op == "call_method" and node.target == "tanh"):
            node.op, node.target = "call_function", _tanh
        elif node.target is nn.functional.linear:
            node.target = _linear
    module.recompile()
    return module


def _dynamic_sizes(module: GraphModule) -> tuple[dict[int, tuple[int, int]], list[tuple[int, int]]]:
    """Return the inputs that are numbers, with a tensor and dimension of this size, and all dynamic dimensions.

    A number that an operation reads, but that is not the size of another input, raises a `ValueError`.
    """
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    examples = [node.meta["example_value"] for node in nodes]
    places: dict[str, tuple[int, int]] = {}
    dims: list[tuple[int, int]] = []
    for k, x in enumerate(examples):
        for dim, size in enumerate(x.shape if isinstance(x, Tensor) else ()):
            if isinstance(size, torch.SymInt):
                places.setdefault(str(size), (k, dim))
                dims.append((k, dim))
    numbers = {k: str(x) for k, x in enumerate(examples) if not isinstance(x, Tensor)}
    if not {name for k, name in numbers.items() if nodes[k].users} <= places.keys():
        raise ValueError("a number that the loss depends on changes from rollout to rollout")
    # Nothing reads the offset of a minibatch in the memory of the whole batch: any number will do.
    return {k: places.get(name, dims[0]) for k, name in numbers.items()}, dims


class Capture:
    """Captures the loss method of an algorithm as graphs: one graph for each path through its Python code.

    `graph` is the graph of the last call, and `compute` computes the outputs of a graph from its `inputs`.
    """

    def __init__(self, loss_of: Callable[[Any], Any]) -> None:
        self.graph: Graph | None = None
        self.graphs: list[Graph] = []
        self.compute: Callable[[Graph], Sequence[Tensor]] = lambda graph: graph.outputs

        def computed(batch: Any) -> ComputedLoss:
            loss = loss_of(batch)
            terms = torch.stack([term.detach() for term in loss.terms])
            limits = dict(loss.limits)
            return ComputedLoss(loss.recorded, loss.total, terms, loss.first_log_ratios, limits, loss.has_value)

        self._guarded = torch.compile(fresh(computed), backend=weakly(self._made), fullgraph=True, dynamic=False)

    def __call__(self, batch: Any) -> ComputedLoss:
        """Check the guards, and return the loss."""
        for x in leaves(_of_any_length(batch)):  # numbers of rows may differ between rollouts
            maybe_mark_dynamic(x, 0)
        # Otherwise the graph is split at the borders of DDP's buckets of gradients, and a part is taken for the whole.
        with config.patch(optimize_ddp=False):
            return self._guarded(batch)  # type: ignore[no-any-return]

    def _made(self, module: GraphModule, examples: Sequence[Any]) -> Callable[..., Sequence[Tensor]]:
        if len(self.graphs) == _MOST_GRAPHS:
            raise RuntimeError("a number or shape that the loss depends on changes from rollout to rollout")
        self.graphs.append(Graph(self, module))
        return weakly(self.graphs[-1].__call__)


def batches_of(given: Any) -> list[Batch]:  # what a loss takes
    """Return all batches that a loss takes: a single one, or one for each part of an `Unroll`."""
    return [given] if isinstance(given, Batch) else [part.batch for part in getattr(given, "parts", ())]


def _of_any_length(given: Any) -> Nested:
    rollouts = [part.rollout for part in getattr(given, "parts", ())]
    finals = [(x.final_indices, x.final_observations) for x in rollouts]
    return *(batch.fields for batch in batches_of(given)), *finals


def fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function with a copy of its code: PyTorch's compiler caches by code object."""
    assert isinstance(function, FunctionType)
    code, given = function.__code__.replace(), function.__globals__
    return FunctionType(code, given, function.__name__, function.__defaults__, function.__closure__)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method, but does not keep its object."""
    # PyTorch's compiler keeps each backend and what it returns until the process ends: a sweep would keep every model.
    reference = weakref.WeakMethod(method)
    return lambda *given: cast(Any, reference())(*given)


class Compiled:
    """A function of tensors that returns a tuple, compiled when it is called first, with the current inputs of `graph`.

    There are no guards, which the graph has: further calls run the compiled code itself, without PyTorch's search for
    the code that fits, which takes a tenth of a small step.
    """

    def __init__(self, function: Callable[..., tuple[Any, ...]], graph: Graph) -> None:
        for k, dim in graph.dynamic_dims:
            mark_dynamic(graph.inputs[k], dim)
        self._options = {"cpp_wrapper": True} if graph.parameters[0].is_cpu else {}
        # Only the marked sizes: otherwise numbers that differ from those of an earlier program become inputs.
        self._first = torch.compile(fresh(function), backend=weakly(self._made), fullgraph=True, dynamic=False)
        self._code: Callable[..., Sequence[Tensor]] | None = None
        # The place of each input among the given tensors, with the dimension of which it is the size.
        self._places: list[tuple[int, int | None]] = []
        self._origins: Sequence[Sequence[Any]] = ()

    def __call__(self, *given: Tensor) -> Sequence[Any]:
        if self._code is None:
            return self._called_first(*given)
        outputs = self._code(*[given[k] if dim is None else given[k].shape[dim] for k, dim in self._places])
        return [found(origin, given, outputs) for origin in self._origins]

    def _called_first(self, *given: Tensor) -> Sequence[Any]:
        results: tuple[Any, ...] = self._first(*given)
        index = {id(x): k for k, x in enumerate(given)}
        sizes, _ = _dynamic_sizes(self._module)
        tensors = [sizes.get(k, (k, None)) for k in range(len(self._inputs))]
        self._places = [(index[id(self._inputs[k])], dim) for k, dim in tensors]
        self._origins = origins(results, given, self._outputs)
        del self._module, self._inputs, self._outputs
        return results

    def _made(self, module: GraphModule, examples: Sequence[Any]) -> Callable[..., Sequence[Tensor]]:
        self._module = module
        self._code = cast(Any, lookup_backend("inductor"))(module, list(examples), config_patches=self._options)
        return weakly(self._run_code)

    def _run_code(self, *inputs: Any) -> Sequence[Tensor]:
        assert self._code is not None
        self._inputs, self._outputs = inputs, self._code(*inputs)
        return self._outputs


def recorded(work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Record the kernels of `work` as a CUDA graph; return its outputs, and the function that computes them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the device meanwhile
        outputs = work()
    return outputs, graph.replay


class Replay:
    """Compiles a program; on a GPU it runs as a CUDA graph, which the host starts at once instead of kernel by kernel.

    A CUDA graph reads and writes fixed memory, so the inputs that differ between calls are copied to where they were
    when it was recorded. There is one graph for each shape of these inputs and each place of the others. The first such
    call runs the program itself, which may still choose its kernels. Each call may overwrite the first
    `num_overwritten` results of the call before. On other devices the program runs as it is.
    """

    device_type = "cuda"

    def __init__(self, program: Callable[..., tuple[Any, ...]], graph: Graph, num_overwritten: int = 0) -> None:
        self._program, self._num_overwritten = Compiled(program, graph), num_overwritten
        self._replays = graph.parameters[0].device.type == self.device_type
        # Copied inputs, outputs, and the function that runs the graph; None after the first call.
        self._recordings: dict[Any, tuple[list[Tensor], Any, Callable[[], None]] | None] = {}

    def __call__(self, moving: Sequence[Tensor], *inputs: Tensor) -> Sequence[Any]:
        """Run the program on `inputs`, of which those in `moving` may differ in the next call; none: it is unknown."""
        moves = {id(x) for x in moving} if self._replays else None
        if not moves:
            return self._program(*inputs)
        key = tuple((x.shape, x.stride(), x.dtype) if id(x) in moves else x.data_ptr() for x in inputs)
        if key not in self._recordings:
            if len(self._recordings) < _MOST_GRAPHS:
                self._recordings[key] = None
            return self._program(*inputs)
        given = [x for x in inputs if id(x) in moves]
        if (recording := self._recordings[key]) is None:
            copies = {id(x): x.clone() for x in given}
            fixed = [copies.get(id(x), x) for x in inputs]
            recording = [copies[id(x)] for x in given], *recorded(lambda: self._program(*fixed))
            self._recordings[key] = recording
        places, outputs, run = recording
        for place, x in zip(places, given, strict=True):
            place.copy_(x)
        run()
        count = self._num_overwritten
        return [*outputs[:count], *map(torch.clone, outputs[count:])]


class GradientProgram:
    """Computes loss and gradient of a minibatch, `result`, in one program."""

    result: KnownLoss

    def __init__(self, graph: Graph) -> None:
        on_several_ranks, count = world_size() > 1, len(graph.parameters)

        def program(*given: Tensor) -> tuple[Any, ...]:
            gradients, outputs = graph.gradients(given[:count], given[count:])
            if on_several_ranks:  # a non-finite loss on one rank must reach the averaged gradient
                factor = 1 + 0 * outputs[graph.total]
                gradients = [x * factor for x in gradients]
            return *gradients, *outputs

        self._graph = graph
        self._program = Replay(program, graph, num_overwritten=count)

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute `result`, and return the outputs of the graph."""
        graph, parameters = self._graph, self._graph.parameters
        with torch.no_grad():
            learned = [parameter.detach() for parameter in parameters]
            results = self._program(graph.moving(inputs), *learned, *graph.others(inputs))
        gradients, outputs = results[: len(parameters)], results[len(parameters) :]
        self.result = graph.loss(inputs, outputs), [*zip(parameters, gradients, strict=True)]
        return outputs


class StepState(NamedTuple):
    """The flags and the count of `UpdateRecord` before or after a step, as scalars on the device."""

    is_open: Tensor
    finite: Tensor
    num_updates: Tensor


Step = tuple[ComputedLoss, StepState]
"""Recorded numbers of a whole step, without total, terms and limits, and the state after it."""


class StepProgram:
    """Computes loss, gradient, clipping and the steps of `FlatAdam` for a minibatch in one program.

    `optimizers` has the vectors of each optimizer; together they hold all parameters of the graph. `norm_names` are the
    names of the optimizers' gradient norms; `max_norm` and `max_value` are as in `OptimizerConfig`. `use` sets the
    vectors of the next steps, and `result` is the result of the last step.
    """

    result: Step

    def __init__(
        self,
        graph: Graph,
        optimizers: Sequence[Sequence[Vectors]],
        norm_names: Sequence[str],
        max_norm: float | None,
        max_value: float | None,
    ) -> None:
        self._graph = graph
        groups = [vectors for some in optimizers for vectors in some]
        paddings = [[vectors.paddings for vectors in some] for some in optimizers]
        number = {id(parameter): k for k, parameter in enumerate(graph.parameters)}
        # Of each parameter, by its number, in the order of the vectors.
        places = {number[id(p)]: (k, *place) for k, vectors in enumerate(groups) for p, place in vectors.places()}
        constants = [constants_of(vectors.group) for vectors in groups]
        before = graph.loss(graph.inputs, graph.outputs)
        names, _, self._observed = before.recorded
        self._names, self._has_value = (*names, *norm_names, "total_abs_loss"), before.has_value
        keeps_all, has_ratios = graph.has_side_effects, before.first_log_ratios is not None

        def program(*tensors: Tensor) -> tuple[Any, ...]:
            given = [tensors[6 * k : 6 * k + 6] for k in range(len(groups))]  # by `Vectors.tensors`
            others, state = tensors[6 * len(groups) : -3], tensors[-3:]
            views = {n: given[k][0][first : first + size].view(shape) for n, (k, first, size, shape) in places.items()}
            learned = [views[n] for n in range(len(views))]
            gradients, outputs = graph.gradients(learned, others)
            loss = graph.loss(graph.inputs_of(learned, others), outputs)
            values = loss.recorded[1]
            is_open, finite, num_updates = state
            for name, limit in loss.limits.items():
                is_open = is_open & (values[names.index(name)] <= limit)
            norms, clipped, flat = [], [], iter([gradients[n].reshape(-1) for n in places])
            for some in paddings:
                own = [torch.cat([pad(next(flat), (0, n)) for n in group]) for group in some]
                norm = _norm(own)
                norms.append((norm + 0 * loss.total).reshape(1).to(values.dtype))
                if max_value is not None:
                    own = [x.clamp(-max_value, max_value) for x in own]
                    norm = _norm(own)
                if max_norm is not None:
                    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
                    own = [x * factor for x in own]
                clipped += own
            recorded = torch.cat([values, *norms, loss.terms.abs().sum().reshape(1)])
            are_finite = torch.cat(norms)
            finite = finite & (are_finite - are_finite == 0).all()
            is_open = is_open & finite
            for vectors, gradient, numbers in zip(given, clipped, constants, strict=True):
                _take_adam_step(vectors, gradient, is_open, *numbers)
            kept = outputs if keeps_all else (loss.first_log_ratios,) if has_ratios else ()
            return recorded, is_open, finite, num_updates + is_open, *kept

        self._program = Replay(program, graph)

    def use(self, groups: Sequence[Vectors]) -> None:
        """Take the next steps on these vectors."""
        self._groups, self._tensors = groups, [x for vectors in groups for x in vectors.tensors()]

    def __call__(self, inputs: Sequence[Tensor], state: StepState) -> Sequence[Any]:
        """Take a step from `state`, and return the outputs of the graph if the loss has side effects."""
        for vectors in self._groups:
            vectors.update_rate()
        moving = self._graph.moving(inputs)
        with torch.no_grad():
            others = self._graph.others(inputs)
            moving = [*moving, *state] if moving else []
            values, *results = self._program(moving, *self._tensors, *others, *state)
        after, outputs = results[:3], results[3:]
        if self._graph.has_side_effects:
            ratios = self._graph.loss(inputs, outputs).first_log_ratios
        else:
            ratios = outputs[0] if outputs else None
        recorded = (self._names, values, self._observed)
        self.result = ComputedLoss(recorded, None, (), ratios, {}, self._has_value), StepState(*after)
        return outputs


def constants_of(group: dict[str, Any]) -> tuple[float, float, float, float, bool]:
    """Return the options of a parameter group that are constants in a program."""
    first, second = map(float, group["betas"])
    return first, second, group["eps"], group["weight_decay"], group["maximize"]


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
    counts = steps.double() + 1
    # The entries are equal. The compiler computes a maximum once, but would compute powers again for each parameter.
    step_size = (rate / (1 - beta1**counts)).amax().to(values.dtype)
    scale = (1 - beta2**counts).sqrt().amax().to(values.dtype)
    first = torch.lerp(exp_avg, gradient, 1 - beta1)
    second = beta2 * exp_avg_sq + (1 - beta2) * gradient * gradient
    stepped = values - step_size * first / (second.sqrt() / scale + eps)
    for tensor, new in ((values, stepped), (exp_avg, first), (exp_avg_sq, second)):
        tensor.copy_(torch.where(condition, new, tensor))
    steps.add_(condition)
