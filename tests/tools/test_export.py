"""Exported programs act like the policy, without this package."""

import copy
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from gymnasium import spaces
from torch import nn

from lightning_rl import PPO, __version__
from lightning_rl.masks import ActionMask
from lightning_rl.nested import first_leaf, leaves, map_leaves, map_space, part_at
from lightning_rl.policies.interface import to_environment
from lightning_rl.spaces import observation_dtype, space_from_dict
from lightning_rl.tools import export
from lightning_rl.tools.export import DeployedPolicy, RoundTripError, export_policy, export_program
from lightning_rl.validation import ConfigurationError, ExplainedError
from tests.helpers import DISCRETE, VECTOR, full_disk, merged
from tests.nested_probes import SENSORS

BOX = spaces.Box(np.array([-2, -1], np.float32), np.array([1, 3], np.float32))
HYBRID = spaces.Dict(
    {
        "move": spaces.Discrete(3, start=-1),
        "arm": spaces.Tuple([BOX, spaces.MultiDiscrete([3, 2], start=[1, 0])]),
        "lamps": spaces.MultiBinary(2),
        "steps": spaces.Box(-2, 3, (2,), np.int8),
    }
)
MASKED = spaces.Dict({"place": VECTOR, "action_mask": ActionMask((3,))})

CASES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any], dict[str, Any]]] = {
    "normalised_gaussian": (VECTOR, BOX, {"normalization": {"observations": True}, "policy": {"initial_log_std": 1.0}}),
    "squashed": (VECTOR, BOX, {"policy": {"action_distribution": "squashed_gaussian"}}),
    "beta": (VECTOR, BOX, {"policy": {"action_distribution": "beta"}}),
    "lstm": (VECTOR, DISCRETE, {"policy": {"memory": {"kind": "lstm", "hidden_size": 8, "num_layers": 2}}}),
    "mingru": (VECTOR, DISCRETE, {"policy": {"memory": {"kind": "mingru", "hidden_size": 8, "num_layers": 2}}}),
    "gtrxl": (VECTOR, DISCRETE, {"policy": {"memory": {"kind": "gtrxl", "hidden_size": 8, "context_length": 3}}}),
    "masks": (MASKED, DISCRETE, {}),
    "nested": (SENSORS, HYBRID, {"policy": {"critic_only": ["camera"]}, "normalization": {"observations": True}}),
}


def traces_gamma() -> bool:
    """Return whether this PyTorch can trace gamma variables, which beta distributions sample."""
    try:
        torch._standard_gamma(torch.ones(1, device="meta"))
    except NotImplementedError:
        return False
    return True


PROGRAMS = {case: ["greedy", "sampled"] for case in CASES}
if not traces_gamma():
    PROGRAMS["beta"] = ["greedy"]

# Needs only PyTorch.
SCRIPT = """
import sys, torch
folder, seed = sys.argv[1:]
found = {}
for (case, name), (file, examples) in torch.load(f"{folder}/examples.pt").items():
    program = torch.export.load(file).module()
    torch.manual_seed(int(seed))
    found[case, name] = [program(*example) for example in examples]
assert not {"lightning_rl", "lightning", "gymnasium"} & set(sys.modules), "the programs need more than PyTorch"
torch.save(found, f"{folder}/found.pt")
"""


def make(case: str) -> PPO:
    observation_space, action_space, options = CASES[case]
    torch.manual_seed(0)
    model = PPO(observation_space, action_space, **merged({"policy": {"hidden_sizes": (8,)}}, options))
    with torch.no_grad():
        for parameter in model.policy.action_head.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    if (normalizer := model.policy.observation_normalizer) is not None:
        normalizer.update(observations(model, 50))
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[PPO, Path]]:
    """Returns the model of a case, and the folder of all its programs for PyTorch, which are made once."""

    @functools.cache
    def export_once(case: str) -> tuple[PPO, Path]:
        model = make(case)
        model.clock.env_steps = 1234
        folder = tmp_path_factory.mktemp("exports") / "deep" / case
        return model, export_policy(model, folder, env_id=f"Probe/{case}-v0", programs=PROGRAMS[case])

    return export_once


def observations(model: PPO, rows: int) -> Any:
    """Return observations with all parts, including those that only the critic sees."""

    def draw(space: spaces.Space[Any]) -> torch.Tensor:
        space = copy.deepcopy(space)
        space.seed(rows)
        drawn = np.stack([space.sample() for _ in range(rows)])
        if isinstance(space, ActionMask):
            drawn[:, 1] = 1
        return torch.from_numpy(drawn.astype(observation_dtype(space, torch.float32)))

    return map_space(draw, model.observation_space)


