"""Engines for faster updates: closed-form or compiled gradients, and optimizer steps without Lightning's hooks."""

from __future__ import annotations

import itertools
import math
import operator
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rl.distributed import world_size
from lightning_rl.fast.flat_adam import FlatAdam, Vectors
from lightning_rl.fast.numpy_mlp import needs_autograd, overridden
from lightning_rl.fast.ppo import PPOLoss
from lightning_rl.fast.programs import (
    Capture,
    GradientProgram,
    Graph,
    KnownLoss,
    Step,
    StepProgram,
    StepState,
    batches_of,
    constants_of,
)
from lightning_rl.nested import leaves
from lightning_rl.rollouts.batch import Batch

_Loss = TypeVar("_Loss", bound=Callable[..., Any])
_MARK = "closed_form"
_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
_STRATEGY = ("pre_backward", "backward", "post_backward", "optimizer_step")
# The last log line about the engine of each algorithm.
_logged: WeakKeyDictionary[LightningModule, str] = WeakKeyDictionary()


def closed_form(form: type[PPOLoss], reads: Sequence[str]) -> Callable[[_Loss], _Loss]:
    """Mark a `loss(batch)` whose loss and gradient `form` computes too; edit both together.

    `reads` are the members that `loss` calls and `form` reimplements, and members that process the result. If a
    subclass or instance overrides one of them, autograd computes the gradient.
    """

    def mark(loss: _Loss) -> _Loss:
        setattr(loss, _MARK, (form, tuple(reads)))
        return loss

    return mark


def step_progress(model: LightningModule) -> Any:
    """Return the counter of Lightning's global steps in manual optimization."""
    return model.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress


