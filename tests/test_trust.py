"""Loaded data executes nothing: a class that it names is constructed only if it fits its field and is trusted."""

import contextlib
import functools
import io
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import huggingface_hub
import pytest
import torch
import yaml
from torch import nn

from lightning_rl import PPO, FailedUpdate, RolloutDataModule
from lightning_rl.cli.main import main
from lightning_rl.options import default_groups, flat, nested
from lightning_rl.tools.hub import push_to_hub
from lightning_rl.tools.trained import load_algorithm, load_data, load_trained
from lightning_rl.validation import ConfigurationError, import_class, is_loading, loading, may_import
from tests.helpers import DISCRETE, VECTOR, FixedRollouts, make_data, make_model, make_trainer, merged, random_rollout

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
PAYLOADS = (
    "subprocess.Popen",
    "os.system",
    "builtins.eval",
    "functools.partial",
    "runpy.run_path",
    "untrusted.Anything",
)
REFUSED = r"='{payload}' (is not valid: expected (a subclass of|the path of a class)|names the module)"
EXPONENTIAL = {"name": "torch.optim.lr_scheduler.ExponentialLR", "options": {"gamma": 0.5}}
GROUPS = default_groups(RolloutDataModule)
INIT_ARGS = {"args": "touch pwned", "shell": True}

# A module that nobody has imported: as it is imported it leaves a file behind.
UNTRUSTED = """
import pathlib, sys
import gymnasium, torch
from lightning_rl import PPO, RolloutDataModule

pathlib.Path("pwned").touch()

class Net(torch.nn.Module):
    def __init__(self, space):
        super().__init__()
        self.out_features = 3
        self.layer = torch.nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x)

class Wrapper(gymnasium.Wrapper):
    pass

class Algorithm(PPO):
    pass

class Data(RolloutDataModule):
    pass

class Anything:
    pass

gymnasium.register("Untrusted-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=20)
"""


@pytest.fixture(autouse=True)
def nothing_runs(in_tmp_path, monkeypatch):
    """Refuse to end a test well in which a payload was called, or the module was imported that nobody trusts."""
    called: list[str] = []

    class Popen(subprocess.Popen):  # stays a class, whose construction is noticed
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            called.append("subprocess.Popen")

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(os, "system", lambda *_: called.append("os.system"))
    monkeypatch.setattr(runpy, "run_path", lambda *_, **__: called.append("runpy.run_path"))
    Path("untrusted.py").write_text(UNTRUSTED)
    monkeypatch.syspath_prepend(".")
    yield
    expected = Path("trusted").exists()
    assert called == []
    assert ("untrusted" in sys.modules) == Path("pwned").exists() == expected
    sys.modules.pop("untrusted", None)
    gymnasium.registry.pop("Untrusted-v0", None)


