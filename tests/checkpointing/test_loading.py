"""A warm start loads the parameters that fit and lists the others."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_rl import PPO
from lightning_rl.cli.main import main
from lightning_rl.validation import ConfigurationError
from tests.cli.test_main import SMALL
from tests.helpers import assert_equal_parameters, make_data, make_model, make_trainer, parameters_of

pytestmark = pytest.mark.usefixtures("in_tmp_path")

NORMALIZED = {"normalization": {"observations": True, "rewards": True}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a checkpoint of a trained policy with normalizers."""
    data = make_data()
    trainer: Trainer = make_trainer()
    trainer.fit(make_model(data, **NORMALIZED), data)
    trainer.save_checkpoint(tmp_path / "source.ckpt")
    return tmp_path / "source.ckpt"


def stored(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def loaded(model: PPO, before: dict[str, torch.Tensor], path: Path) -> set[str]:
    """Return the names of the tensors that equal the stored ones; check that the others are unchanged."""
    names = set()
    for name, x in model.state_dict().items():
        if name in stored(path) and x.shape == stored(path)[name].shape and torch.equal(x, stored(path)[name]):
            names.add(name)
        else:
            assert torch.equal(x, before[name]), name
    return names


def copy(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in state.items()}


def test_warm_start_loads_everything_except_optimizer_and_clock(path):
    model = make_model(make_data(), **NORMALIZED)
    result = model.init_from(path)
    assert set(result.loaded) == set(model.state_dict()) == loaded(model, {}, path)
    assert (result.other_shape, result.not_stored, result.not_here) == ({}, [], [])
    assert (model.env_steps, model.policy_version) == (0, 0)


def test_warm_start_from_other_observations_begins_their_statistics_anew(path):
    model = make_model(make_data("Acrobot-v1"), **NORMALIZED)
    result = model.init_from(path)
    moments = model.policy.observation_normalizer.moments
    assert (int(moments.count), float(moments.mean.abs().sum()), float(moments.variance.sum())) == (0, 0, 6)
    assert any(name.endswith("moments.count") for name in result.other_shape)


@pytest.mark.parametrize(
    ("part", "prefixes"),
    [
        ("policy", ("policy.actor_encoder.", "policy.action_head.")),
        ("critic", ("policy.critic_encoder.", "policy.value_head.")),
        ("normalizers", ("policy.observation_normalizer.", "reward_normalizer.")),
    ],
)
def test_warm_start_of_one_part_changes_only_this_part(part, prefixes, path):
    model = make_model(make_data(), **NORMALIZED)
    before = copy(model.state_dict())
    result = model.init_from(path, [part])
    expected = {name for name in before if name.startswith(prefixes)}
    assert expected and set(result.loaded) == expected
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed <= expected <= loaded(model, before, path)


def test_tensors_of_other_shapes_are_listed_and_unchanged(path, caplog):
    data = make_data("Acrobot-v1")  # with six observations and three actions instead of four and two
    model = make_model(data)
    before = copy(model.state_dict())
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        result = model.init_from(path)
    assert loaded(model, before, path) >= set(result.loaded)
    assert result.other_shape["policy.action_head.logits.weight"] == ((3, 16), (2, 16))
    assert result.other_shape["policy.actor_encoder.layers.0.weight"] == ((16, 6), (16, 4))
    assert result.not_stored == []
    assert {name for name in result.not_here if "normalizer" in name} == set(result.not_here) != set()
    (message,) = [m for m in caplog.messages if m.startswith("Starting with parameters from ")]
    for name in (*result.loaded, *result.other_shape, *result.not_here):
        assert name in message


def test_reward_statistics_require_the_same_scale(path):
    model = make_model(make_data(), normalization={"observations": True, "rewards": "reward_std"})
    result = model.init_from(path)
    moments = [name for name in model.state_dict() if name.startswith("reward_normalizer.")]
    assert result.other_scale == moments != []
    assert model.reward_normalizer.moments.count == 0
    assert "unchanged because normalization.rewards differs: reward_normalizer.moments.count" in str(result)
    same = make_model(make_data(), normalization={"observations": True, "rewards": "return_std"})
    assert same.init_from(path, ["normalizers"]).other_scale == []
    assert same.reward_normalizer.moments.count > 0


def test_warm_start_into_shared_encoder_ignores_critic_encoder(path):
    model = make_model(make_data(), policy={"shared_encoder": True})
    result = model.init_from(path, ["policy", "critic"])
    assert all(name.startswith("policy.critic_encoder.") for name in result.not_here)
    assert result.not_here and not result.not_stored


def test_warm_start_without_fitting_tensors_raises(path):
    model = make_model(make_data("Acrobot-v1"), policy={"hidden_sizes": (5,)})
    with pytest.raises(ConfigurationError, match="nothing of the part 'policy' fits"):
        model.init_from(path, ["critic", "policy"])  # the bias of the value head has the same shape in all networks
    with pytest.raises(ConfigurationError, match="nothing of the part 'normalizers' fits"):
        model.init_from(path, ["normalizers"])
    with pytest.raises(ConfigurationError, match=r"init_parts='actor' is not valid: expected some of policy, critic"):
        model.init_from(path, ["actor"])
    with pytest.raises(ConfigurationError, match=r"init_from='nowhere.ckpt' does not exist: expected a checkpoint"):
        model.init_from("nowhere.ckpt")


def test_init_from_on_command_line_is_ignored_when_resuming(in_tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    monkeypatch.setenv("LIGHTNING_RL_RUN_DIR", "")
    main(["fit", *SMALL, "--max_env_steps=64"])
    last = Path("runs/ppo/CartPole-v1/version_0/checkpoints/last.ckpt")
    tiny = ["--model.learning_rate=1e-30", "--max_env_steps=32"]
    cli = main(["fit", *SMALL, *tiny, f"--init_from={last}", "--init_parts=policy"])
    assert cli.model.env_steps == 32
    before = stored(last)
    for name, x in cli.model.state_dict().items():
        assert torch.equal(x, before[name]) == name.startswith(("policy.actor_encoder.", "policy.action_head.")), name
    # A resumed run keeps its own parameters.
    capsys.readouterr()
    resumed = ["--ckpt_path=last", "--resume_changes=allow"]
    cli = main(["fit", *SMALL, "--max_env_steps=64", f"--init_from={last}", *resumed])
    assert cli.model.env_steps == 64
    assert "Starting with parameters" not in capsys.readouterr().err


class WithBuffer(PPO):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("own", torch.ones(2))


def test_a_checkpoint_without_a_new_buffer_loads_unless_strict(tmp_path):
    data = make_data()
    model, trainer = make_model(data), make_trainer(enable_checkpointing=True)
    trainer.fit(model, data)
    trainer.save_checkpoint(path := tmp_path / "model.ckpt")
    loaded = WithBuffer.load_from_checkpoint(path, strict=False)
    assert loaded.own.tolist() == [1, 1] and loaded.strict_loading
    assert_equal_parameters(loaded, parameters_of(model))
    with pytest.raises(ConfigurationError, match="the network it was trained with; different are own"):
        WithBuffer.load_from_checkpoint(path)


def test_tensors_of_a_gpu_that_this_machine_does_not_have_are_loaded_on_the_cpu(tmp_path, monkeypatch):
    data = make_data()
    model, trainer = make_model(data), make_trainer(enable_checkpointing=True)
    trainer.fit(model, data)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
    trainer.save_checkpoint(path := tmp_path / "model.ckpt")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert_equal_parameters(PPO.load_from_checkpoint(path), parameters_of(model))


@pytest.mark.parametrize("make", [lambda: make_model(make_data()), make_data])
def test_loading_is_refused_on_an_object_which_would_not_change(make):
    expected = r"returns a new object: expected (PPO|RolloutDataModule)\.load_from_checkpoint\(\.\.\.\), on the class"
    with pytest.raises(ConfigurationError, match=expected):
        make().load_from_checkpoint("last.ckpt")


class Coefficient(PPO):
    def __init__(self, *args: Any, aux_coef: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def test_a_renamed_option_and_the_class_that_has_it_are_named(tmp_path):
    data = make_data()
    model, trainer = Coefficient(data.observation_space, data.action_space), make_trainer(enable_checkpointing=True)
    trainer.fit(model, data)
    trainer.save_checkpoint(path := tmp_path / "model.ckpt")
    other = type("Coefficient", (PPO,), {})
    with pytest.raises(ConfigurationError, match=r"aux_coef=0\.5 is no option of Coefficient"):
        other.load_from_checkpoint(path)
    expected = f"checkpoint_path='{path}' is a checkpoint of Coefficient, not of PPO: use Coefficient.load_from_checkp"
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        PPO.load_from_checkpoint(path)


def test_an_algorithm_that_was_moved_to_another_module_loads_its_checkpoint(in_tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(in_tmp_path)
    Path("old_place.py").write_text("from lightning_rl import PPO\n\n\nclass MovedPPO(PPO):\n    pass\n")
    run = main(["fit", *SMALL, "--model=old_place.MovedPPO", "--max_env_steps=32"]).run_dir
    Path("old_place.py").rename("new_place.py")
    del sys.modules["old_place"]
    last = run / "checkpoints/last.ckpt"
    with pytest.raises(ConfigurationError, match=r"cannot be imported .* or its own load_from_checkpoint"):
        PPO.load_from_checkpoint(last, trust=["old_place"])
    with pytest.raises(SystemExit):
        main(["test", f"--config={run}/config.yaml", f"--ckpt_path={last}"])
    assert "model='old_place.MovedPPO' cannot be imported" in (text := capsys.readouterr().err) and "new path" in text
    monkeypatch.syspath_prepend(in_tmp_path)  # forgets the listing of the folder
    new_place = importlib.import_module("new_place")
    assert type(new_place.MovedPPO.load_from_checkpoint(last)) is new_place.MovedPPO
