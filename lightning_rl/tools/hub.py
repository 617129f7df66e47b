"""Shares checkpoints on the Hugging Face Hub, with configuration, score and model card."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]

from lightning_rl import __version__
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, read_checkpoint
from lightning_rl.checkpointing.run_folders import CONFIG
from lightning_rl.tools.trained import Score, config_file, config_of, load_trained, play_episodes
from lightning_rl.validation import ConfigurationError, check, check_installed

CHECKPOINT = "model.ckpt"
SCORE = "score.json"
CARD = "README.md"
FILES = (CHECKPOINT, CONFIG, SCORE, CARD)
"""Files in a repository. The configuration is missing if the run had none."""


def make_hub_folder(
    folder: str | Path,
    ckpt_path: str | Path,
    score: Score,
    env_id: str,
    *,
    config: str | Path | None = None,
    repo_id: str = "OWNER/NAME",
) -> Path:
    """Write the files of a repository (`FILES`) into a new or empty folder and return it; nothing is uploaded.

    `score` belongs to `env_id`. `config` is by default the configuration in the folder of the run, and `repo_id` is the
    name in the model card. A folder with files, or an invalid checkpoint, raises a `ConfigurationError`.
    """
    hub = _huggingface_hub()
    folder = Path(folder)
    check(not folder.exists() or not any(folder.iterdir()), "folder", str(folder), "a new or an empty folder")
    state = read_checkpoint(ckpt_path, "ckpt_path")[CHECKPOINT_KEY]
    config = config_of(ckpt_path) if config is None else config_file(config)
    facts = {
        "algorithm": state["algorithm"],
        "env_id": env_id,
        "env_steps": state["env_steps"],
        "version": state["version"],
        "score": asdict(score),
    }
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ckpt_path, folder / CHECKPOINT)
    if config is not None:
        shutil.copyfile(config, folder / CONFIG)
    (folder / SCORE).write_text(json.dumps(facts, indent=2) + "\n")
    (folder / CARD).write_text(_card(hub, facts, score, repo_id, config is not None), encoding="utf-8")
    return folder


def push_to_hub(
    repo_id: str,
    ckpt_path: str | Path = "last",
    *,
    config: str | Path | None = None,
    episodes: int = 10,
    private: bool = False,
    message: str | None = None,
    trust: str | Sequence[str] | None = None,
) -> str:
    """Play test episodes, upload the checkpoint with its score to the Hub, and return the address of the commit.

    Log in with `hf auth login` first. Everything in a given `config` is trusted, so read it first. Classes in the
    checkpoint, and in a configuration beside it, are trusted as in `lightning_rl.tools.trained.load_algorithm`.

    Args:
        repo_id: The repository, owner/name; created if it does not exist.
        ckpt_path: The checkpoint: a file, or 'last' for the newest one or 'best' for the best one of the newest run;
            with a `config`, of its algorithm and environment.
        config: Configuration of the run; by default the one in its folder, if there is one.
        episodes: Episodes to play for the score.
        private: Whether a new repository is private.
        message: Message of the commit; by default with the environment steps of the policy.
        trust: Packages, one or several as [a, b], whose modules checkpoint and configuration may name.

    Raises:
        ConfigurationError: The file is not a checkpoint of this package, its environment is unknown, a class in it is
            not trusted, or the Hub refuses the upload.
    """
    hub = _huggingface_hub()
    if hub.get_token() is None:  # before episodes are played
        raise ConfigurationError("not logged in to the Hub: expected `hf auth login`, or a token in HF_TOKEN")
    ckpt_path, model, data = load_trained(ckpt_path, config, trust)
    score, _ = play_episodes(model, data, episodes)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "repository"
        make_hub_folder(folder, ckpt_path, score, data.spec.env_id, config=config, repo_id=repo_id)
        api = hub.HfApi(library_name="lightning-rl", library_version=__version__)
        rank_zero_info(f"Uploading {ckpt_path}")
        message = message or f"{type(model).__name__} after {model.env_steps} environment steps"
        with _hub_errors(repo_id):
            api.create_repo(repo_id, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message))


def pull_from_hub(repo_id: str, *, revision: str | None = None, folder: str | Path | None = None) -> Path:
    """Download a repository and return the path of its checkpoint, beside the other files.

    Args:
        repo_id: The repository, owner/name.
        revision: A branch, tag or commit; by default the newest.
        folder: Folder for the files; by default the cache of the Hub.

    Raises:
        ConfigurationError: The download fails, or there is no checkpoint of this package in the repository.
    """
    hub = _huggingface_hub()
    with _hub_errors(repo_id):
        found = hub.snapshot_download(repo_id, revision=revision, local_dir=folder, allow_patterns=list(FILES))
    path = Path(found) / CHECKPOINT
    check(path.is_file(), "repo_id", repo_id, f"a repository with a {CHECKPOINT}")
    read_checkpoint(path, "repo_id")
    return path


@contextlib.contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Turn the errors of all libraries behind the Hub's client into one `ConfigurationError`."""
    try:
        yield
    except Exception as error:
        raise ConfigurationError(f"repo_id={repo_id!r}: {type(error).__name__}: {error}") from error


def _card(hub: ModuleType, facts: dict[str, Any], score: Score, repo_id: str, has_config: bool) -> str:
    result = hub.EvalResult(
        task_type="reinforcement-learning",
        task_name="reinforcement-learning",
        dataset_name=facts["env_id"],
        dataset_type=facts["env_id"],
        metric_type="mean_reward",
        metric_name="mean_reward",
        metric_value=f"{score.mean:.2f} +/- {score.std:.2f}",
    )
    data = hub.ModelCardData(
        library_name="lightning-rl",
        tags=["reinforcement-learning", "deep-reinforcement-learning", "pytorch-lightning", facts["env_id"]],
        model_name=repo_id,
        eval_results=[result],
    )
    actions = "the mode of the policy" if score.deterministic else "samples of the policy"
    folder = repo_id.rpartition("/")[2]
    shell = ""
    if has_config:
        shell = (
            f"\n```bash\nlightning-rl pull {repo_id} --folder {folder}\n"
            f"lightning-rl test --config {folder}/{CONFIG} --ckpt_path {folder}/{CHECKPOINT}\n```\n\n"
            f"`--config` trusts `{CONFIG}`: all classes in it are imported and constructed, so read it first.\n"
        )
    return f"""---
{data.to_yaml()}
---

# {facts["algorithm"]} in {facts["env_id"]}

| | |
|---|---|
| return | {score.mean:.2f} ± {score.std:.2f} (standard deviation of {score.episodes} episodes, {actions}) |
| environment steps | {facts["env_steps"]:,} |
| lightning-rl | {facts["version"]} |

```python
from lightning_rl import load_algorithm
from lightning_rl.tools.hub import pull_from_hub

model = load_algorithm(pull_from_hub("{repo_id}"))
action = model.act(observation)
```

`load_algorithm` unpickles nothing. It constructs a class that the checkpoint names only if it is a subclass of the
class that its field expects. It imports modules only from `lightning_rl`, `torch`, `gymnasium` and packages that you
have imported or trust: `load_algorithm(path, trust=["my_package"])`.
{shell}"""


def _huggingface_hub() -> ModuleType:
    check_installed("the Hub", "hub", "huggingface_hub")
    return importlib.import_module("huggingface_hub")