def trusted() -> None:
    """Let this test import the module."""
    Path("trusted").touch()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint, and a failed update."""
    folder = tmp_path_factory.mktemp("saved")
    data = make_data()
    model = make_model(data)
    trainer = make_trainer(limit_train_batches=1)
    trainer.fit(model, data)
    trainer.save_checkpoint(folder / "last.ckpt")
    torch.manual_seed(0)
    failing = PPO(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)})
    rollout = random_rollout(failing.policy)
    rollout.rewards[2, 1] = torch.nan
    with pytest.raises(FloatingPointError):
        make_trainer(default_root_dir=folder).fit(failing, FixedRollouts([rollout], failing))
    (failed,) = folder.glob("failed-update-*.pt")
    return torch.load(folder / "last.ckpt", weights_only=True), torch.load(failed, weights_only=True)


def specs(payload: str) -> dict[str, Any]:
    """Every hyper-parameter that can name a class, by its full name."""
    spec = {"class_path": payload, "init_args": INIT_ARGS}
    names = dict.fromkeys(("optimizer.name", "optimizer.critic.name", "optimizer.scheduler.name"), payload)
    return {"policy.network": spec, "policy.action_distribution": spec, **names, "_class_path": payload}


def write_checkpoint(saved, hyper_parameters: dict[str, Any] | None = None, path: str = "x/checkpoints/x.ckpt") -> Path:
    """A checkpoint with other hyper-parameters, given by their full names."""
    content = saved[0]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    given = hyper_parameters or {}
    own = {"options": {name: value for name, value in given.items() if not name.startswith("_")}}
    torch.save(merged(content, {"hyper_parameters": nested(given), "lightning_rl": own}), path)
    return Path(path)


def write_data(saved, **settings: Any) -> Path:
    """A checkpoint without a configuration, which says what its environments were."""
    content = dict(saved[0])
    state = content["RolloutDataModule"]
    content["RolloutDataModule"] = state | {"settings": state["settings"] | flat(settings, GROUPS)}
    torch.save(content, "data.ckpt")
    return Path("data.ckpt")


def of_data(payload: str) -> dict[str, dict[str, Any]]:
    """Every option of the data that can name a class or a module, by the field that errors name."""
    spec = {"class_path": payload, "init_args": INIT_ARGS}
    return {
        "env.wrappers": {"env": {"wrappers": [spec]}},
        "env.wrappers ": {"env": {"wrappers": [payload]}},
        "env.training_wrappers": {"env": {"training_wrappers": [spec]}},
    }


def run(*arguments: str) -> str:
    """Run a command that is to fail, and return its message."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as ended:
        main(list(arguments))
    lines = printed.getvalue().splitlines()
    assert (ended.value.code, len(lines)) == (1, 1), lines
    return lines[0].removeprefix("lightning-rl: error: ")


