"""Errors for unknown ids, missing packages and rejected arguments."""

import importlib
import importlib.util
import math
import re
import sys

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from lightning_rl import PPO, RolloutDataModule
from lightning_rl.environments import EnvConfig, EnvironmentSpec, make_environments
from lightning_rl.environments.registry import find_spec
from lightning_rl.validation import ConfigurationError
from tests.helpers import needs_box2d


def make(env_id, backend="sync", **options):
    make_environments(EnvironmentSpec(env_id, EnvConfig(**options), backend), 1, [0]).close()


@pytest.fixture
def without(monkeypatch):
    """Pretend that packages are not installed."""

    def hide(*packages):
        find = importlib.util.find_spec
        hidden = lambda name: name.partition(".")[0] in packages  # noqa: E731
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if hidden(name) else find(name, *rest)
        )
        for name in [name for name in sys.modules if hidden(name)]:
            monkeypatch.delitem(sys.modules, name)
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)  # `import package` raises
        for env_id, spec in list(gymnasium.registry.items()):
            if str(spec.entry_point).partition(".")[0] in packages:
                monkeypatch.delitem(gymnasium.registry, env_id)

    return hide


@pytest.mark.parametrize(
    ("env_id", "nearest"),
    [
        ("CartPole-v7", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("HalfCheeta-v5", "HalfCheetah-v5"),
        ("ALE/Pung-v5", "ALE/Pong-v5"),
        ("MiniGrid-Emty-5x5-v0", "MiniGrid-Empty-5x5-v0"),
    ],
)
def test_unknown_id_error_has_the_nearest_names(env_id, nearest):
    with pytest.raises(
        ConfigurationError, match=f"^env_id='{env_id}' is unknown: expected .* did you mean .*{nearest}"
    ):
        make(env_id)


@pytest.mark.parametrize("env_id", ["FlappyBird-v0", "parking-v0"])
def test_unknown_id_error_without_near_names_explains_imports(env_id):
    with pytest.raises(ConfigurationError) as caught:
        make(env_id)
    assert str(caught.value) == (
        f"env_id='{env_id}' is unknown: expected a registered environment id; a package that registers it is "
        f"imported by package:{env_id}, or by --data.env.imports [package]"
    )


@pytest.mark.parametrize(
    ("env_id", "near"),
    [
        ("CartPole-v7", "; did you mean CartPole-v1?"),
        ("Ant-v9", "; did you mean Ant-v5?"),
        ("gymnasium:Zork-v0", ""),
    ],
)
def test_unknown_id_error_names_neither_old_versions_nor_ids_of_which_only_the_module_is_alike(env_id, near):
    with pytest.raises(ConfigurationError, match=rf"expected a registered environment id{re.escape(near)}$"):
        make(env_id)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_environments_that_are_only_vectorized_need_the_native_backend(backend, monkeypatch):
    spec = EnvSpec("VectorOnly-v0", entry_point=None, vector_entry_point="some.module:Vector")
    monkeypatch.setitem(gymnasium.registry, "VectorOnly-v0", spec)
    expected = rf"^backend='{backend}' is not valid: expected native \(--data.backend native\), .* VectorOnly-v0"
    with pytest.raises(ConfigurationError, match=expected):
        make("VectorOnly-v0", backend=backend)
    with pytest.raises(ConfigurationError, match=expected):
        _ = RolloutDataModule("VectorOnly-v0", backend=backend).observation_space


@pytest.mark.parametrize(
    ("env_id", "space"),
    [("MiniGrid-Empty-5x5-v0", "MissionSpace"), ("BabyAI-GoToLocal-v0", "BabyAIMissionSpace")],
)
def test_minigrid_text_error_names_a_wrapper(env_id, space):
    pytest.importorskip("minigrid")
    data = RolloutDataModule(env_id)
    with pytest.raises(ConfigurationError, match=rf"mission: {space} is not supported.* minigrid.wrappers.ImgObs"):
        PPO(data.observation_space, data.action_space)
    wrapped = RolloutDataModule("MiniGrid-Empty-5x5-v0", env={"wrappers": ["minigrid.wrappers.ImgObsWrapper"]})
    assert PPO(wrapped.observation_space, wrapped.action_space).observation_space.shape == (7, 7, 3)


def test_environments_of_a_declared_entry_point_are_registered():
    pytest.importorskip("minatar")
    gymnasium.registry.pop("MinAtar/Breakout-v1", None)
    make("MinAtar/Breakout-v1")


def test_minatar_error_names_the_extra(without, monkeypatch):
    without("minatar")
    monkeypatch.setattr("lightning_rl.environments.registry.entry_points", lambda **_: ())
    with pytest.raises(ConfigurationError, match=r"^env_id='MinAtar/Breakout-v1' needs .* pip install.*\[minatar\]"):
        make("MinAtar/Breakout-v1")


def fail(**_):
    raise AssertionError


def fail_with_text(**_):
    raise AttributeError("'MjModel' object has no attribute 'x'")


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("constructor", "message"),
    [
        (fail, rf"AssertionError \(at {__file__}:\d+ in fail: raise AssertionError\)"),
        (fail_with_text, rf"AttributeError: 'MjModel' object .* 'x' \(at {__file__}:\d+ in fail_with_text\)"),
    ],
    ids=["without_text", "with_text"],
)
def test_constructor_error_keeps_type_message_and_place(backend, constructor, message, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Broken-v0", EnvSpec("Broken-v0", entry_point=constructor))
    with pytest.raises(ConfigurationError, match=f"^env_id='Broken-v0' cannot be made with env.kwargs={{}}: {message}"):
        _ = RolloutDataModule("Broken-v0", backend=backend).observation_space


def test_robotics_error_names_compatible_versions(monkeypatch):
    scope = {"__name__": "gymnasium_robotics.utils"}
    exec("def fail(**_):\n    raise AssertionError", scope)
    monkeypatch.setitem(gymnasium.registry, "Fetch-v4", EnvSpec("Fetch-v4", entry_point=scope["fail"]))
    with pytest.raises(ConfigurationError, match=r"; these versions work .* pip install 'lightning-rl\[robotics\]'$"):
        make("Fetch-v4")


def test_unknown_envpool_task_error_has_the_nearest_names():
    with pytest.raises(ConfigurationError, match=r"^env_id='CartPool-v1' is unknown: .*CartPole-v1"):
        make("CartPool-v1", backend="envpool")


def test_unknown_id_is_an_error_when_the_spaces_are_read():
    with pytest.raises(ConfigurationError, match="is unknown"):
        _ = RolloutDataModule("CartPole-v7").observation_space


@pytest.mark.parametrize(
    ("env_id", "package", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("PongNoFrameskip-v4", "ale_py", "atari"),
        ("ALE/Pong-v5", "cv2", "atari"),
        ("HalfCheetah-v5", "mujoco", "mujoco"),
        ("LunarLander-v3", "Box2D", "box2d"),
        ("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid"),
        ("BabyAI-GoToObj-v0", "minigrid", "minigrid"),
    ],
)
def test_missing_package_is_named_with_the_extra_that_installs_it(without, monkeypatch, env_id, package, extra):
    for name in [name for name in sys.modules if name.startswith(("gymnasium.envs.mujoco", "gymnasium.envs.box2d"))]:
        monkeypatch.delitem(sys.modules, name)
    without(package)
    with pytest.raises(ConfigurationError) as caught:
        make(env_id)
    message = str(caught.value)
    assert message.startswith(f"env_id='{env_id}' needs ") and "not installed" in message
    assert message.endswith(
        f": pip install 'lightning-rl[{extra}]', in a checkout pip install -c constraints.txt -e '.[{extra}]'"
    )


def test_missing_envpool_is_named(without):
    without("envpool")
    with pytest.raises(
        ConfigurationError, match=r"^backend='envpool' needs .*: pip install 'lightning-rl\[envpool\]', in a checkout "
    ):
        make("CartPole-v1", backend="envpool")


def test_id_with_a_module_imports_the_module_first(tmp_path, monkeypatch):
    (tmp_path / "their_envs.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Theirs-v0', CartPoleEnv)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    make("their_envs:Theirs-v0")
    make("their_envs:Theirs-v0", backend="async")
    with pytest.raises(ConfigurationError, match=r"^env_id='no_such_module:X-v0': module 'no_such_module' cannot"):
        make("no_such_module:X-v0")
    with pytest.raises(ConfigurationError, match="did you mean their_envs:Theirs-v0"):
        make("their_envs:Thiers-v0")
    del gymnasium.registry["Theirs-v0"]


@pytest.mark.parametrize(
    ("env_id", "backend", "kwargs"),
    [
        ("CartPole-v1", "sync", {"gravity": 1}),
        ("CartPole-v1", "async", {"gravity": 1}),
        ("CartPole-v1", "native", {"gravity": 1}),
        ("CartPole-v1", "envpool", {"gravity": 1}),
        pytest.param("LunarLander-v3", "sync", {"gravity": 99.0}, marks=needs_box2d),
        ("ALE/Pong-v5", "sync", {"mode": 77}),
    ],
)
def test_rejected_constructor_arguments_are_named(env_id, backend, kwargs):
    with pytest.raises(ConfigurationError) as caught:
        make(env_id, backend, kwargs=kwargs)
    assert str(caught.value).startswith(f"env_id='{env_id}' cannot be made with env.kwargs={kwargs!r}: ")


def test_native_backend_requires_a_vectorized_version():
    with pytest.raises(
        ConfigurationError,
        match=r"backend='native' is not valid: expected sync, .*: LunarLander-v3 registers no vector",
    ):
        make("LunarLander-v3", backend="native")


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        ("no.such.Wrapper", r"^env.wrappers='no.such.Wrapper' cannot be imported"),
        ("gymnasium.wrappers.NoSuch", r"^env.wrappers='gymnasium.wrappers.NoSuch' cannot be imported"),
        ("gymnasium.make", r"^env.wrappers='gymnasium.make' is not valid: expected the path of a class"),
        ("gymnasium.wrappers.TimeLimit", r"^env.wrappers: gymnasium.wrappers.TimeLimit refused the arguments \{\}"),
    ],
)
def test_invalid_wrapper_is_named(wrapper, message):
    with pytest.raises(ConfigurationError, match=message):
        make("CartPole-v1", wrappers=[wrapper])


@pytest.mark.parametrize(
    ("backend", "timeout", "message"),
    [
        ("threads", None, "^backend='threads' is not valid: expected one of sync, async, .*, torch, envpool$"),
        ("sync", 1.0, "^env.step_timeout=1.0 is not valid: expected None unless backend is 'async'$"),
        ("async", 0.0, "^env.step_timeout=0.0 is not valid: expected a number above 0"),
        ("async", math.inf, "^env.step_timeout=inf is not valid"),
    ],
)
def test_invalid_backend_and_step_timeout_are_errors(backend, timeout, message):
    with pytest.raises(ConfigurationError, match=message):
        RolloutDataModule("CartPole-v1", backend=backend, env={"step_timeout": timeout})


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        ("FetchReach-v4", "gymnasium_robotics:FetchReach-v4"),
        ("dm_control/cartpole-swingup-v0", "shimmy:dm_control/cartpole-swingup-v0"),
    ],
)
def test_id_of_a_known_package_error_names_the_package(env_id, expected):
    with pytest.raises(ConfigurationError, match=f"^env_id='{env_id}' is unknown: expected {expected}, which imports"):
        find_spec(env_id)
