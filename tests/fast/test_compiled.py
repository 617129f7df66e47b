"""The compiled engine: when it updates, what it keeps of the plain engine, and what it says."""

import copy
import gc
import logging
import math
import pickle
import shutil
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch.torch_version import TorchVersion

from lightning_rl import PPO, RND, fast
from lightning_rl.distributed import leave_process_group
from lightning_rl.fast import programs
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    CONTINUOUS,
    DISCRETE,
    VECTOR,
    FixedRollouts,
    assert_equal_parameters,
    make_data,
    make_model,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
HAS_COMPILER = any(map(shutil.which, ["g++", "c++", "clang++"]))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")

SMALL: dict[str, Any] = {"policy": {"hidden_sizes": (8,)}, "num_epochs": 2, "num_minibatches": 2, "learning_rate": 1e-2}


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run programs without compiling them, which takes seconds."""
    torch.compiler.reset()
    monkeypatch.setattr(fast.programs, "Compiled", lambda function, *_: function)


def learn(
    space: Any = DISCRETE,
    rollouts: Any = range(3),
    trainer: dict[str, Any] | None = None,
    fast_paths: str = "compiled",
    algorithm: type[PPO] = PPO,
    **options: Any,
) -> PPO:
    torch.manual_seed(0)
    model = algorithm(VECTOR, space, **merged(SMALL, {"debug": {"fast_paths": fast_paths}}, options))
    made = [random_rollout(model.policy, seed=seed) for seed in rollouts]
    make_trainer(**trainer or {}).fit(model, FixedRollouts(made, model))
    return model


def assert_alike(model: PPO, other: PPO, tolerance: float = 1e-6) -> None:
    expected = parameters_of(other)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=tolerance)
    assert model.losses == pytest.approx(other.losses, rel=1e-4, abs=1e-6, nan_ok=True)
    assert model.trainer.global_step == other.trainer.global_step


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.message for record in caplog.records if part in record.message]


def num_graphs(model: PPO) -> int:
    return sum(len(capture.graphs) for capture in model.steps.engine.captures.values())


LINEAR = {"kind": "linear", "start": 0.3, "end": 0.1, "over": 150}
SCHEDULES: dict[str, Any] = {
    "clip_range": LINEAR,
    "clipping": {"value": LINEAR},
    "entropy_coef": LINEAR,
    "learning_rate": LINEAR | {"start": 1e-2, "end": 1e-3},
    "target_kl": LINEAR | {"start": 30.0, "end": 10.0},
}


@pytest.mark.parametrize("optimizer", [None, "torch.optim.RMSprop"])
def test_scheduled_options_do_not_recompile(optimizer, uncompiled, monkeypatch):
    compiled: list[Any] = []
    monkeypatch.setattr(programs, "Compiled", lambda function, *_: compiled.append(function) or function)
    options = SCHEDULES | {"optimizer": {"name": optimizer}}
    model = learn(**options)
    assert num_graphs(model) == len(compiled) == 1
    assert_alike(model, learn(**options, fast_paths="none"))


@pytest.mark.parametrize(("algorithm", "options"), [(PPO, {}), (RND, {"predictor_fraction": 0.9})])
def test_rollouts_of_other_sizes_do_not_recompile(algorithm, options, uncompiled):
    ends = []
    for fast_paths in ("compiled", "none"):
        torch.manual_seed(0)
        model = algorithm(VECTOR, DISCRETE, **SMALL, **options, debug={"fast_paths": fast_paths})
        rollouts = [random_rollout(model.policy, seed=seed, valid=True) for seed in range(4)]
        assert len({rollout.num_steps for rollout in rollouts}) > 1
        make_trainer().fit(model, FixedRollouts(rollouts, model))
        ends.append(model)
    assert num_graphs(ends[0]) == 1
    assert_alike(*ends)


OPTIONS: dict[str, dict[str, Any]] = {
    "divergence": {"target_kl": 0.03},
    "divergence of each update": {"target_kl": 0.03, "clipping": {"rollback": True}},
    "two optimizers": {"optimizer": {"critic": {"learning_rate": 1e-3}, "max_grad_norm": 0.05, "max_grad_value": 0.02}},
    "groups": {"optimizer": {"groups": {"*.bias": {"weight_decay": 0.1, "learning_rate_scale": 0.5}}}},
    "checks": {"debug": {"check_numerics": True}},
    "another optimizer": {"optimizer": {"name": "torch.optim.RMSprop"}},
    "warm-up of the critic": {"optimizer": {"critic_warmup_steps": 60, "num_value_epochs": 3}},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_gradient_clipping_and_optimizer_options_equal_autograd(case, uncompiled):
    model, other = (learn(**OPTIONS[case], fast_paths=fast_paths) for fast_paths in ("compiled", "none"))
    assert not model.steps.engine.failed
    assert_alike(model, other)
    if case == "divergence":
        assert model.trainer.global_step < 12


def test_networks_with_frozen_parameters_are_compiled(uncompiled):
    model, other = (learn(algorithm=RND, fast_paths=fast_paths) for fast_paths in ("compiled", "none"))
    assert not model.steps.engine.failed
    assert_alike(model, other, 1e-5)


def test_limits_of_the_standard_deviation_are_compiled(monkeypatch):
    """The compiler traces the programs, but they run without one. About half of the deviations exceed the limit."""
    torch.compiler.reset()
    monkeypatch.setattr(fast.programs, "Compiled", lambda f, *_: torch.compile(f, backend="eager", fullgraph=True))
    limited = {"action_distribution": {"kind": "gaussian", "std": "state_dependent", "max_std": 1.0}}
    model, other = (learn(CONTINUOUS, policy=limited, fast_paths=fast_paths) for fast_paths in ("compiled", "none"))
    assert not model.steps.engine.failed
    assert_alike(model, other)


def test_non_finite_updates_are_skipped(uncompiled):
    class Spoiled(PPO):
        def batch(self, rollout: Any, **per_step: Any) -> Any:
            batch = super().batch(rollout, **per_step)
            if self.policy_version == 1:
                batch.fields["returns"] = batch.returns * math.nan
            return batch

    ends = []
    for fast_paths in ("compiled", "none"):
        torch.manual_seed(0)
        model = Spoiled(VECTOR, DISCRETE, **SMALL, debug={"max_skipped_updates": 1, "fast_paths": fast_paths})
        rollouts = [random_rollout(model.policy, seed=seed) for seed in range(3)]
        make_trainer().fit(model, FixedRollouts(rollouts, model))
        ends.append(model)
    assert_alike(*ends)
    assert ends[0].trainer.global_step == 8


def test_a_number_that_the_loss_reads_may_change_within_a_rollout(uncompiled):
    class Rising(PPO):
        def update(self, rollout: Any) -> None:
            for minibatch in self.minibatches(self.batch(rollout), self.num_epochs, self.num_minibatches):
                self.descend(self.loss, minibatch)
                self.value_coef = 2.0 if self.value_coef == 0.5 else 0.5

    torch.manual_seed(0)
    ends = []
    for fast_paths in ("compiled", "none"):
        torch.manual_seed(0)
        model = Rising(VECTOR, DISCRETE, **SMALL, debug={"fast_paths": fast_paths})
        make_trainer().fit(model, FixedRollouts([random_rollout(model.policy)], model))
        ends.append(model)
    assert num_graphs(ends[0]) == 2
    assert_alike(*ends)


def test_a_buffer_that_the_loss_reads_may_change_within_a_rollout(uncompiled):
    class Rising(PPO):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.register_buffer("extra_coef", torch.zeros(()))

        def update(self, rollout: Any) -> None:
            for minibatch in self.minibatches(self.batch(rollout), self.num_epochs, self.num_minibatches):
                self.extra_coef = self.extra_coef + 1
                self.descend(self.loss, minibatch)

        def loss(self, batch: Any) -> Any:
            loss = super().loss(batch)
            loss.add("extra", batch.values + 1, self.extra_coef)
            loss.observe(coef=self.extra_coef.expand(len(batch)))
            return loss

    for fast_paths in ("compiled", "none"):
        model = learn(rollouts=[0], fast_paths=fast_paths, algorithm=Rising)
        assert model.losses["coef"] == 2.5  # of four minibatches


def freeze(model: PPO, number: int) -> None:
    model.policy.action_head.requires_grad_(number % 2 == 0)


def clip_less(model: PPO, number: int) -> None:
    model.steps.max_grad_norm = 0.05 * (number + 1)


def restore(model: PPO, number: int) -> None:
    optimizer = model.optimizers().optimizer
    if number == 1:
        model.kept = copy.deepcopy(optimizer.state_dict())
    elif number == 2:
        optimizer.load_state_dict(model.kept)


@pytest.mark.parametrize("fast_paths", ["auto", "compiled"])
@pytest.mark.parametrize("change", [freeze, clip_less, restore])
def test_an_update_may_change_what_a_step_reads(change, fast_paths, uncompiled):
    class Changing(PPO):
        def update(self, rollout: Any) -> None:
            for k, minibatch in enumerate(self.minibatches(self.batch(rollout), self.num_epochs, self.num_minibatches)):
                change(self, k)
                self.descend(self.loss, minibatch)

    model, other = (learn(algorithm=Changing, fast_paths=path) for path in (fast_paths, "none"))
    assert_alike(model, other)


@pytest.mark.parametrize("normalize", ["minibatch", "rollout", "none"])
def test_a_loss_that_reads_the_advantages_gets_them_as_normalized_as_without_compiler(normalize, uncompiled):
    class Own(PPO):
        def loss(self, batch: Any) -> Any:
            distribution, values = self.actor_critic(batch)
            loss = self.new_loss(batch)
            loss.add("policy_loss", -distribution.log_prob(batch.actions) * batch.advantages)
            loss.observe(square=batch.advantages.square())
            loss.add_value(values, 0.5)
            return loss

    advantages = {"normalize": normalize}
    ends = [learn(algorithm=Own, fast_paths=path, advantages=advantages) for path in ("compiled", "none")]
    assert_alike(*ends)
    assert ends[0].losses["square"] == pytest.approx(ends[1].losses["square"], rel=1e-5)
    rollout = random_rollout(ends[0].policy, seed=9)
    square = ends[0].compute_loss(rollout)["square"]
    assert (square == pytest.approx(1, abs=0.1)) == (normalize != "none")


def test_a_second_loss_over_the_minibatches_of_ppo_gets_normalized_advantages(uncompiled):
    class Second(PPO):
        def update(self, rollout: Any) -> None:
            for minibatch in self.minibatches(self.batch(rollout), self.num_epochs, self.num_minibatches):
                self.descend(self.loss, minibatch)
                self.descend(self.second, minibatch)

        def second(self, batch: Any) -> Any:
            distribution, _ = self.actor_critic(batch)
            loss = self.new_loss(batch)
            loss.add("second_loss", -distribution.log_prob(batch.actions) * batch.advantages)
            loss.observe(square=batch.advantages.square())
            return loss

    ends = [learn(rollouts=[0], algorithm=Second, fast_paths=path) for path in ("compiled", "none")]
    assert_alike(*ends)
    assert ends[0].losses["square"] == pytest.approx(1, abs=0.1)


def test_resumed_run_is_bit_identical(uncompiled, tmp_path):
    whole = make_model(data := make_data(), debug={"fast_paths": "compiled"})
    make_trainer(max_epochs=2).fit(whole, data)
    first = make_model(data := make_data(), debug={"fast_paths": "compiled"})
    (trainer := make_trainer(max_epochs=1)).fit(first, data)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    resumed = make_model(data := make_data(), debug={"fast_paths": "compiled"})
    make_trainer(max_epochs=2).fit(resumed, data, ckpt_path=tmp_path / "model.ckpt")
    assert resumed.policy_version == whole.policy_version > first.policy_version
    assert_equal_parameters(resumed, parameters_of(whole))


def test_tanh_of_compiled_programs_is_exact_to_1e_7_also_where_its_exponential_is_0():
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([0.0, -0.0, 1e3, -1e3, math.inf, -math.inf, math.nan])])
    x.requires_grad_()
    y, expected = programs.QuickTanh.apply(x), torch.tanh(x.double())
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-7, equal_nan=True)
    assert torch.equal(y.signbit()[:-1], x.signbit()[:-1])
    (found,), (gradient,) = (torch.autograd.grad(some.sum(), x) for some in (y, expected))
    torch.testing.assert_close(found, gradient, rtol=0, atol=2e-7, equal_nan=True)


def test_mixed_precision_is_compiled(uncompiled):
    mixed: dict[str, Any] = {"precision": "bf16-mixed"}
    model, other = (learn(trainer=mixed, fast_paths=fast_paths) for fast_paths in ("compiled", "none"))
    assert isinstance(model.steps.engine, fast.CompiledEngine) and not model.steps.engine.failed
    assert_alike(model, other, tolerance=1e-4)


class BeforeStep(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Look on."""


