"""Loading algorithms and environments from checkpoints, scores, and the Hub."""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml

from lightning_rl import PPO, RolloutDataModule, __version__
from lightning_rl.cli.main import main
from lightning_rl.data.evaluation import EvaluationConfig
from lightning_rl.tools.hub import FILES, make_hub_folder, pull_from_hub, push_to_hub
from lightning_rl.tools.trained import Score, config_of, find_trained, load_algorithm, load_data, play_episodes
from lightning_rl.validation import ConfigurationError
from tests.helpers import make_data, make_model, make_trainer, merged

SHARING = Path(__file__).parents[2] / "docs/sharing.md"
PARTIAL = {"class_path": "lightning_rl.environments.PartialObservation", "init_args": {"indices": [0, 2]}}
SCORE = Score(mean=123.456, std=7.0, episodes=4, deterministic=True)


class OwnData(RolloutDataModule):
    """A data module with another option."""

    def __init__(self, own: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return a run folder with a checkpoint of a recurrent policy."""
    folder = tmp_path_factory.mktemp("run")
    data = make_data(env={"wrappers": [PARTIAL]})
    model = make_model(data, policy={"memory": "gru"})
    trainer = make_trainer(limit_train_batches=1)
    trainer.fit(model, data)
    trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt")
    return folder


@pytest.fixture
def checkpoint(run) -> Path:
    return run / "checkpoints" / "last.ckpt"


def with_config(run: Path, **data: object) -> Path:
    options = merged({"env_id": "CartPole-v1", "env": {"wrappers": [PARTIAL]}, "evaluation": {"episodes": 3}}, data)
    path = run / "config.yaml"
    path.write_text(yaml.safe_dump({"data": options, "model": {"class_path": "PPO"}}))
    return path


def test_algorithm_and_environments_are_loaded_from_checkpoint(checkpoint):
    model = load_algorithm(checkpoint)
    assert type(model) is PPO
    assert model.env_steps == 32
    assert config_of(checkpoint) is None
    data = load_data(checkpoint)
    assert data.observation_space == model.observation_space
    assert data.spec.env_id == "CartPole-v1"
    score, observations = play_episodes(model, data, 3)
    assert (score.episodes, score.deterministic) == (3, True)
    assert [x.shape for x in observations] == [(3, 2)] * 8
    again, _ = play_episodes(model, data, 3)
    assert again == score
    assert play_episodes(model, data, 3, seed=1)[1][0].tolist() != observations[0].tolist()


def test_last_and_best_find_newest_checkpoints(checkpoint, in_tmp_path):
    """Paths are returned unchanged, whether or not they exist."""
    assert find_trained("some.ckpt") == Path("some.ckpt")
    for word, where in (("last", {}), ("best", {"config": "ppo/acrobot"})):
        with pytest.raises(ConfigurationError, match=f"ckpt_path='{word}': there is no {word} checkpoint under runs"):
            find_trained(word, **where)
    paths = [
        Path(f"{root}/version_0/checkpoints/{name}.ckpt")
        for root in ("runs/ppo/CartPole-v1", "runs/impala/CartPole-v1", "own")
        for name in ("best-step=32", "last")
    ]
    content = torch.load(checkpoint, weights_only=True)
    content["callbacks"] = {"Best": {"monitor": "val/episode_return", "best_model_path": str(paths[0])}}
    for time, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
        os.utime(path, (time, time))
    assert [find_trained(word) for word in ("best", "last")] == paths[2:4]
    assert [find_trained(word, "ppo/cartpole") for word in ("best", "last")] == paths[:2]
    content = {"data": {"class_path": "Own", "init_args": {"env_id": "x"}}, "model": "PPO"}
    Path("own.yaml").write_text(yaml.safe_dump(content | {"trainer": {"default_root_dir": "own"}}))
    assert find_trained("last", "own.yaml") == paths[5]
    for name, part in (content | {"trainer": {"default_root_dir": "own"}}).items():
        Path(f"parts/{name}.yaml").parent.mkdir(exist_ok=True)
        Path(f"parts/{name}.yaml").write_text(yaml.safe_dump({"class_path": part} if name == "model" else part))
    Path("parts/all.yaml").write_text("{model: model.yaml, data: data.yaml, trainer: trainer.yaml}\n")
    assert find_trained("last", "parts/all.yaml") == paths[5]
    for without in ("{num_envs: 3}", "{class_path: RolloutDataModule, init_args: null}", "RolloutDataModule", "[x]"):
        Path("own.yaml").write_text(f"model: PPO\ndata: {without}\n")
        with pytest.raises(ConfigurationError, match="has no model or no env_id: expected the configuration of a run"):
            find_trained("last", "own.yaml")
    Path("own.yaml").write_text("data: {num_envs: 3}\n")
    with pytest.raises(ConfigurationError, match="has no model or no env_id: expected the configuration of a run"):
        find_trained("last", "own.yaml")


def test_configuration_beside_a_checkpoint_counts_unless_it_is_in_a_run(tmp_path):
    inside, outside = tmp_path / "pulled/config.yaml", tmp_path / "config.yaml"
    inside.parent.mkdir()
    for path in (inside, outside):
        path.write_text("data: {}\n")
    assert config_of(tmp_path / "pulled/model.ckpt") == inside
    assert config_of(tmp_path / "checkpoints/last.ckpt") == outside


def test_run_configuration_has_precedence_over_checkpoint(run, checkpoint, tmp_path):
    path = with_config(run, evaluation={"deterministic": False}, env={"atari": {"frame_skip": 4}})
    try:
        assert config_of(checkpoint) == path
        assert load_data(checkpoint).evaluation == EvaluationConfig(3, deterministic=False)
    finally:
        path.unlink()
    (tmp_path / "other.yaml").write_text("trainer: {}\n")
    with pytest.raises(ConfigurationError, match="has no data: expected the configuration of a run"):
        load_data(checkpoint, tmp_path / "other.yaml")
    (tmp_path / "other.yaml").write_text("data: {env_id: CartPole-v1, num_env: 3}\n")
    with pytest.raises(ConfigurationError, match=r"other\.yaml.*num_env"):
        load_data(checkpoint, tmp_path / "other.yaml")
    (tmp_path / "data.yaml").write_text("env_id: Acrobot-v1\n")
    (tmp_path / "other.yaml").write_text("data: data.yaml\n")
    assert load_data(checkpoint, tmp_path / "other.yaml").spec.env_id == "Acrobot-v1"
    assert load_data(checkpoint, "ppo/acrobot").spec.env_id == "Acrobot-v1"
    with pytest.raises(ConfigurationError, match=r"config='ppo/acrobat' does not exist: expected a file, or the name"):
        load_data(checkpoint, "ppo/acrobat")
    with pytest.raises(ConfigurationError, match=r"config='nowhere\.yaml' does not exist"):
        load_data(checkpoint, "nowhere.yaml")


def test_recorded_episodes_are_not_needed_to_play(run, checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=True)
    content["RecordedEpisodes"] = content.pop("RolloutDataModule")
    torch.save(content, tmp_path / "cloned.ckpt")
    assert load_data(tmp_path / "cloned.ckpt").spec.env_id == "CartPole-v1"
    options = {"env_id": "CartPole-v1", "env": {"wrappers": [PARTIAL]}, "evaluation": {"episodes": 3}}
    config = tmp_path / "config.yaml"
    for name, given in (
        ("lightning_rl.RecordedEpisodes", {"episodes": "gone.pt"}),
        ("RecordedEpisodes", {"episodes": "minari:gone"}),
        ("lightning_rl.RolloutDataModule", {}),
        (f"{OwnData.__module__}.{OwnData.__qualname__}", {"own": 4}),
    ):
        config.write_text(yaml.safe_dump({"data": {"class_path": name, "init_args": options | given}}))
        data = load_data(checkpoint, config)
        assert (data.spec.env_id, data.evaluation.episodes) == ("CartPole-v1", 3)
        assert isinstance(data, OwnData) == ("own" in given)
        assert play_episodes(load_algorithm(checkpoint), data, 1)[0].episodes == 1
    config.write_text(yaml.safe_dump({"data": {"class_path": "nowhere.Data", "init_args": options}}))
    with pytest.raises(ConfigurationError, match=r"^data='nowhere\.Data' cannot be imported"):
        load_data(checkpoint, config)


def test_unknown_algorithm_or_environment_is_reported(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=True)
    content["lightning_rl"]["algorithm"] = "Mine"
    del content["RolloutDataModule"]
    torch.save(content, tmp_path / "mine.ckpt")
    with pytest.raises(ConfigurationError, match="is of the class 'Mine', which is not in lightning_rl"):
        load_algorithm(tmp_path / "mine.ckpt")
    with pytest.raises(ConfigurationError, match=r"the environment of .* is unknown"):
        load_data(tmp_path / "mine.ckpt")


def test_hub_folder_has_checkpoint_configuration_score_and_card(run, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "cp1252")  # as on Windows
    config = with_config(run)
    try:
        folder = make_hub_folder(tmp_path / "hub", checkpoint, SCORE, "CartPole-v1", repo_id="me/cart")
    finally:
        text = config.read_text()
        config.unlink()
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert (folder / "model.ckpt").read_bytes() == checkpoint.read_bytes()
    assert (folder / "config.yaml").read_text() == text
    facts = json.loads((folder / "score.json").read_text())
    expected = {"algorithm": "PPO", "env_id": "CartPole-v1", "env_steps": 32, "version": __version__}
    assert facts == {**expected, "score": asdict(SCORE)}
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert card.data.library_name == "lightning-rl"
    assert {"reinforcement-learning", "CartPole-v1"} <= set(card.data.tags)
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_value) == ("CartPole-v1", "123.46 +/- 7.00")
    assert "standard deviation of 4 episodes, the mode of the policy" in card.text and "123.46 ± 7.00" in card.text
    # In the current folder, the files would replace a README.md and config.yaml of another project.
    assert "lightning-rl pull me/cart --folder cart\n" in card.text
    assert "lightning-rl test --config cart/config.yaml --ckpt_path cart/model.ckpt\n" in card.text
    assert 'have imported or trust: `load_algorithm(path, trust=["my_package"])`' in card.text
    assert (
        "`--config` trusts `config.yaml`: all classes in it are imported and constructed, so read it first" in card.text
    )
    with pytest.raises(ConfigurationError, match="expected a new or an empty folder"):
        make_hub_folder(folder, checkpoint, SCORE, "CartPole-v1")
    bare = make_hub_folder(tmp_path / "bare", checkpoint, SCORE, "CartPole-v1")
    assert not (bare / "config.yaml").exists()
    assert "lightning-rl test" not in (bare / "README.md").read_text()


def test_push_uploads_and_pull_downloads_repository(checkpoint, tmp_path, monkeypatch, capsys):
    sent = {}

    def create_repo(self, repo_id, **options):
        sent["created"] = (repo_id, options)

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        sent["files"] = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        sent["commit"] = (repo_id, commit_message)
        return "https://hub/me/cart/commit/1"

    def snapshot_download(repo_id, *, revision, local_dir, allow_patterns):
        sent["asked"] = (repo_id, revision, set(allow_patterns))
        local_dir = local_dir or tmp_path / "cache"
        Path(local_dir).mkdir()
        for name, content in sent["files"].items():
            Path(local_dir, name).write_bytes(content)
        return local_dir

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    main(["push", "me/cart", "--ckpt_path", str(checkpoint), "--episodes=2", "--private=true"])
    assert sent["created"] == ("me/cart", {"private": True, "exist_ok": True})
    assert sent["commit"] == ("me/cart", "PPO after 32 environment steps")
    assert json.loads(sent["files"]["score.json"])["score"]["episodes"] == 2
    folder = tmp_path / "pulled"
    main(["pull", "me/cart", "--revision=main", f"--folder={folder}"])
    assert sent["asked"] == ("me/cart", "main", set(FILES))
    printed = capsys.readouterr().out
    assert "Done: https://hub/me/cart/commit/1" in printed
    assert str(folder / "model.ckpt") in printed
    assert load_algorithm(folder / "model.ckpt").env_steps == 32

    # The script in the documentation.
    monkeypatch.chdir(tmp_path)
    Path("cartpole.ckpt").write_bytes(checkpoint.read_bytes())
    namespace: dict = {}
    (script,) = re.findall(r"^```python\n(.*?)^```$", SHARING.read_text(), re.MULTILINE | re.DOTALL)
    exec(script, namespace)
    assert sent["created"] == ("me/ppo-cartpole", {"private": False, "exist_ok": True})
    assert namespace["model"].env_steps == 32

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigurationError, match="expected `hf auth login`, or a token in HF_TOKEN"):
        push_to_hub("me/cart", checkpoint)

    def unreachable(*args, **options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigurationError, match="repo_id='me/cart': LocalEntryNotFoundError: no connection"):
        pull_from_hub("me/cart")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: tmp_path)
    with pytest.raises(ConfigurationError, match=r"repo_id='me/cart' is not valid: expected a repository with a model"):
        pull_from_hub("me/cart")


def test_command_errors_are_one_line(capsys, monkeypatch, in_tmp_path):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    for command in (["push", "me/cart"], ["export"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--ckpt_path=nowhere.ckpt"])
        assert ended.value.code == 1
        assert capsys.readouterr().err.splitlines() == [
            "lightning-rl: error: ckpt_path='nowhere.ckpt' does not exist: expected a checkpoint of lightning_rl"
        ]
    with pytest.raises(SystemExit) as ended:
        main(["export", "--ckpt_path=nowhere.ckpt", "--episods=3"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "lightning-rl: error: episods=3 is no option; did you mean episodes?",
        "All options: lightning-rl export --help",
    ]
    assert Path.cwd() == in_tmp_path
    for command in (["push", "me/cart"], ["export", "--ckpt_path=last"]):  # `last` is the default
        with pytest.raises(SystemExit):
            main([*command, "--config=ppo/cartpole"])
        assert "there is no last checkpoint under runs/ppo/CartPole-v1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "push"])
def test_configuration_of_another_environment_is_refused(command, checkpoint, monkeypatch, capsys, in_tmp_path):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    arguments = ["push", "me/cart"] if command == "push" else ["export", "--format=torch_export"]
    with pytest.raises(SystemExit):
        main([*arguments, f"--ckpt_path={checkpoint}", "--config=ppo/acrobot"])
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("lightning-rl: error: observation_space=Box(")
    assert " of Acrobot-v1 does not fit: expected Box(" in error


def test_export_folder_is_checked_before_playing_episodes(capsys, monkeypatch, in_tmp_path):
    data = make_data()
    trainer = make_trainer(max_epochs=1)
    trainer.fit(make_model(data), data)
    trainer.save_checkpoint("some.ckpt")
    export = ["export", "--ckpt_path=some.ckpt", "--episodes=1"]
    main([*export, "--format=torch_export", "--output=mine/policy"])
    main([*export, "--format=torch_export", "--output=mine/policy"])  # replaces the first export
    (in_tmp_path / "file").touch()
    (in_tmp_path / "other").mkdir()
    monkeypatch.setattr("lightning_rl.tools.trained.play_episodes", None)
    capsys.readouterr()
    default = in_tmp_path / "policies" / f"onnx-step={load_algorithm('some.ckpt').env_steps}"
    default.mkdir(parents=True)
    with pytest.raises(SystemExit):
        main([*export, "--format=onnx"])
    assert f"output='{default}' is not valid: expected a new folder" in capsys.readouterr().err
    for output, message in (
        ("other", "output='other' is not valid: expected a new folder, or one of an earlier export"),
        (
            "mine/policy",
            r"output='mine/policy' .* a new folder: .* has greedy\.pt2, sampled\.pt2, which would be deleted",
        ),
    ):
        with pytest.raises(SystemExit):
            main([*export, "--format=onnx", f"--output={output}"])
        assert re.match(f"lightning-rl: error: {message}", capsys.readouterr().err)
    with pytest.raises(SystemExit):
        main([*export, "--format=torch_export", "--programs=greedy", "--output=mine/policy"])
    assert "an earlier export in it has sampled.pt2, which would be deleted" in capsys.readouterr().err
    assert sorted(path.name for path in (in_tmp_path / "mine").iterdir()) == ["policy"]
    names = ["greedy.pt2", "policy.json", "sampled.pt2"]
    assert sorted(path.name for path in (in_tmp_path / "mine/policy").iterdir()) == names