def inputs(model: PPO, rows: int) -> tuple[Any, ...]:
    x = observations(model, rows)
    for path in model.policy.critic_only:
        del x[path]
    memory = model.policy.initial_memory(rows, critic=False)
    return (x,) if memory is None else (x, map_leaves(lambda m: m + torch.rand_like(m), memory))


@torch.no_grad()
def act(model: PPO, deterministic: bool, x: Any, memory: Any = None) -> Any:
    """Return actions for the environment, and the next memory."""
    output = model.policy.act(x, deterministic=deterministic, **({} if memory is None else {"memory": memory}))
    arrays = to_environment(model.action_space, map_leaves(lambda a: a.numpy(), output.environment_action))
    actions = map_leaves(torch.from_numpy, arrays)
    return actions if memory is None else (actions, output.memory)


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        assert not one.requires_grad, "a graph would grow with a memory"
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_exported_programs_act_like_policies_without_this_package(tmp_path, exported):
    models = {case: exported(case)[0] for case in CASES}
    examples = {case: [inputs(model, rows) for rows in (1, 4, 7)] for case, model in models.items()}
    files = {(case, name): exported(case)[1] / f"{name}.pt2" for case, names in PROGRAMS.items() for name in names}
    torch.save({key: (str(file), examples[key[0]]) for key, file in files.items()}, tmp_path / "examples.pt")
    # `-I` ignores PYTHONPATH and the current folder.
    command = [sys.executable, "-I", "-c", SCRIPT, str(tmp_path), "5"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    found = torch.load(tmp_path / "found.pt")
    assert found.keys() == files.keys()
    for (case, name), outputs in found.items():
        torch.manual_seed(5)
        for actions, example in zip(outputs, examples[case], strict=True):
            assert_same(actions, act(models[case], name == "greedy", *example))
    for case in (case for case, names in PROGRAMS.items() if len(names) == 2):
        greedy, sampled = (first_leaf(found[case, name][2]) for name in ("greedy", "sampled"))
        assert not torch.equal(greedy, sampled), "a sample is not the mode"


def test_exported_program_never_takes_masked_actions(exported):
    model, folder = exported("masks")
    program = torch.export.load(folder / "sampled.pt2").module()
    allowed = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.bool).repeat_interleave(200, 0)
    mask = allowed.to(observations(model, 1)["action_mask"].dtype)
    # Before PyTorch 2.10, programs need dicts in the order of the space.
    parts = {"place": torch.randn(400, 3), "action_mask": mask}
    actions = program({key: parts[key] for key in model.observation_space})
    assert allowed[torch.arange(400), actions].all()
    assert set(actions.tolist()) == {0, 1, 2}


def test_exported_actions_respect_bounds_and_discrete_start(exported):
    _, folder = exported("normalised_gaussian")
    actions = torch.export.load(folder / "sampled.pt2").module()(torch.randn(500, 3))
    assert (actions.min(0)[0].tolist(), actions.max(0)[0].tolist()) == ([-2, -1], [1, 3])
    model, folder = exported("nested")
    (example,) = inputs(model, 200)
    actions = torch.export.load(folder / "sampled.pt2").module()(example)
    assert set(actions["move"].tolist()) == {-1, 0, 1}


def test_description_lists_inputs_and_outputs(exported):
    _, folder = exported("nested")
    assert sorted(path.name for path in folder.iterdir()) == ["greedy.pt2", "policy.json", "sampled.pt2"]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads((folder / "policy.json").read_text(), parse_constant=refuse)
    assert (found["env_steps"], found["env_id"], found["version"]) == (1234, "Probe/nested-v0", __version__)
    assert (found["algorithm"], found["memory"]) == ("PPO", None)
    seen = {name: part for name, part in SENSORS.items() if name != "camera"}
    assert space_from_dict(found["observation_space"]) == spaces.Dict(seen)
    assert space_from_dict(found["action_space"]) == HYBRID
    assert found["observations"]["place"] == {"dtype": "float32", "shape": [2]}
    assert found["programs"] == {"greedy": "greedy.pt2", "sampled": "sampled.pt2"}
    assert (found["program_format"], found["score"]) == ("torch_export", None)
    names = ["arm.0", "arm.1", "body.lamps", "body.wheels", "place"]
    assert [part["name"] for part in found["inputs"]] == [f"observation.{name}" for name in names]
    actions = [(part["name"], part["dtype"], part["shape"]) for part in found["outputs"]]
    assert ("action.move", "int64", []) in actions
    assert ("action.arm.0", "float32", [2]) in actions
    inside: dict[str, Any] = {"policy.json": ""}
    torch.export.load(folder / "greedy.pt2", extra_files=inside)
    assert json.loads(inside["policy.json"]) == found
    state = {"dtype": "float32", "shape": [2, 8]}
    assert json.loads((exported("lstm")[1] / "policy.json").read_text())["memory"] == {"actor": [state, state]}


