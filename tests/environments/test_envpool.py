"""Training and evaluation with each family of EnvPool's tasks; Procgen needs additional libraries."""

import sys

import numpy as np
import pytest

from lightning_rl.environments import EnvironmentSpec, make_environments
from lightning_rl.environments.make import explained
from lightning_rl.validation import ConfigurationError
from tests.helpers import make_data, make_model, make_trainer
from tests.procgen import needs_procgen

envpool = pytest.importorskip("envpool")


@pytest.mark.parametrize(
    "env_id",
    [
        "CartPole-v1",
        "Pendulum-v1",
        "HalfCheetah-v4",
        "Hopper-v4",
        "InvertedPendulum-v4",
    ],
)
def test_families_with_a_time_limit_are_trained_and_evaluated(env_id):
    data = make_data(env_id, backend="envpool", env={"max_episode_steps": 12}, evaluation={"episodes": 3})
    model = make_model(data, normalization={"rewards": True})
    trainer = make_trainer(limit_val_batches=1.0)
    trainer.fit(model, data)
    # 16 steps of two environments: each loses at least one step to a reset.
    assert model.policy_version == 2 and 50 <= model.env_steps <= 62
    assert trainer.callback_metrics["val/episodes"] == 3
    assert 0 < trainer.callback_metrics["val/episode_length"] <= 12


@needs_procgen
def test_procgen_levels_come_from_kwargs():
    levels = {"num_levels": 2, "start_level": 40}
    data = make_data("BigfishEasy-v0", backend="envpool", env={"kwargs": levels}, info_keys=["level_seed"])
    model = make_model(data)
    trainer = make_trainer(log_every_n_steps=2)
    trainer.fit(model, data)
    assert model.policy_version == 2
    assert data.observation_space.shape == (3, 64, 64)
    assert model.policy.actor_encoder.channels == 3 and not model.policy.actor_encoder.channels_last
    assert 40 <= trainer.logged_metrics["rollout/level_seed"] <= 41


@needs_procgen
def test_time_limit_of_procgen_cannot_be_changed():
    with pytest.raises(
        ConfigurationError, match=r"^env.max_episode_steps=5 is not valid: expected None for Procgen games"
    ):
        make_data("BigfishEasy-v0", backend="envpool", env={"max_episode_steps": 5}).observation_space  # noqa: B018


@pytest.mark.parametrize("env", [{"max_episode_steps": 5}, {"kwargs": {"max_episode_steps": 5}}])
@pytest.mark.parametrize("env_id", ["Catch-v0", "CliffWalking-v0", "ConnectFour-v1"])
def test_time_limit_of_a_task_without_one_cannot_be_set(env_id, env):
    expected = f"^env.max_episode_steps=5 is not valid: expected None for {env_id}, whose limit EnvPool cannot change"
    with pytest.raises(ConfigurationError, match=expected):
        make_data(env_id, backend="envpool", env=env).observation_space  # noqa: B018
    assert make_data(env_id, backend="envpool").observation_space is not None


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "Taxi-v3", "MiniGrid-Empty-5x5-v0"])
def test_time_limit_replaces_the_limit_of_a_task(env_id):
    data = make_data(env_id, backend="envpool", env={"max_episode_steps": 1})
    environments = make_environments(data.spec, 1, [0])
    environments.reset()
    ends = [environments.step(np.zeros(1, np.int64)) for _ in range(3)]
    environments.close()
    assert [bool(step.truncated[0] or step.terminated[0]) for step in ends] == [True, False, True]


def test_missing_library_of_envpool_is_named():
    with (
        pytest.raises(ConfigurationError, match=r"^env_id='BigfishEasy-v0' needs a package .*the Qt 5 runtime"),
        explained(EnvironmentSpec("BigfishEasy-v0", backend="envpool")),
    ):
        raise ImportError("the Qt 5 runtime")


def test_name_that_an_installed_package_lacks_is_called_incompatible():
    message = r"needs a package .* or incompatible \(cannot import name 'none' from 'torch' .*torch/__init__"
    with pytest.raises(ConfigurationError, match=message), explained(EnvironmentSpec("Probe/Counter-v0")):
        from torch import none  # noqa: F401


def test_missing_library_of_the_system_is_named(tmp_path, monkeypatch):
    what = "libEGL.so.1: cannot open shared object file"
    (tmp_path / "envpool.py").write_text(f"raise ImportError({what!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "envpool")
    with pytest.raises(ConfigurationError, match=rf"^env_id='CartPole-v1' needs a package .*{what}"):
        make_data("CartPole-v1", backend="envpool").observation_space  # noqa: B018