class FastEngine:
    """Computes gradients in closed form if there is one, and skips Lightning's hooks in backward passes and steps."""

    normalizes_in_loss = False

    def __init__(self, closed_form: PPOLoss | None = None) -> None:
        self.closed_form = closed_form
        self._gradients: list[tuple[nn.Parameter, Tensor]] | None = None

    def whole_step(self, steps: Any, loss_of: Callable[[Any], Any], batch: Any) -> Step | None:
        """Return None: this engine has no program for a whole step."""
        return None

    def loss(self, model: Any, loss_of: Callable[[Any], Any], batch: Any, part: str | None) -> Any:
        """Return the loss over a minibatch, whose `total` is for `backward`."""
        known = self.known_loss(model, loss_of, batch, part)
        loss, self._gradients = (loss_of(batch), None) if known is None else known
        return loss

    def known_loss(self, model: Any, loss_of: Callable[[Any], Any], batch: Any, part: str | None) -> KnownLoss | None:
        """Return the loss with its gradients; None if autograd has to compute them."""
        has_form = self.closed_form is not None and part is None and loss_of == model.loss
        return self.closed_form(batch) if has_form else None  # type: ignore[misc]

    def backward(self, model: LightningModule, total: Tensor) -> None:
        """Compute the gradient of the last loss."""
        if self._gradients is None:
            total.backward()  # type: ignore[no-untyped-call]
        for parameter, gradient in self._gradients or ():
            parameter.grad = gradient

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return all gradients of an optimizer; `FlatAdam` has one tensor per parameter group."""
        tensors = [vectors.values for vectors in optimizer.vectors()] if isinstance(optimizer, FlatAdam) else []
        tensors = tensors or [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    def step(self, model: LightningModule, optimizer: LightningOptimizer, counts: bool) -> None:
        """Take an optimizer step; `counts` increments Lightning's global step."""
        raw = optimizer.optimizer
        step = raw.step_alone if isinstance(raw, FlatAdam) else raw.step
        if not counts:
            step()
            return
        trainer, progress = model.trainer, step_progress(model)
        progress.increment_ready()
        trainer.profiler.start("optimizer_step")  # type: ignore[attr-defined]
        step()
        trainer.profiler.stop("optimizer_step")  # type: ignore[attr-defined]
        progress.increment_completed()


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

    PyTorch's compiler captures `loss(batch)` as a graph with guards on all Python values it reads. Graph, gradient and
    optimizer step are compiled into one program. The guards are checked for the first minibatch of each rollout, and
    whenever the algorithm, the loss or the shapes changed.

    `captures` has the captured graphs of each loss, `failed` the losses that cannot be compiled.
    """

    def __init__(self, model: Any) -> None:  # an algorithm, whose module imports this folder
        super().__init__()
        self._model = model
        # A loss from another package, or one that its `update` takes, may read the advantages of a minibatch.
        methods = [getattr(model, name) for name in ("loss", "add_policy_terms", "update") if hasattr(model, name)]
        self.normalizes_in_loss = all(method.__module__.startswith("lightning_rl.") for method in methods)
        self.captures: dict[Any, Capture] = {}
        self.failed: set[Any] = set()
        # Pairs of loss and network part whose step is not in the program.
        self._apart: set[Any] = set()
        # Tensors in place of numbers that change between minibatches or over the run, with their values.
        self._scalars: dict[Any, tuple[Tensor, float]] = {}
        self._binding: Binding | None = None

    def begin(self) -> None:
        """Require a check of the guards for the next minibatch."""
        self._binding, self._parameters = None, [*self._model.parameters()]

    def whole_step(self, steps: Any, loss_of: Callable[[Any], Any], batch: Any) -> Step | None:
        """Take a whole step of `GradientSteps` in one program and count it; None if there is no such program."""
        key = self._key(loss_of)
        if world_size() > 1 or steps.rollback or key in self.failed or (key, steps.part) in self._apart:
            return None
        record = steps.record
        state = StepState(record.is_open, record.finite, record.num_updates)
        if state.is_open is state.finite:  # the compiler would merge them into one input
            state = state._replace(finite=state.finite.clone())

        def program_of(graph: Graph) -> StepProgram | None:
            optimizers = _vectors(steps)
            groups = [vectors for some in optimizers for vectors in some]
            if set(graph.parameters) != {parameter for vectors in groups for parameter in vectors.parameters}:
                self._apart.add((key, steps.part))
                return None
            limits, norms = (steps.max_grad_norm, steps.max_grad_value), steps.norm_names[: len(optimizers)]
            constants = [constants_of(vectors.group) for vectors in groups]
            made_for = (tuple(map(len, optimizers)), *limits, *constants)
            if made_for not in graph.programs:
                graph.programs[made_for] = StepProgram(graph, optimizers, norms, *limits)
            program = cast(StepProgram, graph.programs[made_for])
            program.use(groups)
            return program

        how = (StepProgram, steps.part, steps.active_set, steps.max_grad_norm, steps.max_grad_value)
        step: Step | None = self._run(loss_of, batch, how, program_of, state)
        if step is not None and (not step[1].is_open.is_cpu or step[1].is_open):
            progress = step_progress(steps.model)
            progress.increment_ready()
            progress.increment_completed()
        return step

    def known_loss(self, model: Any, loss_of: Callable[[Any], Any], batch: Any, part: str | None) -> KnownLoss | None:
        if self._key(loss_of) in self.failed:
            return None

        def program_of(graph: Graph) -> GradientProgram:
            if None not in graph.programs:
                graph.programs[None] = GradientProgram(graph)
            return cast(GradientProgram, graph.programs[None])

        known: KnownLoss | None = self._run(loss_of, batch, (GradientProgram, part, None), program_of)
        return known

    def _run(
        self,
        loss_of: Callable[[Any], Any],
        batch: Any,
        how: tuple[Any, ...],
        program_of: Callable[[Graph], Any],
        *state: StepState,
    ) -> Any:  # of the program's type
        """Run a program of a loss on a minibatch, and return its result; None if there is none, or if it fails."""
        signature = self._signature(loss_of, batch, how)
        if (binding := self._fitted(signature, batch)) is not None:
            binding.program(binding.inputs, *state)
            return binding.program.result
        self._binding, program = None, None

        def compute(graph: Graph) -> Sequence[Tensor]:
            nonlocal program
            program = program_of(graph)
            return graph.outputs if program is None else program(graph.inputs, *state)

        graph = self._guarded(loss_of, batch, compute)
        if graph is None or program is None:
            return None
        self._bind(graph, batch, signature, program)
        return program.result

    def _guarded(
        self, loss_of: Callable[[Any], Any], batch: Any, compute: Callable[[Graph], Sequence[Tensor]]
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
        try:
            with self._tensors_as_numbers(batch):
                loss = capture(batch)
                while not (graph := cast(Graph, capture.graph)).is_understood:
                    graph.understand(loss, [x for x in self._model.parameters() if x.requires_grad])
                    loss = capture(batch)
                if not graph.has_side_effects:
                    compute(graph)
        except Exception as error:
            self.failed.add(key)
            cause = getattr(error, "inner_exception", error)  # the compiler wraps errors of its backend
            reason = str(cause).strip().partition("\n")[0]
            rank_zero_info(
                f"{type(self._model).__name__}.{key.__name__} cannot be compiled; autograd computes its gradient: "
                f"{type(cause).__name__}: {reason}"
            )
            return None
        return graph

    def _key(self, loss_of: Callable[[Any], Any]) -> Any:
        return getattr(loss_of, "__func__", loss_of)

    def _signature(self, loss_of: Callable[[Any], Any], batch: Any, how: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return a key that is equal for minibatches that share a check of the guards; None if each needs its own."""
        if type(batch) is not Batch or batch.sequences is not None:
            return None
        return self._key(loss_of), how, [*batch.fields], batch.counts_all_rows, batch.is_normalized

    def _attributes(self) -> Iterator[Any]:
        """Return what a loss or step reads beside the minibatch; the guards are checked again if one is replaced."""
        own = vars(self._model)
        vectors = (getattr(x.optimizer, "_vectors", None) for x in self._model.steps.optimizers)
        trained = (x.requires_grad for x in self._parameters)
        return itertools.chain(
            own.values(), own["_buffers"].values(), vars(self._model.estimator).values(), vectors, trained
        )

    def _fitted(self, signature: tuple[Any, ...] | None, batch: Any) -> Binding | None:
        """Return the current binding with the inputs of a minibatch, or None if the guards need a check."""
        binding = self._binding
        if binding is None or signature is None or binding.signature != signature:
            return None
        found = leaves(batch.fields)
        if binding.graph.layouts.get(len(found[0])) != _layout(found):
            return None
        if not all(map(operator.is_, self._attributes(), binding.attributes)):
            return None
        self._scalar("weight", batch.weight)
        for k, place in binding.graph.places or ():
            binding.inputs[k] = found[place]
        return binding

    def _bind(self, graph: Graph, batch: Any, signature: tuple[Any, ...] | None, program: Any) -> None:
        """Skip the guards for further minibatches if the origin of each input of the graph is known."""
        if signature is None or graph.has_side_effects:
            return
        found = leaves(batch.fields)
        if graph.places is None:
            of_batch = {id(x): k for k, x in enumerate(found)}
            model = self._model
            scalars = (tensor for tensor, _ in self._scalars.values())
            buffers = (buffer for _, buffer in model.named_buffers())  # with integers, unlike `model.buffers()`
            fixed = {*map(id, (*model.parameters(), *buffers, *scalars))}
            known = (id(x) in fixed or id(x) in of_batch for x in graph.inputs if isinstance(x, Tensor))
            places = [(k, of_batch[id(x)]) for k, x in enumerate(graph.inputs) if id(x) in of_batch]
            graph.places = places if all(known) else []
        if graph.places:
            graph.layouts[len(found[0])] = _layout(found)
            attributes = [*self._attributes()]
            self._binding = Binding(graph, program, [*graph.inputs], signature, attributes)

    def _scalar(self, key: Any, value: float) -> Tensor:
        """Return the scalar tensor of a number, filled with its current value."""
        if key not in self._scalars:
            dtype = torch.promote_types(self._model.dtype, torch.float32)
            self._scalars[key] = torch.zeros((), dtype=dtype, device=self._model.device), 0.0
        tensor, before = self._scalars[key]
        if value != before:
            self._scalars[key] = tensor.fill_(value), value
        return tensor

    @contextmanager
    def _tensors_as_numbers(self, batch: Any) -> Iterator[None]:
        """Replace scheduled options and weights of batches by scalar tensors, so that they are not graph constants."""
        # Zero and infinity stay numbers, because losses skip terms with such coefficients.
        found = [(owner, name, getattr(owner, name)) for owner, name in self._model.schedules.attributes()]
        for owner, name, value in found:
            if isinstance(value, int | float) and value != 0 and math.isfinite(value):
                vars(owner)[name] = self._scalar((id(owner), name), value)
        for one in batches_of(batch):  # they have a common weight
            found.append((one, "_given_weight", vars(one)["_given_weight"]))
            one.weight = cast(Any, self._scalar("weight", one.weight))
        try:
            yield
        finally:
            for owner, name, value in found:
                vars(owner)[name] = value