class OwnStrategy(DDPStrategy):
    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        return super().backward(closure_loss, *args, **kwargs)


UNSUITED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "memory": (
        {"policy": {"memory": "lstm"}},
        {},
        "PPO updates by the fast engine, with autograd: the policy has memory, and its sequences differ in length "
        "between rollouts",
    ),
    "hooks": (
        {},
        {"callbacks": [BeforeStep()]},
        "PPO updates by plain PyTorch and Lightning: BeforeStep overrides on_before_optimizer_step",
    ),
    "strategy": (
        {},
        {"strategy": OwnStrategy()},
        "PPO updates by plain PyTorch and Lightning: OwnStrategy overrides backward",
    ),
}


@pytest.mark.parametrize("case", UNSUITED)
def test_log_gives_the_reason_if_nothing_is_compiled(case, uncompiled, caplog):
    options, trainer, line = UNSUITED[case]
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        data = make_data()
        make_trainer(**trainer).fit(make_model(data, debug={"fast_paths": "compiled"}, **options), data)
    leave_process_group()  # of the strategy
    assert lines(caplog, " updates by ") == [line]
    assert not lines(caplog, "compiling")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.setenv("CXX", "no-such-compiler"), r"there is no C\+\+ compiler no-such-compiler"),
        (
            lambda patch: patch.setattr(torch, "__version__", TorchVersion("2.10.0+cpu")),
            "PyTorch 2.10.0.cpu cannot trace",
        ),
    ],
)
def test_a_compiler_that_cannot_work_is_an_error_that_names_the_reason(change, reason, monkeypatch):
    model, trainer = PPO(VECTOR, DISCRETE, debug={"fast_paths": "compiled"}), make_trainer()
    model.check_run(trainer, None)
    change(monkeypatch)
    with pytest.raises(ConfigurationError, match=f"debug.fast_paths='compiled' .* expected auto, since {reason}"):
        model.check_run(trainer, None)


