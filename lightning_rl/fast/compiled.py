"""The compiled engine: PyTorch's compiler captures `loss(batch)` as a graph with guards on all Python values it reads.

Graph, gradient and optimizer step are compiled into one program. The guards are checked for the first minibatch of each
rollout, and whenever the algorithm, the loss or the shapes changed.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl.distributed import world_size
from lightning_rl.fast.engine import FastEngine, KnownLoss, step_progress
from lightning_rl.fast.flat_adam import FlatAdam, Vectors
from lightning_rl.fast.programs import (
    Capture,
    Gradient,
    GradientProgram,
    Graph,
    Step,
    StepProgram,
    StepState,
    constants_of,
)
from lightning_rl.nested import leaves
from lightning_rl.rollouts.batch import Batch


class Binding(NamedTuple):
    """A program that may run on further minibatches of a rollout without a check of the guards.

    Attributes:
        inputs: Inputs of the graph; the inputs from the minibatch are replaced for each call.
        signature: Signature of the minibatches.
        attributes: Attributes of the algorithm and the estimator when the guards passed.
    """

    graph: Graph
    program: StepProgram | GradientProgram
    inputs: list[Tensor]
    signature: tuple[Any, ...]
    attributes: list[Any]


class CompiledEngine(FastEngine):
    """Computes loss and gradient, and the step of `FlatAdam`, with compiled programs; lives as long as the run.

    `captures` has the captured graphs of each loss, `failed` the losses that cannot be compiled.
    """

    compiles_loss = True

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - an algorithm, whose module imports this folder
        super().__init__()
        self._model = model
        self.captures: dict[Any, Capture] = {}
        self.failed: set[Any] = set()
        # Pairs of loss and network part whose step is not in the program.
        self._apart: set[Any] = set()
        # Tensors in place of numbers that change between minibatches or over the run, with their values.
        self._scalars: dict[Any, tuple[Tensor, float]] = {}
        self._binding: Binding | None = None

    def begin(self) -> None:
        """Require a check of the guards for the next minibatch."""
        self._binding = None

    def whole_step(self, steps: Any, loss_of: Callable[[Any], Any], batch: Any) -> Step | None:  # noqa: ANN401
        """Take a whole step of `GradientSteps` in one program and count it; None if there is no such program."""
        key = self._key(loss_of)
        if world_size() > 1 or steps.rollback or key in self.failed or (key, steps.part) in self._apart:
            return None
        record = steps.record
        state = StepState(record.is_open, record.finite, record.num_updates)
        if state.is_open is state.finite:  # the compiler would merge them into one input
            state = state._replace(finite=state.finite.clone())

        def program_of(graph: Graph) -> StepProgram | None:
            gradient, optimizers = cast(Gradient, graph.gradient), _vectors(steps)
            groups = [vectors for some in optimizers for vectors in some]
            learned = {id(parameter) for vectors in groups for parameter in vectors.parameters}
            if {id(parameter) for parameter in gradient.parameters} != learned:
                self._apart.add((key, steps.part))
                return None
            limits, norms = (steps.max_grad_norm, steps.max_grad_value), steps.norm_names[: len(optimizers)]
            made_for = (tuple(map(len, optimizers)), *limits, *(constants_of(vectors.group) for vectors in groups))
            if made_for not in graph.programs:
                graph.programs[made_for] = StepProgram(graph, gradient, optimizers, norms, *limits)
            program = cast(StepProgram, graph.programs[made_for])
            program.use(groups)
            return program

        how = (StepProgram, steps.part, steps.active_set)
        program = self._run(loss_of, batch, how, program_of, lambda program, inputs: program(inputs, state))
        if program is None:
            return None
        is_open = program.result[1].is_open
        if not is_open.is_cpu or is_open:
            progress = step_progress(steps.model)
            progress.increment_ready()
            progress.increment_completed()
        return cast(Step, program.result)

    def known_loss(self, model: Any, loss_of: Callable[[Any], Any], batch: Any, part: str | None) -> KnownLoss | None:  # noqa: ANN401
        if self._key(loss_of) in self.failed:
            return None

        def program_of(graph: Graph) -> GradientProgram:
            if None not in graph.programs:
                graph.programs[None] = GradientProgram(graph, cast(Gradient, graph.gradient))
            return cast(GradientProgram, graph.programs[None])

        how = (GradientProgram, part, None)
        program = self._run(loss_of, batch, how, program_of, lambda program, inputs: program(inputs))
        return None if program is None else program.known_loss

    def _run(
        self,
        loss_of: Callable[[Any], Any],
        batch: Any,  # noqa: ANN401
        how: tuple[Any, ...],
        program_of: Callable[[Graph], Any],
        call: Callable[[Any, Sequence[Any]], Sequence[Tensor]],
    ) -> Any:  # noqa: ANN401 - a program
        """Call a program of a loss for a minibatch, and return it; None if there is none, or if it fails."""
        signature = self._signature(loss_of, batch, how)
        if (binding := self._fitted(signature, batch)) is not None:
            call(binding.program, binding.inputs)
            return binding.program
        self._binding, used = None, None

        def compute(graph: Graph) -> Sequence[Tensor]:
            nonlocal used
            used = program_of(graph)
            return graph.outputs if used is None else call(used, graph.inputs)

        graph = self._guarded(loss_of, batch, compute)
        if graph is None or used is None:
            return None
        self._bind(graph, batch, signature, used)
        return used

    def _guarded(
        self,
        loss_of: Callable[[Any], Any],
        batch: Any,  # noqa: ANN401
        compute: Callable[[Graph], Sequence[Tensor]],
    ) -> Graph | None:
        """Check the guards of a loss and compute its graph; on failure, log the reason and return None."""
        key = self._key(loss_of)
        if key not in self.captures:
            if not self.captures:
                name = type(self._model).__name__
                rank_zero_info(f"{name}: compiling the update, once, about 10 s (cached for the next run)")
            self.captures[key] = Capture(loss_of)
        capture = self.captures[key]
        capture.compute = compute
        if isinstance(batch, Batch):
            batch = self._with_tensor_as_weight(batch)
        try:
            with self._tensors_as_scheduled_options():
                loss = capture(batch)
                while (graph := cast(Graph, capture.graph)).gradient is None:
                    graph.understand(loss)
                    graph.gradient = Gradient(graph, [x for x in self._model.parameters() if x.requires_grad])
                    loss = capture(batch)
                if not graph.has_side_effects:
                    compute(graph)
        except Exception as error:
            self.failed.add(key)
            reason = str(error).strip().partition("\n")[0]
            rank_zero_info(
                f"{type(self._model).__name__}.{key.__name__} cannot be compiled; autograd computes its gradient: "
                f"{type(error).__name__}: {reason}"
            )
            return None
        return graph

    def _key(self, loss_of: Callable[[Any], Any]) -> Any:  # noqa: ANN401
        return getattr(loss_of, "__func__", loss_of)

    def _signature(self, loss_of: Callable[[Any], Any], batch: Any, how: tuple[Any, ...]) -> tuple[Any, ...] | None:  # noqa: ANN401
        """Return a key that is equal for minibatches that share a check of the guards; None if each needs its own."""
        if type(batch) is not Batch or batch.sequences is not None:
            return None
        return self._key(loss_of), how, [*batch.fields], batch.counts_all_rows, batch.is_normalized

    def _attributes(self) -> Iterator[Any]:
        """Return all attributes that a loss may read; the guards are checked again if one of them is replaced."""
        return itertools.chain(vars(self._model).values(), vars(self._model.estimator).values())

    def _fitted(self, signature: tuple[Any, ...] | None, batch: Any) -> Binding | None:  # noqa: ANN401
        """Return the current binding with the inputs of a minibatch, or None if the guards need a check."""
        binding = self._binding
        if binding is None or signature is None or binding.signature != signature:
            return None
        found = [*leaves(batch.fields)]
        if binding.graph.layouts.get(len(found[0])) != _layout(found):
            return None
        if not all(map(operator.is_, self._attributes(), binding.attributes)):
            return None
        self._scalar("weight", batch.weight)
        for k, place in binding.graph.places or ():
            binding.inputs[k] = found[place]
        return binding

    def _bind(self, graph: Graph, batch: Any, signature: tuple[Any, ...] | None, program: Any) -> None:  # noqa: ANN401
        """Skip the guards for further minibatches if the origin of each input of the graph is known."""
        if signature is None or graph.has_side_effects:
            return
        found = [*leaves(batch.fields)]
        if graph.places is None:
            of_batch = {id(x): k for k, x in enumerate(found)}
            model = self._model
            scalars = (tensor for tensor, _ in self._scalars.values())
            fixed = {*map(id, (*model.parameters(), *model.buffers(), *scalars))}
            known = (id(x) in fixed or id(x) in of_batch for x in graph.inputs if isinstance(x, Tensor))
            places = [(k, of_batch[id(x)]) for k, x in enumerate(graph.inputs) if id(x) in of_batch]
            graph.places = places if all(known) else []
        if graph.places:
            graph.layouts[len(found[0])] = _layout(found)
            attributes = [*self._attributes()]
            self._binding = Binding(graph, program, [*graph.inputs], signature, attributes)

    def _scalar(self, key: Any, value: float) -> Tensor:  # noqa: ANN401
        """Return the scalar tensor of a number, filled with its current value."""
        if key not in self._scalars:
            dtype = torch.promote_types(self._model.dtype, torch.float32)
            self._scalars[key] = torch.zeros((), dtype=dtype, device=self._model.device), 0.0
        tensor, before = self._scalars[key]
        if value != before:
            self._scalars[key] = tensor.fill_(value), value
        return tensor

    def _with_tensor_as_weight(self, batch: Batch) -> Batch:
        weight, normalized = self._scalar("weight", batch.weight), batch.is_normalized
        batch = batch.replace()
        batch.weight, batch.is_normalized = cast(Any, weight), normalized
        return batch

    @contextmanager
    def _tensors_as_scheduled_options(self) -> Iterator[None]:
        """Replace scheduled options by scalar tensors, so that they are not constants of the graph."""
        # Zero and infinity stay numbers, because losses skip terms with such coefficients.
        options = list(self._model.schedules.attributes(self._model))
        found = [(owner, name, getattr(owner, name)) for owner, name in options]
        for owner, name, value in found:
            if isinstance(value, int | float) and value != 0 and math.isfinite(value):
                vars(owner)[name] = self._scalar((id(owner), name), value)
        try:
            yield
        finally:
            for owner, name, value in found:
                vars(owner)[name] = value


def _layout(tensors: Iterable[Tensor]) -> list[Any]:
    return [(x.shape, x.stride(), x.dtype) for x in tensors]


def _vectors(steps: Any) -> list[list[Vectors]]:  # noqa: ANN401
    """Return the vectors of each active optimizer; an empty list if a parameter is frozen or in no vector."""
    found: list[list[Vectors]] = []
    for optimizer in () if steps.model.frozen_parameters(steps.part) else steps.optimizers:
        raw = optimizer.optimizer
        if not isinstance(raw, FlatAdam) or raw.is_watched:
            return []
        for parameter in (x for group in raw.param_groups for x in group["params"] if x.grad is None):
            parameter.grad = torch.zeros_like(parameter)
        found.append(raw.vectors())
    return found