def _layout(tensors: Iterable[Tensor]) -> list[Any]:
    return [(x.shape, x.stride(), x.dtype) for x in tensors]


def _vectors(steps: Any) -> list[list[Vectors]]:
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


def engine_for(model: LightningModule) -> FastEngine | None:
    """Return the engine for the next rollout, or None for plain PyTorch and Lightning; log changes."""
    engine: FastEngine | None = FastEngine()
    if (reason := why_not(model)) is not None:
        engine, how = None, f"plain PyTorch and Lightning: {reason}"
    elif cast(Any, model).options["debug.fast_paths"] != "compiled":
        form = closed_form_of(model)
        engine = FastEngine(None if isinstance(form, str) else form)
        how = f"the fast engine, with {f'autograd: {form}' if isinstance(form, str) else 'the closed form of its loss'}"
    elif (reason := why_not_compiled(model)) is not None:
        how = f"the fast engine, with autograd: {reason}"
    else:
        before = cast(Any, model).steps.engine  # has the programs of earlier rollouts
        engine = before if isinstance(before, CompiledEngine) else CompiledEngine(model)
        engine.begin()
        how = "the compiled engine"
    line = f"{type(model).__name__} updates by {how}"
    if _logged.get(model) != line:
        _logged[model] = line
        rank_zero_info(line)
    return engine