def test_export_does_not_change_policy_or_random_state(tmp_path):
    model = make("squashed")
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model.train()
    export_policy(model, tmp_path / "policy", programs=["sampled"])
    assert torch.equal(torch.get_rng_state(), random)
    assert model.policy.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    # The policy still has gradients.
    model.policy(torch.zeros(1, 3))[1].sum().backward()


def test_exported_program_does_not_contain_the_parameters_of_the_critic(tmp_path):
    model = PPO(VECTOR, DISCRETE, policy={"hidden_sizes": [256, 256]})
    folder = export_policy(model, tmp_path / "policy", programs=["greedy"])
    program = torch.export.load(folder / "greedy.pt2").module()
    critic = {name: x for name, x in program.named_parameters() if "critic" in name or "value" in name}
    assert critic and not any(x.any() for x in critic.values())
    assert (folder / "greedy.pt2").stat().st_size < 1.5 * 4 * 256 * 256  # one of two networks


def test_export_replaces_only_earlier_exports(tmp_path, exported):
    model = make("squashed")
    shutil.copytree(exported("squashed")[1], tmp_path / "policy")
    model.clock.env_steps = 2
    folder = export_policy(model, tmp_path / "policy", programs=["greedy"])
    assert json.loads((folder / "policy.json").read_text())["env_steps"] == 2
    assert sorted(path.name for path in folder.iterdir()) == ["greedy.pt2", "policy.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigurationError, match=r"folder=.*mine.* expected a new folder, or one of an earlier export"):
        export_policy(model, tmp_path / "mine")


def test_an_export_removes_what_a_killed_process_left_an_hour_ago(tmp_path):
    code = (
        "import os\n"
        "from lightning_rl import PPO\n"
        "from lightning_rl.tools import export\n"
        "export._compare = lambda *_: os.kill(os.getpid(), 9)\n"
        "from tests.tools.test_export import make\n"
        f"export.export_policy(make('masks'), {str(tmp_path / 'policy')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120)
    (left,) = tmp_path.iterdir()
    assert list(left.glob("new/greedy.pt2"))
    export_policy(make("masks"), tmp_path / "policy", programs=["greedy"])
    assert left.is_dir()  # as if it were of a process on another machine
    os.utime(left, (time.time() - 4000,) * 2)
    running = tmp_path / ".unfinished-running"
    running.mkdir()
    export_policy(make("masks"), tmp_path / "policy", programs=["greedy"])
    assert {*tmp_path.iterdir()} == {tmp_path / "policy", running}


def test_policy_that_cannot_be_traced_is_rejected_without_leftovers(tmp_path):
    class Branching(nn.Module):
        out_features = 3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    model = make("beta")
    model.policy.actor_encoder = Branching()
    model.policy.action_head = PPO(VECTOR, DISCRETE, policy={"hidden_sizes": (3,)}).policy.action_head
    model.action_space = DISCRETE
    with pytest.raises(ConfigurationError, match=r"torch\.export can trace; greedy program: "):
        export_policy(model, tmp_path / "policy")
    with pytest.raises(ConfigurationError, match=r"policy=ActorCritic cannot be exported: .* torch\.export can trace"):
        export_policy(model, tmp_path / "policy")
    assert not list(Path(tmp_path).iterdir())


class Session:
    """An ONNX model that is called by the names in its metadata."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.about = json.loads(self.session.get_modelmeta().custom_metadata_map["policy"])

    def __call__(self, example: tuple[Any, ...]) -> dict[str, np.ndarray]:
        named = dict(zip(("observation", "memory"), example, strict=False))
        names = [part["name"] for part in self.about["outputs"]]
        feed = {part["name"]: part_at(named, part["name"]).numpy() for part in self.about["inputs"]}
        return dict(zip(names, self.session.run(names, feed), strict=True))


@pytest.mark.parametrize("case", ["lstm", "mingru", "gtrxl", "nested"])
def test_onnx_models_act_like_policies_by_input_name(case, tmp_path):
    model = make(case)
    folder = export_policy(model, tmp_path / case, "Probe-v0", format="onnx", programs=["greedy"], score={"mean": 7.0})
    assert sorted(path.name for path in folder.iterdir()) == ["greedy.onnx", "policy.json"]
    session = Session(folder / "greedy.onnx")
    assert session.about == json.loads((folder / "policy.json").read_text())
    assert (session.about["env_id"], session.about["score"]) == ("Probe-v0", {"mean": 7.0})
    assert all(part.shape[0] == "batch" for part in [*session.session.get_inputs(), *session.session.get_outputs()])
    for rows in (1, 4, 7):
        example = inputs(model, rows)
        found, expected = session(example), act(model, True, *example)
        named = dict(zip(("action", "next_memory"), (expected,) if len(example) == 1 else expected, strict=False))
        for part in session.about["outputs"]:
            own = torch.from_numpy(np.asarray(found[part["name"]]))
            assert_same(own, part_at(named, part["name"]))
            assert (str(found[part["name"]].dtype), list(own.shape)) == (part["dtype"], [rows, *part["shape"]])


def test_onnx_samples_respect_action_masks(tmp_path):
    folder = export_policy(make("masks"), tmp_path / "masks", format="onnx", programs=["sampled"])
    onnxruntime.set_seed(0)
    allowed = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.int8).repeat_interleave(200, 0)
    actions = Session(folder / "sampled.onnx")(({"place": torch.randn(400, 3), "action_mask": allowed},))["action"]
    assert allowed[torch.arange(400), torch.from_numpy(actions)].all()
    assert set(actions.tolist()) == {0, 1, 2}


def test_onnx_samples_repeat_if_the_seed_was_set_before_the_session_was_made(tmp_path):
    model = make("normalised_gaussian")
    path = export_policy(model, tmp_path / "policy", format="onnx", programs=["sampled"]) / "sampled.onnx"
    feed = {"observation": np.zeros((5, 3), np.float32)}
    drawn = []
    for seed in (1, 1, 2):
        onnxruntime.set_seed(seed)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        drawn.append([session.run(None, feed)[0] for _ in range(2)])
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0][0] != drawn[0][1]).any()
    assert (drawn[0][0] != drawn[2][0]).any()


def test_missing_onnx_operator_is_named(tmp_path):
    message = r"(?s)cannot be exported.*programs=\['greedy'\].*; sampled program: .*aten\._standard_gamma"
    with pytest.raises(ConfigurationError, match=message if traces_gamma() else r"can trace; .*aten\._standard_gamma"):
        export_policy(make("beta"), tmp_path / "beta", format="onnx", programs=["sampled"])
    model = make("beta").bfloat16()
    with pytest.raises(ConfigurationError, match=r"the policy is in torch\.bfloat16: expected float32 or float64"):
        export_policy(model, tmp_path / "beta", format="onnx", programs=["greedy"])
    assert not list(tmp_path.iterdir())


def test_program_that_differs_on_given_observations_is_not_written(tmp_path, monkeypatch):
    """The two policies differ only in the weight of the last observed number."""
    model, other = make("normalised_gaussian"), make("normalised_gaussian")
    model.policy.observation_normalizer = other.policy.observation_normalizer = None
    with torch.no_grad():
        next(other.policy.actor_encoder.parameters())[:, 2] += 0.01
    program = export_program(DeployedPolicy(other.policy, other.observation_space, other.action_space))
    monkeypatch.setattr(export, "export_program", lambda *_: program)
    unseen, seen = np.float32([[[1, 2, 0], [3, 1, 0]]] * 3), np.float32([[[1, 2, 1], [3, 1, 1]]] * 3)
    export_policy(model, tmp_path / "policy", programs=["greedy"], observations=unseen)
    with pytest.raises(RoundTripError, match=r"greedy\.pt2, step 0 of 3, \d rows: the program differs"):
        export_policy(model, tmp_path / "other", programs=["greedy"], observations=seen)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize("format_", ["torch_export", "onnx"])
def test_full_disk_is_named_and_keeps_the_earlier_export(format_, tmp_path, monkeypatch, exported):
    """PyTorch alone would end the process."""
    model, earlier = exported("squashed")
    folder = shutil.copytree(earlier, tmp_path / "policy")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ExplainedError, match=r"greedy\.\w+' could not be written: No space left on device"):
        export_policy(model, folder, format=format_, programs=["greedy"])
    assert [*tmp_path.iterdir()] == [folder]
    kept, before = ({path.name: path.read_bytes() for path in one.iterdir()} for one in (folder, earlier))
    assert kept == before


def test_export_options_are_checked_first(tmp_path, monkeypatch):
    for options, message in (
        ({"format": "tflite"}, "format='tflite' is not valid: expected one of torch_export, onnx"),
        ({"programs": []}, "programs=.* expected a list of greedy, sampled"),
        ({"programs": "greedy"}, "programs='greedy' is not valid"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            export_policy(make("beta"), tmp_path / "policy", **options)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    expected = r"format='onnx' needs onnxscript, which is not installed: pip install 'lightning-rl\[onnx\]'"
    with pytest.raises(ConfigurationError, match=expected):
        export_policy(make("beta"), tmp_path / "policy", format="onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_policies_with_bounds_of_the_largest_float_are_exported(dtype, tmp_path):
    largest = np.finfo(dtype).max
    space = spaces.Box(-largest, np.array([largest] * 29 + [1.0], dtype), (30,), dtype)
    torch.manual_seed(1)
    model = PPO(space, spaces.Box(-1, 1, (2,)), policy={"hidden_sizes": (64,), "activation": "relu"})
    export_policy(model, tmp_path / "policy")
