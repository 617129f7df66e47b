"""Runs that are resumed with other options: the new option wins, and is logged once."""

from __future__ import annotations

import logging
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_rl import PPO, RolloutDataModule
from lightning_rl.checkpointing.format import FORMAT
from lightning_rl.data import collector
from lightning_rl.validation import ConfigurationError
from tests.checkpointing.test_resume import SETTINGS, fit
from tests.helpers import make_data, make_model, make_trainer, merged
from tests.programs import run_ranks

pytestmark = pytest.mark.usefixtures("in_tmp_path")


class Doubled(PPO):
    """Passes another learning rate to its base class than it was given."""

    def __init__(self, *args: Any, learning_rate: float = 1e-3, **kwargs: Any) -> None:
        super().__init__(*args, learning_rate=2 * learning_rate, **kwargs)


SETTINGS["doubled"] = {"env_id": "CartPole-v1"}, {"algorithm": Doubled}


@pytest.fixture(scope="module")
def after_4(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a run of 4 rollouts, which is trained once for each setting."""
    trained: dict[str, Path] = {}

    def folder(name: str) -> Path:
        setting = repr(SETTINGS[name])  # tests replace some
        if setting not in trained:
            fit(name, path := tmp_path_factory.mktemp("first"), 4)
            trained[setting] = path
        return trained[setting]

    return folder


@pytest.fixture
def resume(after_4: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Train for 4 rollouts, change something, and train for 2 more."""

    def run(name: str, stop: int = 6, **changes: Any) -> tuple[PPO, list[str]]:
        shutil.copytree(after_4(name), tmp_path / "first", dirs_exist_ok=True)
        caplog.clear()
        with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
            model = fit(name, tmp_path / "second", stop, str(tmp_path / "first/after_4.ckpt"), **changes)
        return model, [message for message in caplog.messages if message.startswith("Resuming with ")]

    return run


def optimizer_state(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)["optimizer_states"][0]


def test_unchanged_resume_logs_no_changes(resume):
    model, messages = resume("scheduler")
    assert model.policy_version == 6
    assert messages == []


def test_subclass_that_changes_its_arguments_resumes_unchanged(resume):
    model, messages = resume("doubled")
    assert messages == []
    assert model.optimizers().param_groups[0]["lr"] == 2e-3


@pytest.mark.parametrize(("name", "value"), [("clip_range", 0.1), ("gamma", 0.9), ("num_epochs", 1)])
def test_new_options_win_over_checkpoint(name, value, resume):
    model, (message,) = resume("scheduler", model={name: value})
    assert getattr(model.estimator if name == "gamma" else model, name) == value
    before = {"clip_range": 0.2, "gamma": 0.99, "num_epochs": 4}[name]
    assert message == f"Resuming with {name}={value!r} (before: {before!r})"


def test_other_optimizer_class_starts_with_new_state(resume, tmp_path):
    model, (message,) = resume("discrete", stop=5, model={"optimizer": {"name": "torch.optim.SGD", "anneal": True}})
    assert message.endswith("(before: None), with a new state")
    assert isinstance(model.optimizers().optimizer, torch.optim.SGD)
    assert optimizer_state(tmp_path / "second/after_5.ckpt")["state"] == {}


def test_new_optimizer_arguments_keep_stored_state(resume, tmp_path):
    changed = SETTINGS["scheduler"][1]["optimizer"] | {"options": {"alpha": 0.5}}
    _, (message,) = resume("scheduler", stop=5, model={"optimizer": changed})
    assert message.endswith(", with the stored state")
    before, after = (optimizer_state(tmp_path / f"{part}.ckpt") for part in ("first/after_4", "second/after_5"))
    assert [(s["param_groups"][0]["alpha"], s["param_groups"][0]["momentum"]) for s in (before, after)] == [
        (0.99, 0.5),
        (0.5, 0),
    ]
    assert after["state"][0]["step"] == before["state"][0]["step"] * 5 / 4


class Counting(torch.optim.SGD):
    """Counts steps in its parameter groups, where Prodigy has its step size."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0) -> None:
        super().__init__(params, lr, momentum)
        for group in self.param_groups:
            group["steps"] = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["steps"] += 1


SETTINGS["counting"] = {"env_id": "CartPole-v1"}, {"optimizer": {"name": Counting}}


def test_new_optimizer_arguments_keep_state_in_parameter_groups(resume, tmp_path):
    resume("counting", stop=5, model={"optimizer": {"name": Counting, "options": {"momentum": 0.5}}})
    before, after = (optimizer_state(tmp_path / f"{part}.ckpt") for part in ("first/after_4", "second/after_5"))
    assert after["param_groups"][0]["momentum"] == 0.5
    assert after["param_groups"][0]["steps"] == before["param_groups"][0]["steps"] * 5 / 4 > 0


def test_other_path_of_the_optimizer_class_keeps_stored_state(resume):
    changed = SETTINGS["scheduler"][1]["optimizer"] | {"name": torch.optim.RMSprop}
    _, (message,) = resume("scheduler", stop=5, model={"optimizer": changed})
    assert "torch.optim.rmsprop.RMSprop" in message and message.endswith(", with the stored state")


def test_new_scheduler_arguments_keep_stored_state(resume):
    changed = merged(SETTINGS["scheduler"][1]["optimizer"], {"scheduler": {"options": {"gamma": 0.5}}})
    model, (message,) = resume("scheduler", model={"optimizer": changed})
    assert message.endswith(", with the stored state")
    assert model.optimizers().param_groups[0]["lr"] == pytest.approx(3e-4 * 0.9**4 * 0.5**2)


STEP_LR = {"name": "torch.optim.lr_scheduler.StepLR", "options": {"step_size": 1, "gamma": 0.5}}
SETTINGS["step_lr"] = {"env_id": "CartPole-v1"}, {"optimizer": {"scheduler": STEP_LR}}


def test_scheduler_argument_that_returns_to_its_default_is_adopted(resume):
    scheduler = STEP_LR | {"options": {"step_size": 1}}  # gamma is 0.1 then
    model, (message,) = resume("step_lr", model={"optimizer": {"scheduler": scheduler}})
    assert message.endswith(", with the stored state")
    assert model.optimizers().param_groups[0]["lr"] == pytest.approx(3e-4 * 0.5**4 * 0.1**2)


CYCLES = {"name": "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts", "options": {"T_0": 5}}
SETTINGS["cycles"] = (
    {"env_id": "CartPole-v1"},
    {"optimizer": {"scheduler": CYCLES, "groups": {"*": {"learning_rate_scale": 1.0}}}},
)


def test_new_scale_of_a_group_is_adopted_by_the_scheduler(resume):
    groups = {"*": {"learning_rate_scale": 0.1}}
    model, (message,) = resume("cycles", model={"optimizer": {"scheduler": CYCLES, "groups": groups}})
    assert message.startswith("Resuming with optimizer.groups=")
    assert model.optimizers().param_groups[0]["lr"] == pytest.approx(3e-5 * (1 + math.cos(math.pi / 5)) / 2)


class OwnOptimizer(PPO):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}}


SETTINGS["own"] = {"env_id": "CartPole-v1"}, {"algorithm": OwnOptimizer}


def test_optimizers_in_a_dict_are_resumed(resume):
    model, messages = resume("own", model={"optimizer": {"options": {"eps": 1e-3}}})
    assert len(messages) == 1 and model.policy_version == 6
    assert model.optimizers().param_groups[0]["lr"] == pytest.approx(1e-6)


class TwoOptimizers(PPO):
    """Resumes checkpoints of PPO, but has another number of optimizers."""

    def configure_optimizers(self) -> Any:
        actor, critic = self.policy.action_head.parameters(), self.policy.value_head.parameters()
        return [torch.optim.SGD(actor, lr=1.0), torch.optim.SGD(critic, lr=1.0)]


def test_another_number_of_own_optimizers_is_refused(resume):
    with pytest.raises(ConfigurationError, match=r"configure_optimizers='2 optimizers' .* expected 1 as in the check"):
        resume("discrete", model={"algorithm": TwoOptimizers})


def test_checkpoint_of_a_trainer_that_has_only_evaluated_is_refused(tmp_path):
    data = RolloutDataModule("CartPole-v1", num_envs=3, rollout_length=24, evaluation={"episodes": 1})
    model = PPO(data.observation_space, data.action_space, policy={"hidden_sizes": (8,)})
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.validate(model, data, verbose=False)
    trainer.save_checkpoint(path := tmp_path / "evaluated.ckpt")
    with pytest.raises(ConfigurationError, match="saved by a Trainer that only evaluated"):
        fit("discrete", tmp_path / "second", 2, str(path))


def test_other_scheduler_class_starts_with_new_state(resume):
    scheduler = {"name": "torch.optim.lr_scheduler.StepLR", "options": {"step_size": 2, "gamma": 0.1}}
    changed = SETTINGS["scheduler"][1]["optimizer"] | {"scheduler": scheduler}
    model, messages = resume("scheduler", model={"optimizer": changed})
    assert [message.endswith(", with a new state") for message in messages] == [True, True]  # name and options
    assert model.optimizers().param_groups[0]["lr"] == pytest.approx(3e-4 * 0.1)
    assert model.lr_schedulers().last_epoch == 2  # rollouts since the resume


@pytest.mark.parametrize(
    ("setting", "changed", "said"),
    [
        ("scheduler", {"scheduler": {}}, ["optimizer.scheduler.name", "optimizer.scheduler.options"]),
        ("discrete", {"anneal": False}, ["optimizer.anneal"]),
    ],
)
def test_removed_schedule_resets_learning_rate(setting, changed, said, resume):
    optimizer = SETTINGS[setting][1]["optimizer"] | changed
    model, messages = resume(setting, model={"optimizer": optimizer})
    assert [message.removeprefix("Resuming with ").partition("=")[0] for message in messages] == said
    assert model.optimizers().param_groups[0]["lr"] == 3e-4


def test_a_constant_schedule_is_scaled_as_a_number_is(resume, monkeypatch):
    constant = {"learning_rate": {"kind": "constant", "value": 3e-4}}
    monkeypatch.setitem(SETTINGS, "constant", (SETTINGS["scheduler"][0], SETTINGS["scheduler"][1] | constant))
    model, (message,) = resume("constant", stop=5, model={"learning_rate": 1e-2})
    assert message.endswith("; the current rate is scaled")
    assert model.optimizers().param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**5)


@pytest.mark.parametrize(("setting", "factor"), [("scheduler", 0.9**6), ("discrete", 1 - 5 / 12)])
def test_new_learning_rate_is_scaled_by_the_schedule(setting, factor, resume):
    model, (message,) = resume(setting, model={"learning_rate": 1e-2})
    assert message == "Resuming with learning_rate=0.01 (before: 0.0003); the current rate is scaled"
    assert model.optimizers().param_groups[0]["lr"] == pytest.approx(1e-2 * factor)


def test_new_horizon_changes_annealing(resume):
    model, (message,) = resume("discrete", max_epochs=8)
    assert message == (
        f"Resuming with schedules that end at {24 * 72} environment steps (before: {12 * 72}): optimizer.anneal; "
        f"from step {4 * 72} they continue as if this end had always been planned"
    )
    assert model.optimizers().param_groups[0]["lr"] == pytest.approx(3e-4 * (1 - 5 / 24))


TWO = "schedules_and_two_optimizers"
LINE = {"kind": "linear", "start": 4e-3, "end": 0.0}


def test_new_horizon_changes_schedules_over_the_run(resume):
    model, (message,) = resume(TWO, max_epochs=8)
    assert message == (
        f"Resuming with schedules that end at {24 * 72} environment steps (before: {12 * 72}): "
        f"learning_rate; from step {4 * 72} they continue as if this end had always been planned"
    )
    assert model.learning_rate == pytest.approx(1e-3 + 9e-3 * (1 + math.cos(math.pi * 5 / 24)) / 2)


def test_new_schedule_with_new_horizon_is_reported(resume):
    changed = {"optimizer": {"anneal": False}, "learning_rate": LINE}
    _, messages = resume("discrete", model=changed, max_epochs=8)
    assert any(": learning_rate; from step" in message for message in messages)


def test_new_learning_rate_schedule_follows_env_steps(resume):
    model, (message,) = resume(TWO, model={"learning_rate": LINE})
    assert message.startswith("Resuming with learning_rate={'kind': 'linear'")
    assert message.endswith(", a function of all environment steps of the run")
    assert model.steps.optimizers[0].param_groups[0]["lr"] == pytest.approx(4e-3 * (1 - 5 / 12))


def test_constant_rate_replaces_schedule_in_all_parameter_groups(resume):
    optimizer = merged(SETTINGS[TWO][1]["optimizer"], {"critic": {"learning_rate": 1e-3}})
    model, _ = resume(TWO, model={"learning_rate": 5e-3, "optimizer": optimizer}, stop=5)
    rates = [[group["lr"] for group in x.param_groups] for x in model.steps.all_optimizers]
    assert rates == [pytest.approx([5e-3, 1e-2]), pytest.approx([1e-3, 2e-3])]


def test_new_group_options_keep_stored_state(resume, tmp_path):
    groups = {"*.bias": {"learning_rate_scale": 3.0, "weight_decay": 0.1}}
    optimizer = SETTINGS[TWO][1]["optimizer"] | {"groups": groups}
    model, (message,) = resume(TWO, stop=5, model={"optimizer": optimizer})
    assert message.endswith(", with the stored state")
    for optimizer in model.steps.all_optimizers:
        first, biases = optimizer.param_groups
        assert biases["lr"] == pytest.approx(3 * first["lr"])
        assert (first["weight_decay"], biases["weight_decay"]) == (0, 0.1)
    before, after = (optimizer_state(tmp_path / f"{part}.ckpt") for part in ("first/after_4", "second/after_5"))
    assert after["state"][0]["step"] == before["state"][0]["step"] * 5 / 4


def test_removed_scale_of_a_group_no_longer_applies(resume):
    groups = {"*.bias": {"weight_decay": 0.1}}
    model, _ = resume(TWO, stop=6, model={"optimizer": SETTINGS[TWO][1]["optimizer"] | {"groups": groups}})
    for optimizer in model.steps.all_optimizers:
        first, biases = optimizer.param_groups
        assert biases["lr"] == first["lr"] and "learning_rate_scale" not in biases


@pytest.mark.parametrize(
    "changed",
    [
        {"groups": {}},
        {"groups": {"*.weight": {}}},
        {"critic": {"name": "torch.optim.SGD", "options": {"momentum": 0.5}}},
    ],
    ids=["no_groups", "other_groups", "other_class"],
)
def test_other_groups_or_critic_class_start_with_new_state(changed, resume, tmp_path):
    _, (message,) = resume(TWO, stop=5, model={"optimizer": SETTINGS[TWO][1]["optimizer"] | changed})
    assert message.endswith("with a new state")
    steps = {float(x["step"]) for x in optimizer_state(tmp_path / "second/after_5.ckpt")["state"].values()}
    assert steps == {4 * 4}


def test_new_critic_optimizer_resets_all_optimizers(resume, tmp_path):
    changed = {"anneal": True, "critic": {"learning_rate": 1e-3}}
    model, (message,) = resume("discrete", stop=5, model={"optimizer": changed})
    assert (
        message
        == "Resuming with optimizer.critic.learning_rate=0.001 (before: None); all optimizers start with a new state"
    )
    assert len(torch.load(tmp_path / "second/after_5.ckpt", weights_only=True)["optimizer_states"]) == 2
    assert len(model.steps.all_optimizers) == 2


@pytest.mark.parametrize("separate", [True, False])
def test_changed_auxiliary_optimizer_resets_all_optimizers(separate, resume, tmp_path, monkeypatch):
    monkeypatch.setitem(SETTINGS["ppg"][1], "separate_aux_optimizer", not separate)
    model, (message,) = resume("ppg", model={"separate_aux_optimizer": separate})
    was = f"separate_aux_optimizer={separate} (before: {not separate})"
    assert message == f"Resuming with {was}; all optimizers start with a new state"
    assert len(model.steps.all_optimizers) == 1 + separate
    steps = max(float(x["step"]) for x in optimizer_state(tmp_path / "second/after_6.ckpt")["state"].values())
    assert steps == (2 * 8 if separate else 2 * 8 + 2 * 24)  # steps of two rollouts and of the next auxiliary phase


def test_new_learning_rate_applies_to_actor_in_both_phases(resume, monkeypatch):
    monkeypatch.setitem(SETTINGS["ppg"][1], "optimizer", {"critic": {"learning_rate": 1e-3}})
    model, _ = resume("ppg", stop=5, model={"learning_rate": 1e-2})
    assert [x.param_groups[0]["lr"] for x in model.steps.all_optimizers] == pytest.approx([1e-2, 1e-3, 1e-2, 1e-3])


@pytest.mark.parametrize(("constant", "is_reset"), [("actor", [True, False]), ("critic", [False, True])])
def test_a_removed_schedule_of_one_optimizer_resets_its_learning_rate(constant, is_reset, resume, monkeypatch):
    line = {"kind": "linear", "start": 1e-2, "end": 1e-3, "over": 256}
    before = {"learning_rate": line, "optimizer": {"critic": {"learning_rate": line}}}
    monkeypatch.setitem(SETTINGS, "two schedules", (SETTINGS["discrete"][0], SETTINGS["discrete"][1] | before))
    resume("two schedules", stop=5)
    changed = {"learning_rate": 1e-2} if constant == "actor" else {"optimizer": {"critic": {"learning_rate": 1e-2}}}
    model, _ = resume("two schedules", stop=5, model=changed)
    assert [optimizer.param_groups[0]["lr"] == 1e-2 for optimizer in model.steps.all_optimizers] == is_reset


def test_removed_adaptive_rule_resets_learning_rate(resume):
    model, _ = resume("adaptive", stop=5)
    assert model.optimizers().param_groups[0]["lr"] != 3e-4
    model, _ = resume("adaptive", stop=5, model={"optimizer": {"adaptive_learning_rate": None}})
    assert model.optimizers().param_groups[0]["lr"] == 3e-4


def test_adaptive_rule_in_place_of_annealing_starts_at_the_full_learning_rate(resume):
    rule = {"target_kl": 0.01, "factor": 1.0001}
    model, _ = resume("discrete", stop=5, model={"optimizer": {"anneal": False, "adaptive_learning_rate": rule}})
    assert model.optimizers().param_groups[0]["lr"] == pytest.approx(3e-4, rel=2e-4)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"seed": 11}, "seed=11 (before: 3)"),
        ({"env": {"kwargs": {"sutton_barto_reward": True}}}, "env.kwargs={'sutton_barto_reward': True} (before: {})"),
        (
            {"env": {"training_wrappers": ["tests.checkpointing.test_interruption.Interrupts"]}},
            "env.training_wrappers=[{'class_path': 'tests.checkpointing.test_interruption.Interrupts', "
            "'init_args': {}}] (before: [])",
        ),
    ],
    ids=["seed", "arguments", "wrappers"],
)
@pytest.mark.filterwarnings("ignore:.*could not be restored")
def test_changed_environment_options_are_reported(data, said, resume):
    _, (message,) = resume("discrete", data=data)
    assert message.startswith(f"Resuming with {said}")


def test_normalizer_statistics_require_the_same_normalization(resume, tmp_path):
    model, _ = resume("continuous", stop=5, model={"normalization": {"rewards": "return_std", "observations": {}}})
    assert model.policy_version == 5
    for name, other in (("rewards", "reward_std"), ("observations", {"clip": 0.1})):
        option = f"normalization.{name}"
        expected = re.escape(f"{option}={other!r} does not fit the checkpoint: expected {option}=True")
        changed = {"normalization": {"rewards": True, "observations": True, name: other}}
        with pytest.raises(ConfigurationError, match=expected):
            fit("continuous", tmp_path / "third", 5, str(tmp_path / "first/after_4.ckpt"), model=changed)


def test_ignored_option_is_reported(resume):
    _, (message,) = resume("continuous", model={"policy": {"initial_log_std": -1.0}})
    assert message.startswith(
        "Resuming with policy.initial_log_std=-1.0 (before: 0.0), ignored: the learned value is kept"
    )


def test_learned_duals_are_kept_and_reported(resume, tmp_path):
    model, messages = resume("vmpo", stop=5, model={"initial_temperature": 9.0, "initial_kl_coef": 7.0})
    assert messages == [
        "Resuming with initial_kl_coef=7.0 (before: 5.0); the current coefficient is kept",
        "Resuming with initial_temperature=9.0 (before: 1.0), ignored: the learned value is kept",
    ]
    before = torch.load(tmp_path / "first/after_4.ckpt", weights_only=True)["state_dict"]["policy.dual"]
    assert torch.allclose(model.policy.dual, before, atol=0.5)


def test_long_replay_of_recorded_steps_is_announced(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(collector, "_MANY_STEPS", 10)
    fit("continuous", tmp_path / "first", 2)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        fit("continuous", tmp_path / "second", 3, str(tmp_path / "first/after_2.ckpt"))
    assert "Replaying 144 recorded steps of Pendulum-v1 (backend 'sync')" in caplog.text


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_new_precision_keeps_weights_statistics_and_episodes(precision, resume):
    model, (message,) = resume("continuous", precision=precision)
    assert message == f"Resuming with precision={precision!r} (before: '32-true')"
    assert model.policy_version == 6
    expected = torch.float64 if precision == "64-true" else torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert model.policy.observation_normalizer.moments.count == 6 * 72


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("clear_with_memory", "32-true", "64-true"),
        ("ppg", "32-true", "64-true"),
        ("ppg_off_policy", "64-true", "32-true"),
    ],
)
def test_replays_and_memory_are_cast_to_new_precision(name, before, after, tmp_path):
    """Train until an auxiliary phase, or replay, uses rollouts from before and after resuming."""
    fit(name, tmp_path / "first", 4, precision=before)
    model = fit(name, tmp_path / "second", 7, str(tmp_path / "first/after_4.ckpt"), precision=after)
    assert model.policy_version == 7
    kept = {x.dtype for x in all_tensors(model.kept.state_dict()) if x.is_floating_point()}
    assert kept == {torch.float64 if after == "64-true" else torch.float32}


def all_tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [x for part in parts for x in all_tensors(part)]


@pytest.mark.parametrize(("name", "value", "steps"), [("rollout_length", 12, 36), ("rollouts_per_epoch", 4, 72)])
def test_new_rollout_shape_is_reported_and_episodes_continue(name, value, steps, resume, recwarn):
    model, (message,) = resume("continuous", data={name: value})
    assert message == f"Resuming with {name}={value} (before: {dict(rollout_length=24, rollouts_per_epoch=3)[name]})"
    assert (model.policy_version, model.env_steps) == (6, 4 * 72 + 2 * steps)
    assert not [w for w in recwarn if "could not be restored" in str(w.message)]


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("num_envs", [2, 5])
def test_new_number_of_environments_keeps_existing_ones(num_envs, backend, resume, tmp_path, monkeypatch, recwarn):
    begun = []
    collect = RolloutDataModule.collect

    def watched(data):
        rollout = collect(data)
        begun.append(rollout.observations[0].clone())
        return rollout

    monkeypatch.setattr(RolloutDataModule, "collect", watched)
    model, messages = resume("continuous", data={"num_envs": num_envs, "backend": backend})
    change = f"Resuming with num_envs={num_envs} (before: 3)"
    assert [message for message in messages if "backend" not in message] == [change]
    ranks = torch.load(tmp_path / "first/after_4.ckpt", weights_only=True)["RolloutDataModule"]["ranks"]
    left = torch.stack([record["observation"] for record in ranks[0]["environments"]["environments"]])
    both = min(num_envs, 3)
    assert torch.equal(begun[-2][:both], left[:both])
    assert len(begun[-2]) == num_envs == len(begun[-2].unique(dim=0))
    assert model.env_steps == 4 * 72 + 2 * 24 * num_envs
    assert model.reward_normalizer.moments.count == model.env_steps
    assert not [w for w in recwarn if "could not be restored" in str(w.message)]


def test_more_ranks_keep_environments_and_drop_replays(tmp_path):
    fit("clear", tmp_path / "first", 4)
    code = (
        "from pathlib import Path; from tests.checkpointing.test_resume import fit\n"
        f"fit('clear', Path({str(tmp_path / 'second')!r}), 6, {str(tmp_path / 'first/after_4.ckpt')!r}, "
        "devices=2, strategy='ddp')\n"
    )
    said = run_ranks("-c", code)
    assert said.count("Resuming with world_size=2 (before: 1); the earlier ranks continue") == 1
    assert "could not be restored" not in said
    state = torch.load(tmp_path / "second/after_6.ckpt", weights_only=True)
    assert state["lightning_rl"]["env_steps"] == (4 + 2 * 2) * 72
    ranks = state["RolloutDataModule"]["ranks"]
    before = torch.load(tmp_path / "first/after_4.ckpt", weights_only=True)["RolloutDataModule"]["ranks"]
    pairs = zip(ranks[0]["environments"]["environments"], before[0]["environments"]["environments"], strict=True)
    assert all(record["episode"] >= earlier["episode"] for record, earlier in pairs)
    assert len(ranks) == 2
    # The new rank has nothing to replay, so that all ranks start without replays.
    assert said.count("(unrolls) are dropped: the run now has 2 ranks instead of 1") == 1
    seen = [rank["replays"]["unrolls"]["number"] for rank in state["lightning_rl"]["ranks"]]
    assert seen == [3 * 2] * 2


def test_fewer_ranks_keep_their_replays(tmp_path, recwarn):
    fit("clear", tmp_path / "first", 4)
    path = tmp_path / "first/after_4.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["lightning_rl"]["ranks"] *= 2
    torch.save(checkpoint, path)
    model = fit("clear", tmp_path / "second", 5, str(path))
    assert model.kept.state_dict()["number"] == 3 * 5  # unrolls that the reservoir has seen in total
    assert not [w for w in recwarn if "are dropped" in str(w.message)]


@pytest.mark.parametrize("first", [1, 2])
def test_new_number_of_ranks_with_changed_metrics(first, tmp_path):
    """New ranks have no stored metrics, so all ranks must start with the same ones."""
    data = {"env": {"on_failure": "restart"}}
    before = {"data": data, "model": {"debug": {"max_skipped_updates": 3}}, "log_every_n_steps": 100}
    after = {
        "data": {"env": {"on_failure": "raise"}},
        "model": {"debug": {"max_skipped_updates": 0}},
        "log_every_n_steps": 1,
    }
    for part, ranks, options, stop in (("first", first, before, 4), ("second", 3 - first, after, 6)):
        ckpt_path = None if part == "first" else str(tmp_path / "first/after_4.ckpt")
        if ranks == 1:
            fit("continuous", tmp_path / part, stop, ckpt_path, **options)
            continue
        ddp = {"devices": 2, "strategy": "ddp"}
        code = (
            "from pathlib import Path; from tests.checkpointing.test_resume import fit\n"
            f"fit('continuous', Path({str(tmp_path / part)!r}), {stop}, {ckpt_path!r}, **{options | ddp!r})\n"
        )
        run_ranks("-c", code)
    state = torch.load(tmp_path / "second/after_6.ckpt", weights_only=True)["lightning_rl"]
    assert state["env_steps"] == 72 * (4 * first + 2 * (3 - first))


def test_checkpoints_of_another_format_are_rejected(tmp_path):
    fit("discrete", tmp_path / "first", 2)
    path = tmp_path / "first/after_2.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["lightning_rl"] |= {"format": FORMAT + 1, "version": "9.1.0"}
    torch.save(checkpoint, path)
    expected = rf"format {FORMAT + 1}, written by lightning_rl 9.1.0: expected format {FORMAT}"
    with pytest.raises(ConfigurationError, match=expected):
        fit("discrete", tmp_path / "second", 4, str(path))
    with pytest.raises(ConfigurationError, match=expected):
        PPO.load_from_checkpoint(path)


def test_checkpoint_of_another_program_is_rejected(tmp_path):
    fit("discrete", tmp_path / "first", 2)
    path = tmp_path / "first/after_2.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["lightning_rl"]
    torch.save(checkpoint, path)
    with pytest.raises(ConfigurationError, match="was not written by lightning_rl"):
        fit("discrete", tmp_path / "second", 4, str(path))


@pytest.mark.parametrize("content", [{"weight": torch.zeros(1)}, [1, 2], torch.zeros(2), None])
def test_torch_file_without_a_checkpoint_is_rejected_with_its_path(content, tmp_path):
    torch.save(content, path := tmp_path / "weights.ckpt")
    with pytest.raises(ConfigurationError, match=rf"'{re.escape(str(path))}' was not written by lightning_rl"):
        fit("discrete", tmp_path / "run", 4, str(path))


@pytest.mark.parametrize(
    ("name", "changed", "was", "now"),
    [
        ("ppg_sequences", {"sequence_length": 4}, (24, 3, 3, 5), (24, 3, 6, 5)),
        ("ppg_sequences", {"burn_in": 0}, (24, 3, 3, 5), (24, 3, 3, 0)),
        ("clear_with_memory", {"sequence_length": 4}, (24, 1, 3, 5), (24, 1, 6, 5)),
        ("clear_with_memory", {"burn_in": 0}, (24, 1, 3, 5), (24, 1, 3, 0)),
    ],
)
def test_replays_with_another_sequence_layout_are_dropped(name, changed, was, now, resume, caplog):
    memory = SETTINGS[name][1]["policy"]["memory"] | changed
    model, (message,) = resume(name, stop=7, model={"policy": {"memory": memory}})
    assert message.startswith("Resuming with policy.memory=")
    layouts = [f"shape {x[:2]} with {x[2]} stored states and a burn-in of {x[3]}" for x in (was, now)]
    dropped = f"Stored rollouts have {layouts[0]}, new ones {layouts[1]}: the stored ones are dropped"
    assert caplog.messages.count(dropped) == 1
    # The dropped rollout is missing from the phase, which needs three more. Nine unrolls are new.
    assert len(model.kept) == (0 if name == "ppg_sequences" else 9)


def test_new_batch_size_restarts_the_phase(resume, caplog):
    model, _ = resume("ppg_off_policy", stop=5, model={"batch_size": 16})
    dropped = "Stored rollouts have shape (1, 32), new ones shape (1, 16): the stored ones are dropped"
    assert caplog.messages.count(dropped) == 1
    assert (len(model.kept), model.kept.shape) == (2, (1, 16))


@pytest.mark.parametrize("as_lists", [False, True], ids=["now", "by an earlier version"])
def test_random_generators_of_python_and_numpy_continue(as_lists: bool, tmp_path: Path) -> None:
    drawn: list[tuple[float, float]] = []

    class Draws(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            drawn.append((random.random(), np.random.random()))

    def fit_for(epochs: int, seed: int, ckpt_path: Path | None = None) -> Trainer:
        random.seed(seed)
        np.random.seed(seed)
        data = make_data()
        trainer = make_trainer(max_epochs=epochs, callbacks=[Draws()])
        trainer.fit(make_model(data), data, ckpt_path=ckpt_path)
        return trainer

    fit_for(1, seed=1).save_checkpoint(tmp_path / "end.ckpt")
    following = random.random(), np.random.random()
    if as_lists:
        checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=True)
        state = checkpoint["lightning_rl"]["ranks"][0]["random"]
        for name in ("python", "numpy"):
            state[name][1] = state[name][1].tolist()
        torch.save(checkpoint, tmp_path / "end.ckpt")
    drawn.clear()
    fit_for(2, seed=2, ckpt_path=tmp_path / "end.ckpt")
    assert drawn[0] == following
