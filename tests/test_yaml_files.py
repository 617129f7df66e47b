"""Untrusted YAML files: plain data, or one short error from every command that reads them."""

import contextlib
import io
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from jsonargparse import get_loader

from lightning_rl.cli.main import main
from lightning_rl.files import read_yaml
from lightning_rl.tools.trained import load_data
from lightning_rl.validation import ConfigurationError
from tests.helpers import make_data, make_model, make_trainer

BAD = {
    "object": (
        "data: !!python/object/apply:os.system [touch pwned]\n",
        "could not determine a constructor for the tag",
    ),
    "name": ("data: !!python/name:os.system\n", "could not determine a constructor for the tag"),
    "depth": ("[\n" * 3000, "recursion"),  # torch.compile raises Python's limit to 2000
    "number": ("data: 0x_\n", "invalid literal for int"),
    "bytes": (b"data: \xff\xfe\n", "can't decode byte"),
    "control": ("data: \x00\n", "special characters are not allowed"),
    "documents": ("a: 1\n---\nb: 1\n", "expected a single document"),
    "twice": ("data:\n  env_id: a\n  env_id: b\n", "the key 'env_id' occurs twice .*line 3"),
    "syntax": ("data: [1\n", "did not find expected|expected ',' or ']'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_commands_report_bad_yaml_in_one_short_error(kind, in_tmp_path, monkeypatch):
    text, expected = BAD[kind]
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    config = in_tmp_path / "config.yaml"
    config.write_bytes(text if isinstance(text, bytes) else text.encode())
    (in_tmp_path / "metrics.csv").write_text("step,x\n1,2\n")
    data = make_data()
    trainer = make_trainer(limit_train_batches=1)
    trainer.fit(make_model(data), data)
    trainer.save_checkpoint("x.ckpt")
    for command in (
        ["plot", "."],
        ["export", "--ckpt_path=x.ckpt", "--format=torch_export"],
        ["push", "me/x", "--ckpt_path=x.ckpt"],
        ["export", "--ckpt_path=last", "--config=config.yaml"],
    ):
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as ended:
            main(command)
        (line,) = printed.getvalue().splitlines()
        assert ended.value.code == 1
        assert line.startswith("lightning-rl: error: config=") and len(line) < 400, line
        with pytest.raises(ConfigurationError, match=expected):
            read_yaml(config, "config")
    assert not Path("pwned").exists()


def test_run_configuration_is_read(tmp_path):
    shared = {"frame_skip": 4}
    content = {"data": {"env": {"atari": shared, "kwargs": shared}, "seeds": [1, 2.5, None, True, "x"]}, "more": {}}
    text = yaml.safe_dump(content)
    assert "&id001" in text  # with aliases
    (tmp_path / "config.yaml").write_text(text)
    assert read_yaml(tmp_path / "config.yaml", "config") == content
    (tmp_path / "config.yaml").write_text("")
    assert read_yaml(tmp_path / "config.yaml", "config") is None


def test_configuration_of_the_user_has_the_same_numbers_in_every_command(tmp_path):
    config = tmp_path / "config.yaml"
    env = "env: {reward_clip: 1e-1, kwargs: {sutton_barto_reward: 1.5e1}}"
    config.write_text(f"model: PPO\nmax_env_steps: 1e2\ndata: {{env_id: CartPole-v1, rollout_length: 16, {env}}}\n")
    specs = [load_data("any.ckpt", config).spec]
    specs.append(main(["fit", f"--config={config}", "--trainer.fast_dev_run=1"]).datamodule.spec)
    for spec in specs:
        assert (spec.env.reward_clip, spec.env.kwargs) == (0.1, {"sutton_barto_reward": 15.0})
    config.write_text("[1e3, 1.5E3, -1_0e-1, 1e3x, '1e3', e3]")
    assert read_yaml(config, "config") == [1000.0, 1500.0, -1.0, "1e3x", "1e3", "e3"]
    for text in (
        "None",
        "null",
        "'None'",
        "Nones",
        "2026-01-31",
        "2001-99-99",
        "{start: 2026-01-31 12:00:00, end: None}",
        "1:30",
    ):
        config.write_text(text)
        assert read_yaml(config, "config") == get_loader("yaml_with_none")(text)
