"""Which engine updates, and that nothing but a few lines knows of the folder."""

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor

import lightning_rl
from lightning_rl import A2C, IMPALA, PPG, PPO, PPOKLPenalty, fast
from lightning_rl.fast.engine import closed_form_of
from lightning_rl.training.gradient_steps import EagerEngine
from tests import programs
from tests.helpers import DISCRETE, VECTOR, make_data, make_model, make_trainer

PACKAGE = Path(lightning_rl.__file__).parent
DOOR = re.compile(
    r"^.*\b(import fast|fast\.(engine_for|actor|default_optimizer|closed_form|compiler_problem))\b.*\n", re.MULTILINE
)
"""Lines that use the folder."""


class Watch(Callback):
    """Notes which engine updates."""

    engine: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.engine = pl_module.steps.engine


class BeforeBackward(Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Look on."""


class BeforeStep(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Look on."""


class OwnPrecision(DoublePrecision):
    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, *args, **kwargs)


class OwnHook(PPO):
    def on_after_backward(self) -> None:
        """Look on."""


class OwnBackward(PPO):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)


class InDict(gymnasium.ObservationWrapper):
    """Observations in a `Dict` space of one part."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Dict(state=env.observation_space)

    def observation(self, observation: Any) -> dict[str, Any]:
        return {"state": observation}


def fitted(cls: type[Any] = PPO, trainer_options: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    data, watch = make_data(**{name: options.pop(name) for name in ("env",) if name in options}), Watch()
    torch.manual_seed(0)
    model = cls(data.observation_space, data.action_space, **options)
    trainer_options = trainer_options or {}
    callbacks = [watch, *trainer_options.pop("callbacks", [])]
    make_trainer(callbacks=callbacks, **trainer_options).fit(model, data)
    return model, watch.engine


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if " updates by " in record.message]


FAST = "{} updates by the fast engine, with "
LINES: dict[str, tuple[type[Any], dict[str, Any], str]] = {
    "defaults": (PPO, {}, FAST + "the closed form of its loss"),
    "an option": (PPO, {"clipping": {"dual": 3.0}}, FAST + "autograd: clipping.dual is set"),
    "activation": (
        PPO,
        {"policy": {"activation": "relu"}},
        FAST + "autograd: the policy is not two tanh MLPs with a categorical or Gaussian action",
    ),
    "observations in a dict": (
        PPO,
        {"env": {"wrappers": [{"class_path": "tests.fast.test_engine.InDict"}]}},
        FAST + "autograd: the observations are not vectors in a Box space",
    ),
    "penalties": (PPOKLPenalty, {}, FAST + "autograd: add_policy_terms is overridden"),
    "PPG": (PPG, {}, FAST + "autograd: add_policy_terms is overridden"),
    "A2C": (A2C, {}, FAST + "autograd: only the loss of PPO has a closed form"),
    "IMPALA": (IMPALA, {}, FAST + "autograd: only the loss of PPO has a closed form"),
    "switched off": (
        PPO,
        {"debug": {"fast_paths": "none"}},
        "{} updates by plain PyTorch and Lightning: debug.fast_paths is none",
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_log_names_the_engine_and_the_reason(case, caplog):
    cls, options, line = LINES[case]
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        _, engine = fitted(cls, **options)
    assert lines(caplog) == [line.format(cls.__name__)]
    assert isinstance(engine, EagerEngine) == ("plain" in line)


DECLINES: dict[str, tuple[type[Any], dict[str, Any], str]] = {
    "callback before backward": (PPO, {"callbacks": [BeforeBackward()]}, "BeforeBackward overrides on_before_backward"),
    "callback before a step": (PPO, {"callbacks": [BeforeStep()]}, "BeforeStep overrides on_before_optimizer_step"),
    "hook of the module": (OwnHook, {}, "OwnHook overrides on_after_backward"),
    "backward of the module": (OwnBackward, {}, "OwnBackward overrides backward"),
    "precision": (PPO, {"plugins": [OwnPrecision()]}, "OwnPrecision overrides backward"),
    "anomaly detection": (PPO, {"detect_anomaly": True}, "anomaly detection is on"),
    "mixed precision": (PPO, {"precision": "bf16-mixed"}, "MixedPrecision overrides pre_backward"),
}


@pytest.mark.parametrize("case", DECLINES)
def test_overridden_hooks_disable_the_fast_engine(case, caplog):
    cls, options, reason = DECLINES[case]
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        _, engine = fitted(cls, dict(options))
    assert isinstance(engine, EagerEngine)
    assert lines(caplog) == [f"{cls.__name__} updates by plain PyTorch and Lightning: {reason}"]


def test_engine_is_logged_only_when_it_changes(caplog):
    data = make_data()
    model = make_model(data)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        make_trainer(max_epochs=2).fit(model, data)
        make_trainer(callbacks=[BeforeStep()]).fit(model, data)
    assert len(lines(caplog)) == 2


ALGORITHMS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "closed form": (PPO, {"entropy_coef": 0.01, "normalization": {"observations": True}}),
    "autograd": (PPO, {"clipping": {"dual": 3.0}, "optimizer": {"critic": {"learning_rate": 1e-3}}}),
    "PPG": (PPG, {"num_policy_iterations": 1, "num_aux_epochs": 1}),
}


@pytest.mark.parametrize("case", ALGORITHMS)
def test_runs_with_and_without_fast_paths_agree(case):
    cls, options = ALGORITHMS[case]
    ends = [
        fitted(
            cls,
            {"precision": "64-true"},
            policy={"hidden_sizes": (16,)},
            debug={"fast_paths": fast_paths},
            **options,
        )
        for fast_paths in ("auto", "none")
    ]
    (quick, engine), (plain, other) = ends
    assert (type(engine), type(other)) == (fast.FastEngine, EagerEngine)
    assert type(quick.steps.optimizers[0].optimizer) is fast.FlatAdam
    assert type(plain.steps.optimizers[0].optimizer) is torch.optim.Adam
    assert quick.trainer.global_step == plain.trainer.global_step > 0
    for found, expected in zip(quick.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_closed_form_ignores_members_of_a_copied_class():
    class Own(PPO):
        def add_policy_terms(self, loss: Any, distribution: Any) -> None:
            super().add_policy_terms(loss, distribution)

    assert isinstance(closed_form_of(PPO(VECTOR, DISCRETE)), fast.PPOLoss)
    assert closed_form_of(Own(VECTOR, DISCRETE)) == "add_policy_terms is overridden"


def test_package_uses_only_the_public_names_of_the_folder():
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if "fast" not in path.relative_to(PACKAGE).parts:
            text = path.read_text()
            uses = re.findall(r"\bfast\.(?!md)\w+", text)
            if uses or re.search(r"^(from|import) .*\bfast\b|lightning_rl\.fast", text, re.MULTILINE):
                found[path.name] = uses
    assert sorted({use for uses in found.values() for use in uses}) == [
        *(
            "fast.FastEngine",
            "fast.PPOLoss",
            "fast.actor",
            "fast.closed_form",
            "fast.compiler_problem",
            "fast.default_optimizer",
        ),
        "fast.engine_for",
    ]
    assert set(found) == {"collector.py", "gradient_steps.py", "base.py", "ppo.py"}


TRAIN = """
import sys
from lightning.pytorch import Trainer
from lightning_rl import PPO, RolloutDataModule
assert "lightning_rl.fast" not in sys.modules and not hasattr(PPO.loss, "closed_form")
data = RolloutDataModule("CartPole-v1", num_envs=8, rollout_length=64, rollouts_per_epoch=24, seed=0)
model = PPO(data.observation_space, data.action_space, learning_rate=2e-3, num_minibatches=4)
trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(model, data)
print("engine:", type(model.steps.engine).__name__, type(model.steps.optimizers[0].optimizer).__name__)
print("return:", float(trainer.callback_metrics["val/episode_return"]))
"""


def test_package_trains_without_the_folder(tmp_path):
    copy = tmp_path / "lightning_rl"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copy / "fast")
    for path in copy.rglob("*.py"):
        text = path.read_text()
        path.write_text(
            DOOR.sub("", re.sub(r"\bfast\.\w+\([\w.]+\)( or )?", lambda found: "" if found[1] else "None", text))
        )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = programs.run("-c", f"import torch; torch.manual_seed(1)\n{TRAIN}", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "engine: EagerEngine Adam\n" in done.stdout
    assert float(done.stdout.split("return:")[1]) > 100  # about 20 at random