def message_of(function, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def assert_refused(field: str, payload: str, message: str) -> None:
    assert re.search(rf"{field}(: class_path)?{REFUSED.format(payload=re.escape(payload))}", message), message


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_checkpoint_constructs_nothing_that_its_fields_do_not_expect(payload, saved, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    for field, value in specs(payload).items():
        path = write_checkpoint(saved, {field: value})
        messages = [
            message_of(load_algorithm, path),
            message_of(PPO.load_from_checkpoint, path),
            message_of(push_to_hub, "me/cart", path),
            run("export", f"--ckpt_path={path}"),
            run("push", "me/cart", f"--ckpt_path={path}"),
        ]
        for message in messages:
            assert_refused(field, payload, message)
    for network in (payload, {"class_path": payload}):
        path = write_checkpoint(saved, {"policy.network": network})
        assert_refused("policy.network", payload, message_of(load_algorithm, path))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_function_that_lightning_would_construct_with_is_ignored(payload, saved):
    stored = {"_instantiator": payload, "module_arguments": {"_instantiator": payload}}
    assert load_algorithm(write_checkpoint(saved, {"_instantiator": payload})).env_steps == 32
    path = write_checkpoint(saved)
    torch.save(torch.load(path, weights_only=True) | stored, path)
    assert PPO.load_from_checkpoint(path).env_steps == 32
    options = {"_instantiator": payload, "env_id": "CartPole-v1"}
    torch.save(torch.load(path, weights_only=True) | {"datamodule_hyper_parameters": options}, path)
    assert RolloutDataModule.load_from_checkpoint(path).spec.env_id == "CartPole-v1"


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_failed_update_constructs_nothing_that_its_fields_do_not_expect(payload, saved):
    content = saved[1]
    fields = specs(payload)
    del fields["_class_path"]  # the file has a field of its own for it
    for field, value in fields.items():
        torch.save(merged(content, {"hyper_parameters": nested({field: value})}), "f.pt")
        assert_refused(field, payload, message_of(FailedUpdate.load, "f.pt"))
    torch.save(content | {"algorithm": payload, "hyper_parameters": {"args": ["touch", "pwned"]}}, "f.pt")
    assert_refused("algorithm", payload, message_of(FailedUpdate.load, "f.pt"))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_environments_of_a_checkpoint_and_beside_it_are_no_other_classes(payload, saved, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    path = write_checkpoint(saved)

    def messages(content: dict[str, Any]) -> list[str]:
        """Messages for a configuration beside the checkpoint, then above it."""
        found = []
        for config in (path.parent / "config.yaml", path.parent.parent / "config.yaml"):
            config.write_text(yaml.safe_dump({"data": content, "model": "PPO"}))
            found.append(message_of(load_data, path))
            found.append(message_of(push_to_hub, "me/cart", path))
            found.append(run("export", f"--ckpt_path={path}"))
            config.unlink()
        return found

    for field, options in of_data(payload).items():
        found = [
            *messages(merged({"env_id": "CartPole-v1"}, options)),
            message_of(load_data, write_data(saved, **options)),
        ]
        for message in found:
            assert_refused(field.strip(), payload, message)
    for message in messages({"class_path": payload, "init_args": INIT_ARGS}):
        assert_refused("data", payload, message)
    env_id, multi_agent = payload.replace(".", ":"), ("PettingZoo/untrusted", "gymnasium:PettingZoo/untrusted")
    for field, value, options in (
        ("env_id", env_id, {"env_id": env_id}),
        *(("env_id", x, {"env_id": x, "backend": "native"}) for x in multi_agent),
        ("env.imports", "untrusted", {"env_id": "CartPole-v1", "env": {"imports": ["untrusted"]}}),
    ):
        for load in (lambda options: load_data(write_data(saved, **options)), functools.partial(beside, path)):
            message = message_of(lambda load, options: load(options).observation_space, load, options)
            expected = "names the module" if "untrusted" in value else "(names the module|is unknown)"
            assert re.search(f"{field}='{value}' {expected}", message), message
    # Deeper down everything is data.
    nested = {"class_path": payload, "init_args": INIT_ARGS}
    data = beside(path, {"env_id": "CartPole-v1", "env": {"kwargs": {"x": nested}}})
    assert data.spec.env.kwargs == {"x": nested}


def beside(checkpoint: Path, data: dict[str, Any]) -> RolloutDataModule:
    """What is loaded with a configuration in the folder of the run."""
    config = checkpoint.parent.parent / "config.yaml"
    config.write_text(yaml.safe_dump({"data": data}))
    try:
        return load_data(checkpoint)
    finally:
        config.unlink()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_trainer_and_the_command_line_construct_nothing_from_a_checkpoint(payload, saved):
    small = [
        "--data.env_id=CartPole-v1",
        "--data.num_envs=2",
        "--data.rollout_length=16",
        "--data.evaluation.episodes=1",
    ]
    small += ["--model=PPO", "--model.policy.hidden_sizes=[16]", "--model.num_minibatches=2", "--max_env_steps=64"]
    small += ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    data = make_data(evaluation={"episodes": 1})
    model, fields = make_model(data), specs(payload)
    path = write_checkpoint(saved, {"policy.action_distribution": fields.pop("policy.action_distribution")})
    assert message_of(make_trainer().fit, model, data, ckpt_path=str(path)).startswith("policy.action_distribution=")
    path = write_checkpoint(saved, fields)  # a run has its own, and parameters say whether they fit
    make_trainer(limit_val_batches=1).validate(model, data, str(path), verbose=False)
    # The classes of the run are compared with those of the checkpoint.
    own = make_model(data, optimizer={"name": "torch.optim.SGD", "scheduler": EXPONENTIAL})
    make_trainer().fit(own, data, ckpt_path=str(path))
    path = write_checkpoint(saved, specs(payload))
    for command in (["fit"], ["test"]):
        arguments = small if command == ["fit"] else [x for x in small if not x.startswith("--max_env")]
        with pytest.raises(SystemExit):
            main([*command, *arguments, f"--ckpt_path={path}"])


def test_what_was_shown_to_execute_a_command_does_not(saved, monkeypatch, tmp_path):
    """The attack that succeeded: the names of a space are the words of a command."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    sys.path.insert(0, ".")
    d = {"type": "Discrete", "n": 2, "start": 0}
    space = {"type": "Dict", "spaces": {"!x": d, "-c": d, "touch pwned": d}}
    network = {"class_path": "subprocess.Popen", "init_args": {"executable": "/bin/sh"}}
    path = write_checkpoint(saved, {"observation_space": space, "policy.network": network})
    for load in (load_algorithm, PPO.load_from_checkpoint):
        assert_refused("policy.network", "subprocess.Popen", message_of(load, path))
    content = {"minibatch": {}, "algorithm": "subprocess.Popen", "hyper_parameters": {"args": ["touch", "pwned"]}}
    torch.save(content, "f.pt")
    assert_refused("algorithm", "subprocess.Popen", message_of(FailedUpdate.load, "f.pt"))


def test_a_pickle_in_a_checkpoint_is_not_opened(saved, monkeypatch):
    """Not even where PyTorch would by default, as Lightning had it up to 2.5."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")

    class Payload:
        def __reduce__(self):
            return Path.touch, (Path("pwned"),)

    torch.save(saved[0] | {"more": Payload()}, "x.ckpt")
    data = make_data(evaluation={"episodes": 1})
    model = make_model(data)
    trainer = make_trainer(limit_val_batches=1)
    for read in (
        lambda: load_algorithm("x.ckpt"),
        lambda: PPO.load_from_checkpoint("x.ckpt"),
        lambda: RolloutDataModule.load_from_checkpoint("x.ckpt", env_id="CartPole-v1"),
        lambda: FailedUpdate.load("x.ckpt"),
        lambda: trainer.validate(model, data, "x.ckpt", verbose=False),
        lambda: make_trainer().fit(model, data, ckpt_path="x.ckpt"),
    ):
        with pytest.raises((ConfigurationError, pickle.UnpicklingError)):
            read()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"policy.network": "untrusted.Net"}, "policy.network"),
        ({"policy.network": {"class_path": "untrusted.Net"}}, "policy.network"),
        ({"_class_path": "untrusted.Algorithm"}, "_class_path"),
    ],
)
def test_the_error_says_how_to_trust_and_that_is_enough(options, field, saved, tmp_path):
    path = write_checkpoint(saved, options)
    message = message_of(load_algorithm, path)
    assert message.startswith(f"{field}=") and "names the module 'untrusted', which loaded data" in message
    assert message.endswith("import it before, or give trust=['untrusted'], or --trust untrusted to export and push")
    for trust in ([], ["untrust"], ["untrusted.more"], ["other"]):
        assert message_of(load_algorithm, path, trust=trust) == message
    trusted()
    if "policy.network" in options:  # whose parameters are others than those that are stored
        for trust in (["untrusted"], ["other", "untrusted"], "untrusted"):
            assert "does not fit the checkpoint" in message_of(load_algorithm, path, trust=trust)
            sys.modules.pop("untrusted")
        import untrusted

        assert "does not fit the checkpoint" in message_of(load_algorithm, path)
    else:
        assert type(load_algorithm(path, trust=["untrusted"])).__name__ == "Algorithm"
        with pytest.raises(TypeError, match="positional"):  # it would be the name of the option in errors
            load_algorithm(path, "untrusted")
        sys.modules.pop("untrusted")
        import untrusted

        assert type(load_algorithm(path)) is untrusted.Algorithm
        assert type(PPO.load_from_checkpoint(path)) is untrusted.Algorithm