def test_the_compiler_of_windows_is_cl(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    problems = []
    for installed in ("cl", "g++"):
        with monkeypatch.context() as patch:
            patch.setattr("os.name", "nt")
            patch.setattr(shutil, "which", {installed: installed}.get)
            problems.append(fast.compiler_problem(torch.device("cpu")))
    assert problems == [None, "there is no C++ compiler: install cl, or set CXX"]


def test_unknown_value_of_fast_paths_is_an_error():
    with pytest.raises(ConfigurationError, match=r"^debug\.fast_paths=True is not valid: expected one of"):
        PPO(VECTOR, DISCRETE, debug={"fast_paths": True})


def test_loss_that_cannot_be_compiled_falls_back_to_autograd_and_logs_the_reason(uncompiled, caplog):
    class Reading(PPO):
        def loss(self, batch: Any) -> Any:
            loss = super().loss(batch)
            if float(batch.returns.sum()) > 1e9:
                loss.add_scalar("more", batch.returns.sum())
            return loss

    torch.manual_seed(0)
    model = Reading(VECTOR, DISCRETE, **SMALL, debug={"fast_paths": "compiled"})
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        make_trainer().fit(model, FixedRollouts([random_rollout(model.policy)], model))
    (line,) = lines(caplog, "cannot be compiled")
    assert line.startswith("Reading.loss cannot be compiled; autograd computes its gradient: ")
    assert_alike(model, learn(rollouts=range(1), fast_paths="none"))


def test_log_names_the_cause_of_an_error_that_the_compiler_wraps(uncompiled, monkeypatch, caplog):
    def fail(*args: Any) -> None:
        raise TypeError("data-dependent number of classes\nFor more information")

    monkeypatch.setattr(fast.programs, "Graph", fail)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        learn(rollouts=range(1))
    (line,) = lines(caplog, "cannot be compiled")
    assert line.endswith(": TypeError: data-dependent number of classes")


def test_program_that_cannot_be_compiled_falls_back_to_autograd(monkeypatch, caplog):
    def fail(*args: Any) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(fast.programs, "Compiled", lambda *_: fail)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        model = learn(rollouts=range(1))
    (line,) = lines(caplog, "cannot be compiled")
    assert line.endswith("RuntimeError: no memory left")
    assert_alike(model, learn(rollouts=range(1), fast_paths="none"))


def test_hooks_of_parameters_see_the_gradient_of_autograd(uncompiled):
    class Doubled(PPO):
        def on_fit_start(self) -> None:
            super().on_fit_start()
            self.policy.value_head.weight.register_hook(lambda gradient: 2 * gradient)

    ends = []
    for fast_paths in ("compiled", "none"):
        torch.manual_seed(0)
        model = Doubled(VECTOR, DISCRETE, **SMALL, debug={"fast_paths": fast_paths})
        make_trainer().fit(model, FixedRollouts([random_rollout(model.policy)], model))
        ends.append(model)
    assert_alike(*ends)


def test_hooks_of_the_optimizer_run_after_each_step(uncompiled):
    class Bounded(PPO):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda *_: self.policy.value_head.weight.data.clamp_(-0.1, 0.1))
            return optimizer

    model, other = (learn(algorithm=Bounded, fast_paths=fast_paths) for fast_paths in ("compiled", "none"))
    assert model.policy.value_head.weight.abs().max() <= 0.1
    assert_alike(model, other)