def why_not(model: Any) -> str | None:
    """Return the reason why a model needs Lightning's own backward pass and step, or None."""
    fast_paths = model.options["debug.fast_paths"]
    if fast_paths == "none":
        return "debug.fast_paths is none"
    if torch.is_anomaly_enabled():
        return "anomaly detection is on"
    if model.device_mesh is not None:
        return "the parameters are sharded over ranks"
    trainer, is_compiled = model.trainer, fast_paths == "compiled"
    if trainer.world_size > 1 and not is_compiled:
        return "several ranks exchange gradients in the backward pass"
    strategy = trainer.strategy
    members: list[tuple[object, type[Any], Sequence[str]]] = [
        (model, LightningModule, (*_HOOKS, "backward", "manual_backward")),
        *((callback, Callback, _HOOKS) for callback in trainer.callbacks),
        (strategy, DDPStrategy if is_compiled and isinstance(strategy, DDPStrategy) else Strategy, _STRATEGY),
    ]
    # Mixed precision with bfloat16 does nothing in these hooks; float16 scales gradients.
    precision = strategy.precision_plugin
    if not (is_compiled and type(precision) is MixedPrecision and precision.scaler is None):
        members.append((precision, Precision, _STRATEGY))
    found = ((type(owner).__name__, overridden(owner, base, names)) for owner, base, names in members)
    return next((f"{owner} overrides {name}" for owner, name in found if name is not None), None)


def why_not_compiled(model: Any) -> str | None:
    """Return the reason why the losses of a model cannot be compiled, or None."""
    if getattr(model.policy, "memory", None) is not None:
        return "the policy has memory, and its sequences differ in length between rollouts"
    if needs_autograd(model.policy):
        return "the policy has hooks or is compiled"
    return None


def compiler_problem(device: torch.device) -> str | None:
    """Return the reason why a device cannot run compiled programs, or None."""
    if device.type not in ("cpu", "cuda"):
        return f"the device is {device.type}"
    if torch.__version__ < "2.11":  # compares versions, not text
        return f"PyTorch {torch.__version__} cannot trace a loss with its gradient: 2.11 can"
    named, known = os.environ.get("CXX"), ["cl"] if os.name == "nt" else ["g++", "clang++", "c++"]
    if not any(map(shutil.which, [named] if named else known)):
        return f"there is no C++ compiler{f' {named}' if named else ''}: install {' or '.join(known[:2])}, or set CXX"
    return None


def closed_form_of(model: Any) -> PPOLoss | str:
    """Return the closed form of the loss of a model, or the reason why there is none."""
    form, reads = getattr(getattr(type(model), "loss", None), _MARK, (None, ()))
    if form is None:
        return "only the loss of PPO has a closed form"
    owner = next(cls for cls in type(model).__mro__ if "loss" in vars(cls))
    if (name := overridden(model, owner, ("loss", *reads))) is not None:
        return f"{name} is overridden"
    return form.of(model)  # type: ignore[no-any-return]