def test_environments_are_trusted_in_the_same_way(saved):
    path = write_checkpoint(saved)
    options = {"env_id": "untrusted:Untrusted-v0", "evaluation": {"episodes": 1}, "num_envs": 2}
    message = message_of(beside, path, options)
    assert message.endswith("import it before, or give trust=['untrusted'], or --trust untrusted to export and push")
    (path.parent.parent / "config.yaml").write_text(yaml.safe_dump({"data": options, "model": "PPO"}))
    export = ["export", f"--ckpt_path={path}", "--format=torch_export", "--programs=greedy", "--episodes=1"]
    assert run(*export) == message
    trusted()
    main([*export, "--trust=untrusted"])
    main([*export, "--trust=[other, untrusted]"])
    sys.modules.pop("untrusted")
    gymnasium.registry.pop("Untrusted-v0")
    data = load_data(path, trust=["untrusted"])
    assert data.observation_space.shape == (4,)
    assert data.spec.env_id == "untrusted:Untrusted-v0"
    own = {"class_path": "untrusted.Data", "init_args": merged(options, {"env": {"wrappers": ["untrusted.Wrapper"]}})}
    assert type(beside(path, own)).__name__ == "Data"  # it has been imported


@pytest.mark.parametrize("packages", ["untrusted", ["untrusted"], ("untrusted",)])
def test_what_is_pushed_or_exported_may_use_one_package_or_a_list_or_tuple_of_packages(packages, saved):
    path = write_checkpoint(saved, {"policy.network": "untrusted.Net"})
    trusted()
    assert "does not fit the checkpoint" in message_of(load_trained, path, None, packages)  # so it was constructed