def pretend_to_record(work):
    """Compute `work` anew in each run, as a CUDA graph does."""
    outputs = []

    def run():
        outputs[:] = work()

    return outputs, run


@pytest.mark.parametrize("case", ["divergence", "two optimizers", "another optimizer"])
def test_replayed_programs_take_the_same_steps(case, uncompiled, monkeypatch):
    recorded = []
    monkeypatch.setattr(programs.Replay, "device_type", "cpu")
    monkeypatch.setattr(programs, "recorded", lambda work: recorded.append(work) or pretend_to_record(work))
    options = SCHEDULES | OPTIONS[case]
    replayed = learn(**options)
    assert recorded
    monkeypatch.setattr(programs.Replay, "device_type", "cuda")
    assert_alike(replayed, learn(**options), tolerance=0)


def test_numbers_of_an_earlier_model_do_not_become_inputs(uncompiled):
    learn(entropy_coef=0.1)
    model = learn(entropy_coef=0.2)
    assert model.steps.engine._binding is not None  # minibatches share a check of the guards
    assert_alike(model, learn(entropy_coef=0.2, fast_paths="none"))


def compiled_run(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """Compare a compiled run with a plain one; return weak references to its model, Trainer and a parameter."""
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        model = learn(entropy_coef=0.1, target_kl=10.0)
    assert not model.steps.engine.failed
    assert len(lines(caplog, "PPO: compiling the update, once, about 10 s (cached for the next run)")) == 1
    assert_alike(model, learn(entropy_coef=0.1, target_kl=10.0, fast_paths="none"), tolerance=1e-5)
    return [weakref.ref(x) for x in (model, model.trainer, next(model.parameters()))]


@needs_compiler
def test_compiled_program_gives_the_same_parameters_and_frees_the_memory_of_the_run(caplog):
    torch.compiler.reset()
    kept = compiled_run(caplog)
    gc.collect()
    assert [reference() for reference in kept] == [None, None, None]


@pytest.mark.slow
@needs_compiler
def test_compiled_program_supports_continuous_actions_and_other_optimizers(monkeypatch):
    torch.compiler.reset()
    for options in (
        {"normalization": {"observations": True}, "optimizer": {"critic": {"learning_rate": 1e-3}}},
        {"optimizer": {"name": "torch.optim.RMSprop"}},
    ):
        model, other = (learn(CONTINUOUS, **options, fast_paths=fast_paths) for fast_paths in ("compiled", "none"))
        assert not model.steps.engine.failed
        assert_alike(model, other, tolerance=1e-5)


@pytest.mark.usefixtures("uncompiled")
def test_a_copy_of_a_trained_model_learns_like_the_model():
    model = learn()
    assert isinstance(model.steps.engine, fast.engine.CompiledEngine)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    made = [random_rollout(model.policy, seed=seed) for seed in (3, 4)]
    for one in (model, *copies):
        torch.manual_seed(0)
        make_trainer().fit(one, FixedRollouts(made, one))
    for one in copies:
        assert_equal_parameters(one, parameters_of(model))
