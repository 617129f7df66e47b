"""Videos: what is on them, where they go, what cannot be filmed, and that filming changes nothing else."""

import contextlib
import ctypes.util
import importlib
import importlib.util
import os
import shlex
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import imageio.v3
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_rl import EpisodeRecorder, RecordedEpisodes, VideoRecorder, load_episodes
from lightning_rl.callbacks.video import BoundedGif, VideoFile, show_video
from lightning_rl.cli.main import main
from lightning_rl.environments import rendering
from lightning_rl.environments.rendering import Camera, prepare_rendering
from lightning_rl.validation import ConfigurationError
from tests.helpers import assert_equal_parameters, make_data, make_model, make_trainer, needs_box2d, parameters_of

ROLLOUT = 2 * 16  # environment steps of a rollout from `make_data`


class Drawn(gymnasium.Env[np.ndarray, int]):
    """Shows which step of which episode it is. An episode has 5 steps, a second 60."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}  # noqa: RUF012 - as Gymnasium has it
    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, width: int = 7) -> None:
        self.render_mode, self.width, self.episode = render_mode, width, -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.steps, self.episode = 0, self.episode + 1
        return self.np_random.random(3, np.float32), {}

    def step(self, action: int):
        self.steps += 1
        return self.np_random.random(3, np.float32), float(action), self.steps == 5, False, {}

    def render(self):
        return np.full((9, self.width, 3), 10 * self.episode + self.steps, np.uint8)


DRAWN = "lightning_rl_tests/Drawn-v0"
RELAY = "tests.environments.test_pettingzoo:Probe/Relay-v0"
BLIND = "lightning_rl_tests/Blind-v0"
if DRAWN not in gymnasium.registry:
    gymnasium.register(DRAWN, Drawn)
    gymnasium.register(BLIND, lambda render_mode=None: Blind())


class Blind(Drawn):
    """Cannot be drawn."""

    metadata = {"render_modes": []}  # noqa: RUF012


class Kept:
    """Keeps the frames of each film."""

    def __init__(self) -> None:
        self.open_films: dict[int, list[int]] = {}
        self.films: dict[int, tuple[float, list[int]]] = {}

    def open(self, number: int, fps: float) -> Any:
        frames = self.open_films[number] = []
        self.fps = fps
        return SimpleNamespace(append=lambda frame: frames.append(int(frame[0, 0, 0])), discard=frames.clear)

    def finished(self, number: int, video: Any) -> None:
        self.films[number] = self.fps, self.open_films.pop(number)


def trained(*callbacks: Any, loggers: Any = False, ckpt_path: Any = None, epochs: int = 2, **options: Any):
    data = make_data(DRAWN, **options)
    model = make_model(data)
    trainer = make_trainer(callbacks=list(callbacks), max_epochs=epochs, logger=loggers)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return trainer, model, data


def test_each_film_shows_its_episode_from_the_first_to_the_last_observation():
    data = trained(epochs=1)[2]
    for _ in range(2):  # the same ones each time
        kept = Kept()
        data.film(kept, 10)
        # Eight environments, of which two play a second episode; each second step is shown, and the last.
        first, second = (30.0, [0, 2, 4, 5]), (30.0, [10, 12, 14, 15])
        assert kept.films == {n: second if n in (1, 3) else first for n in range(10)}
        assert not kept.open_films


@pytest.mark.parametrize("fixed", [1, 2])
def test_films_show_the_environment_steps_within_learned_repeats(fixed):
    data = trained(epochs=1, env={"learned_action_repeat": 4, "action_repeat": fixed})[2]
    kept = Kept()
    data.film(kept, 2)
    assert kept.films == dict.fromkeys(range(2), (30.0, [0, 2, 4, 5]))


def test_an_interval_gives_videos_in_the_folder_and_in_the_loggers(tmp_path, monkeypatch):
    """And the run ends with the weights that it has without any, from a checkpoint between two videos too."""
    shown: list[Any] = []

    class Fake(DummyLogger):
        save_dir, log_dir = str(tmp_path), str(tmp_path)

        def log_video(self, *args: Any, **kwargs: Any) -> None:
            shown.append((args, kwargs))

    class FakeMLFlow(MLFlowLogger):
        save_dir, run_id = str(tmp_path), "r"
        experiment = SimpleNamespace(log_artifact=lambda *a, **k: shown.append((a, k)))

        def __init__(self) -> None:
            super(MLFlowLogger, self).__init__()

        def log_metrics(self, *_: Any, **__: Any) -> None: ...
        def log_hyperparams(self, *_: Any, **__: Any) -> None: ...
        def finalize(self, *_: Any) -> None: ...
        def after_save_checkpoint(self, *_: Any) -> None: ...

    board = TensorBoardLogger(tmp_path, name="", version="board")
    callback = VideoRecorder(3 * ROLLOUT, episodes=2, env_kwargs={"width": 8})
    loggers = [board, Fake(), FakeMLFlow(), CSVLogger(tmp_path)]
    trainer, filmed, _ = trained(callback, loggers=loggers)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    _, plain, _ = trained()
    assert_equal_parameters(filmed, parameters_of(plain))
    folder = tmp_path / "board/videos"
    names = [f"step={step}-episode={number}.mp4" for step in (96, 128) for number in (0, 1)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    frames = imageio.v3.imread(folder / names[0])
    assert frames.shape == (4, 10, 8, 3)  # an even number of rows
    assert abs(frames[3].astype(int) - 5).max() <= 4
    assert [args for args, _ in shown[:2]] == [
        ("video/episode=0", [str(folder / names[0])]),
        ("r", str(folder / names[0])),
    ]
    assert shown[0][1] == {"step": 96, "format": ["mp4"]} and shown[1][1] == {"artifact_path": "videos"}
    board.experiment.flush()
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    images = events.Images("video/episode=1")
    assert [image.step for image in images] == [96, 128]
    assert imageio.v3.imread(images[0].encoded_image_string).shape == (4, 9, 8, 3)
    # A run that goes on counts on from the last video, and ends as the one that does not stop.
    _, resumed, _ = trained(
        again := VideoRecorder(3 * ROLLOUT, dirpath=tmp_path / "on"), ckpt_path=tmp_path / "middle.ckpt", epochs=4
    )
    assert again._last == 256 and (tmp_path / "on/step=224-episode=0.mp4").is_file()
    assert_equal_parameters(resumed, parameters_of(trained(epochs=4)[1]))


@pytest.mark.parametrize("package", ["imageio", "imageio_ffmpeg"])
def test_missing_packages_for_videos_are_named_with_their_extra(monkeypatch, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(ConfigurationError, match=rf"needs {package}, .*pip install 'lightning-rl\[video\]'"):
        trained(VideoRecorder(1))


def test_a_moving_picture_is_small_and_as_long_as_what_it_shows():
    picture = BoundedGif(fps=20.0, max_frames=4, max_side=10)
    for shade in range(9):
        picture.append(np.full((21, 12, 3), shade, np.uint8))
    assert [int(frame[0, 0, 0]) for frame in picture.frames] == [0, 4, 8]
    assert picture.frames[0].shape == (7, 4, 3)
    assert picture.fps == 5.0


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        (
            "tests.probes:Probe/Counter-v0",
            {},
            r"cannot be made for a video with .*: TypeError: .* argument 'render_mode'",
        ),
        (BLIND, {}, "cannot be filmed: expected an environment with the render mode 'rgb_array'"),
        ("CartPole-v1", {"backend": "envpool"}, "backend='envpool' is not valid: expected sync, async, or native"),
        (RELAY, {"backend": "native", "num_envs": 2}, "env_id=.* is not valid: expected one that registers single"),
        (DRAWN, {"env": {"kwargs": {"width": 0}}}, r"render\(\)='uint8 \[9, 0, 3\]' is not valid: expected a picture"),
    ],
)
def test_what_cannot_be_filmed_is_said_before_training(env_id, options, message):
    data = make_data(env_id, **options)
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(callbacks=[VideoRecorder(1)]).fit(make_model(data), data)
    assert data._sampler._collector is None


def test_environments_in_processes_and_native_ones_are_filmed_by_their_single_version():
    make_data("CartPole-v1", backend="native").check_filmable()
    make_data(DRAWN, backend="async").check_filmable()
    spec = make_data(DRAWN, backend="async", env={"on_failure": "restart", "step_timeout": 3}).eval_spec.for_filming()
    assert (spec.backend, spec.env.on_failure, spec.env.step_timeout) == ("sync", "raise", None)


@pytest.mark.parametrize("env_id", [pytest.param("LunarLander-v3", marks=needs_box2d), "ALE/Pong-v5", "Hopper-v5"])
def test_simulators_draw_without_a_display(env_id, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    data = make_data(env_id)
    if env_id == "Hopper-v5" and ctypes.util.find_library("EGL") is None:
        with pytest.raises(ConfigurationError, match=r"MUJOCO_GL='egl': expected MUJOCO_GL=egl .*libegl1"):
            data.check_filmable()
    else:
        data.check_filmable({"width": 32, "height": 32} if env_id == "Hopper-v5" else None)


@pytest.mark.parametrize(
    ("entry_point", "file"),
    [
        ("gymnasium.envs.mujoco.hopper_v5:HopperEnv", "any.py"),
        ("shimmy.dm_control_compatibility:DmControlCompatibilityV0", "dm_control/mujoco/engine.py"),
    ],
)
def test_what_mujoco_lacks_is_named(entry_point, file, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    prepare_rendering()
    assert os.environ["MUJOCO_GL"] == "osmesa"  # the user's choice
    env = Drawn()
    env.spec = EnvSpec("Hopper-v5", entry_point=entry_point)
    names: dict[str, Any] = {}
    exec(compile("def fail():\n    raise AttributeError('glGetError')", file, "exec"), names)
    monkeypatch.setattr(env, "render", names["fail"])
    with pytest.raises(ConfigurationError, match=r"glGetError\) with MUJOCO_GL='osmesa'.*apt install libosmesa6"):
        Camera(env, 30).check_renders()


def test_without_pygame_the_extra_that_brings_it_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "pygame"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pygame", None)  # as if it were not installed
    data = make_data("CartPole-v1")
    with pytest.raises(ConfigurationError, match=r"CartPole-v1 is drawn by pygame, .*: pip install 'lightning-rl\[vid"):
        make_trainer(callbacks=[EpisodeRecorder(tmp_path, ["video"])]).predict(make_model(data), data)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert [one for one in project["optional-dependencies"]["video"] if one.startswith("pygame-ce")]


def test_atari_frames_are_counted_at_the_speed_of_the_console():
    single = SimpleNamespace(metadata={"render_fps": 30})
    assert rendering.steps_per_second(single, is_atari=True, frames_per_step=4) == 15
    assert rendering.steps_per_second(single, is_atari=False, frames_per_step=1) == 30
    assert rendering.steps_per_second(SimpleNamespace(metadata={}), is_atari=False, frames_per_step=2) == 15


def test_a_failing_environment_ends_no_run_in_which_others_are_replaced(tmp_path, monkeypatch):
    def fail(self: Drawn):
        if self.steps == 4:
            raise OSError("the screen is gone")
        return np.zeros((4, 4, 3), np.uint8)

    monkeypatch.setattr(Drawn, "render", fail)
    with pytest.warns(UserWarning, match=r"no video at 64 .*the screen is gone"):
        trained(VideoRecorder(ROLLOUT * 2, dirpath=tmp_path), epochs=1, env={"on_failure": "restart"})
    assert list(tmp_path.iterdir()) == []  # nothing half done
    with pytest.raises(Exception, match="the screen is gone"):
        trained(VideoRecorder(ROLLOUT * 2, dirpath=tmp_path), epochs=1)


# ------------------------------------------------------------------ predict


def test_predict_writes_what_it_plays(in_tmp_path, capsys, caplog):
    arguments = ["predict", "--model=PPO", f"--data.env_id={DRAWN}", "--data.env.imports=[tests.callbacks.test_video]"]
    arguments += ["--data.evaluation.episodes=3", "--data.evaluation.num_envs=2", "--data.seed=1"]
    arguments += ["--trainer.accelerator=cpu"]
    main(arguments)
    plain = [line for line in capsys.readouterr().out.splitlines() if line.startswith("episode ")]
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        main([*arguments, "--record=out"])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("episode ")] == plain
    assert sorted(path.name for path in Path("out").glob("*.mp4")) == [f"episode={n}.mp4" for n in range(3)]
    assert "Videos: out" in caplog.messages
    main([*arguments, "--record=out", "--record_as=minari"])
    assert sorted(path.name for path in Path("out/minari/Drawn-v0").glob("ppo*")) == ["ppo-v0", "ppo-v1"]
    first, second = (load_episodes(f"minari:out/minari/Drawn-v0/ppo-v{n}") for n in range(2))
    returns = [f"episode {n}: return {e.episode_return:g}, 5 steps, terminated" for n, e in enumerate(first)]
    assert returns == plain
    assert all(np.array_equal(a.observations, b.observations) for a, b in zip(first, second, strict=True))


def test_a_minari_data_set_is_what_was_played(tmp_path, monkeypatch, caplog):
    import minari

    folder = tmp_path / "my episodes"
    data = make_data(DRAWN, env={"previous_action": True}, evaluation={"episodes": 3})
    recorder = EpisodeRecorder(folder, ["minari"])
    model = make_model(data)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        (episodes,) = make_trainer(callbacks=[recorder]).predict(model, data)
    assert recorder.dataset == folder / "minari/Drawn-v0/ppo-v0"
    root = shlex.quote(str(folder / "minari"))
    assert f"MINARI_DATASETS_PATH={root}," in caplog.text
    assert "MINARI_DATASETS_PATH" not in os.environ
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder / "minari"))
    found = list(minari.load_dataset("Drawn-v0/ppo-v0").iterate_episodes())
    ours = RecordedEpisodes(DRAWN, f"minari:{recorder.dataset}", env={"previous_action": True})
    assert len(found) == 3 and len(ours._steps["rewards"]) == 15
    for episode, other in zip(episodes, found, strict=True):
        for name in ("observation", "previous_action"):
            assert np.array_equal(episode.observations[name], other.observations[name])
        assert np.array_equal(episode.actions, other.actions) and np.array_equal(episode.rewards, other.rewards)
        assert other.terminations.tolist() == [False] * 4 + [True] and not other.truncations.any()
    # The next prediction with the same data is not recorded.
    make_trainer().predict(model, data)
    assert [path.name for path in (folder / "minari/Drawn-v0").glob("ppo*")] == ["ppo-v0"]


class _Interrupts(Callback):
    def on_predict_batch_end(self, *_: object) -> None:
        raise RuntimeError("interrupted")


@pytest.mark.parametrize("others", [[], [_Interrupts()]])
def test_a_later_prediction_with_the_same_data_is_not_filmed(others, tmp_path):
    data = make_data(DRAWN)
    model = make_model(data)
    trainer = make_trainer(callbacks=[EpisodeRecorder(tmp_path, ["video"]), *others])
    with pytest.raises(RuntimeError, match="interrupted") if others else contextlib.nullcontext():
        trainer.predict(model, data)
    for path in [*tmp_path.glob("*.mp4")]:
        path.unlink()
    make_trainer().predict(model, data)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_played(tmp_path):
    (tmp_path / "file").touch()
    data = make_data(DRAWN)
    model = make_model(data)
    with pytest.raises(ConfigurationError, match=r"folder='.*file/recorded' is not valid: expected a folder that can"):
        make_trainer(callbacks=[EpisodeRecorder(tmp_path / "file/recorded")]).predict(model, data)
    film = VideoRecorder(10**9, dirpath=tmp_path / "file/videos")
    with pytest.raises(ConfigurationError, match=r"dirpath='.*file/videos' is not valid: expected a folder that can"):
        make_trainer(callbacks=[film], max_epochs=1).fit(model, data)
    assert model.env_steps == 0


def test_recording_that_cannot_be_done_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="formats='video' is not valid: expected a list of video or minari"):
        EpisodeRecorder(tmp_path, "video")
    data = make_data(BLIND)
    with pytest.raises(ConfigurationError, match="rgb_array"):
        make_trainer(callbacks=[EpisodeRecorder(tmp_path)]).predict(make_model(data), data)
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ConfigurationError, match=r"needs minari, .*\[minari\]'"):
        make_trainer(callbacks=[EpisodeRecorder(tmp_path, ["video", "minari"])]).predict(make_model(data), data)


def test_recording_leaves_out_what_is_not_installed_unless_it_was_asked_for(tmp_path, monkeypatch, caplog):
    data = make_data(DRAWN)
    find_spec, missing = importlib.util.find_spec, {"h5py"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
    recorder = EpisodeRecorder(tmp_path)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        make_trainer(callbacks=[recorder]).predict(make_model(data), data)
    assert recorder.formats == ("video",) and len(list(tmp_path.glob("*.mp4"))) == 2
    (said,) = (message for message in caplog.messages if message.startswith("Left out"))
    assert said.startswith(
        "Left out: recording as 'minari' needs h5py, which is not installed: pip install 'lightning-rl[minari]'"
    )
    missing.add("imageio")
    for formats in (None, ["video"]):
        with pytest.raises(ConfigurationError, match=r"video needs imageio, .*lightning-rl\[video\]"):
            make_trainer(callbacks=[EpisodeRecorder(tmp_path, formats)]).predict(make_model(data), data)


def test_a_logger_that_shows_no_videos_gets_none(tmp_path):
    video = VideoFile(tmp_path / "a", 10.0)
    video.append(np.zeros((4, 4, 3), np.uint8))
    video.close()
    show_video(CSVLogger(tmp_path / "log"), "video", video, 3)
    assert not (tmp_path / "log").exists()