def test_the_configuration_that_a_user_names_is_trusted(saved):
    """Also what it says about the network, when the checkpoint says the same."""
    path = write_checkpoint(saved, {"policy.network": "untrusted.Net"})
    data = {"class_path": "untrusted.Data", "init_args": {"env_id": "CartPole-v1", "evaluation": {"episodes": 1}}}
    model = {"class_path": "PPO", "init_args": {"policy": {"network": {"class_path": "untrusted.Net"}}}}
    Path("mine.yaml").write_text(yaml.safe_dump({"data": data, "model": model}))
    export = ["export", f"--ckpt_path={path}", "--episodes=1", "--format=torch_export", "--programs=greedy"]
    assert "names the module 'untrusted', which loaded data may not import" in run(*export)
    trusted()
    assert "does not fit the checkpoint" in run(*export, "--config=mine.yaml")  # so it was constructed
    assert type(load_data(path, "mine.yaml")).__name__ == "Data"


def test_a_run_with_classes_of_its_own_goes_on_by_its_own_configuration():
    """In a new process nothing of them is imported before."""
    trusted()
    data = {"env_id": "untrusted:Untrusted-v0", "num_envs": 2, "rollout_length": 16, "rollouts_per_epoch": 1}
    data = merged(data, {"env": {"wrappers": ["untrusted.Wrapper"]}, "evaluation": {"episodes": 1}})
    init_args = {"policy": {"network": "untrusted.Net"}, "num_minibatches": 2, "optimizer": {"name": "torch.optim.SGD"}}
    trainer = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "limit_val_batches": 0}
    content = {"data": data, "model": {"class_path": "untrusted.Algorithm", "init_args": init_args}, "trainer": trainer}
    Path("mine.yaml").write_text(yaml.safe_dump(content))
    assert main(["fit", "--config=mine.yaml", "--max_env_steps=32"]).model.env_steps == 32
    sys.modules.pop("untrusted")
    gymnasium.registry.pop("Untrusted-v0")
    cli = main(["fit", "--config=mine.yaml", "--max_env_steps=64", "--ckpt_path=last"])
    assert (type(cli.model).__name__, cli.model.env_steps) == ("Algorithm", 64)
    assert type(cli.model.policy.actor_encoder).__name__ == "Net"


def test_which_modules_loaded_data_may_import():
    assert not is_loading() and may_import("untrusted")
    with loading():
        assert is_loading()
        allowed = (
            "lightning_rl",
            "lightning_rl.policies.networks",
            "torch.optim",
            "gymnasium.wrappers",
            "subprocess",
            "json",
        )
        assert [module for module in allowed if not may_import(module)] == []
        refused = ("untrusted", "torchy", "lightning_rl_more", "torch.utils.model_dump.__main__", "json.tool", "")
        assert [module for module in refused if may_import(module)] == []
        with loading(["json"]):
            assert may_import("json.tool") and not may_import("jsons") and not may_import("untrusted")
        assert not may_import("json.tool")
    assert not is_loading()


def test_a_class_is_held_to_its_field_before_it_is_constructed():
    with loading():
        assert import_class("network", "torch.nn.Linear", nn.Module) is nn.Linear
        for path in ("subprocess.Popen", "functools.partial", "torch.optim.SGD"):
            with pytest.raises(ConfigurationError, match=r"^network=.*: expected a subclass of Module$"):
                import_class("network", path, nn.Module)
