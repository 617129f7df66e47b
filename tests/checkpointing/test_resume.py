"""A stopped and resumed run ends bit for bit like an uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rl import (
    A2C,
    CLEAR,
    IMPALA,
    MAPPO,
    PPG,
    PPO,
    RND,
    VMPO,
    Batch,
    CriticPretraining,
    EnvStepLimit,
    OffPolicyPPG,
    OnPolicyAlgorithm,
    PPOKLPenalty,
    RolloutDataModule,
    TFAgentsPPO,
)
from lightning_rl.environments.contract import TRAINING, derive_seed
from lightning_rl.rollouts.replay import UseLimitedBuffer
from lightning_rl.spaces import space_to_dict
from tests import programs
from tests.helpers import MemoryLogger, make_data, make_model, make_trainer, merged, needs_box2d
from tests.mask_probes import kwargs_of
from tests.nested_probes import PAIR

pytestmark = pytest.mark.usefixtures("in_tmp_path")

# Environment 1 fails in the second step of its second episode: in the first of the rollouts.
_FAILS = derive_seed(derive_seed(3, TRAINING, 0, 1, 0), 1)
FRAGILE: dict[str, Any] = {
    "env_id": "tests.probes:Probe/Fragile-v0",
    "env": {"kwargs": {"episode_seed": _FAILS}, "on_failure": "restart"},
}

HYBRID = space_to_dict(
    spaces.Dict(
        {
            "move": spaces.Discrete(3, start=-1),
            "arm": spaces.Tuple([spaces.Box(-2, 2, (2,)), spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(2)]),
        }
    )
)


class WithDiscriminator(PPO):
    """A network outside of the policy with a separate optimizer and loss, as docs/custom.md describes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.discriminator = torch.nn.Linear(4, 1)

    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), torch.optim.Adam(self.discriminator.parameters(), lr=1e-2)]

    def update(self, rollout: Any) -> None:
        rows = rollout.observations[1:].flatten(0, 1)
        drawn = torch.randint(len(rows), (16,), generator=self.generator)
        self.descend(self.discriminator_loss, Batch({"agent": rows[drawn]}))
        with torch.no_grad():
            rollout.rewards = self.discriminator(rollout.observations[1:]).squeeze(-1)
        super().update(rollout)

    def discriminator_loss(self, batch: Batch) -> Any:
        loss = self.new_loss(batch)
        loss.add("discriminator_loss", torch.nn.functional.softplus(self.discriminator(batch.agent)).squeeze(-1))
        return loss


RELAY_OF_THREE = {"state": "joint", "seeded": True, "lives": (2, 9, 5), "sizes": (3, 2, 4), "choices": (5, 3, 4)}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "discrete": ({"env_id": "CartPole-v1"}, {"optimizer": {"anneal": True}}),
    "continuous": ({"env_id": "Pendulum-v1"}, {"normalization": {"observations": True, "rewards": True}}),
    "discriminator": ({"env_id": "CartPole-v1"}, {"algorithm": WithDiscriminator}),
    "scheduler": (
        {"env_id": "Acrobot-v1", "env": {"max_episode_steps": 50}},
        {
            "optimizer": {
                "name": "torch.optim.RMSprop",
                "options": {"momentum": 0.5},
                "scheduler": {"name": "torch.optim.lr_scheduler.ExponentialLR", "options": {"gamma": 0.9}},
            },
        },
    ),
    "schedules_and_two_optimizers": (
        {"env_id": "CartPole-v1"},
        {
            "learning_rate": {"kind": "cosine", "start": 1e-2, "end": 1e-3},
            "clip_range": {"kind": "piecewise", "points": [[0, 0.3], [300, 0.1]], "interpolate": True},
            "optimizer": {
                "critic": {"name": "torch.optim.RMSprop", "options": {"momentum": 0.5}},
                "groups": {"*.bias": {"learning_rate_scale": 2.0}},
                "num_value_epochs": 5,
            },
        },
    ),
    "adaptive": (
        {"env_id": "CartPole-v1"},
        {
            "optimizer": {"adaptive_learning_rate": {"target_kl": 0.01}},
            "clipping": {"rollback": True},
            "target_kl": 0.02,
        },
    ),
    "popart": (
        {"env_id": "Pendulum-v1"},
        {"normalization": {"values": "popart"}, "advantages": {"recompute_advantages": True}},
    ),
    "toy_text": ({"env_id": "FrozenLake-v1"}, {}),
    "box2d": ({"env_id": "LunarLander-v3"}, {"target_kl": 0.001}),
    "mujoco": ({"env_id": "Hopper-v5"}, {"normalization": {"rewards": True}}),
    "minigrid": (
        {"env_id": "MiniGrid-Empty-5x5-v0", "env": {"wrappers": ["minigrid.wrappers.ImgObsWrapper"]}},
        {"num_epochs": 1},
    ),
    "lives": ({"env_id": "ALE/Breakout-v5", "num_envs": 2}, {"num_epochs": 1}),
    "workers": ({"env_id": "CartPole-v1", "backend": "async", "num_envs": 2}, {}),
    "native": ({"env_id": "CartPole-v1", "backend": "native"}, {}),
    "a2c": ({"env_id": "CartPole-v1"}, {"algorithm": A2C, "advantages": {"normalize": "rollout"}}),
    "vmpo": ({"env_id": "CartPole-v1"}, {"algorithm": VMPO, "num_minibatches": 2, "learning_rate": 1e-2}),
    "rnd": ({"env_id": "CartPole-v1"}, {"algorithm": RND}),
    "rnd_memory": (
        {"env_id": "CartPole-v1"},
        {
            "algorithm": RND,
            "policy": {"memory": {"kind": "gru", "hidden_size": 6, "sequence_length": 8}},
            "num_minibatches": 3,
        },
    ),
    "mappo": (
        {
            "env_id": "PettingZoo/tests.environments.test_pettingzoo",
            "backend": "native",
            "env": {"kwargs": RELAY_OF_THREE},
            "evaluation": {"episodes": 3},
        },
        {"algorithm": MAPPO, "share_policy": False, "normalization": {"observations": True, "values": "popart"}},
    ),
    # Stopped after three rollouts at the end of a phase, after four in the next one.
    "ppg": (
        {"env_id": "CartPole-v1"},
        {"algorithm": PPG, "num_policy_iterations": 3, "num_aux_epochs": 2, "optimizer": {"anneal": True}},
    ),
    "ppg_sequences": (
        {"env_id": "CartPole-v1"},
        {
            "algorithm": PPG,
            "num_policy_iterations": 3,
            "num_minibatches": 3,
            "policy": {"memory": {"kind": "gru", "hidden_size": 8, "sequence_length": 8, "burn_in": 5}},
        },
    ),
    "ppg_off_policy": (
        {"env_id": "Pendulum-v1"},
        {
            "algorithm": OffPolicyPPG,
            "num_policy_iterations": 5,
            "updates_per_rollout": 2,
            "batch_size": 32,
            "policy_buffer_size": 100,
            "policy_max_use": 2,
            "normalization": {"observations": True, "rewards": True},
        },
    ),
    "impala": (
        {"env_id": "CartPole-v1"},
        {"algorithm": IMPALA, "reward_scale": 0.5, "normalization": {"observations": True}},
    ),
    # The replay is full after four rollouts.
    "clear": (
        {"env_id": "CartPole-v1"},
        {"algorithm": CLEAR, "replay_ratio": 2 / 3, "replay_memory_gib": 1.5e-5, "normalization": {"rewards": True}},
    ),
    "critic_pretraining": (
        {"env_id": "Pendulum-v1"},
        {"algorithm": CriticPretraining, "target": "vtrace", "replay_ratio": 1.0},
    ),
    # The run stops near the end of the warm-up.
    "critic_warmup": ({"env_id": "CartPole-v1"}, {"optimizer": {"critic_warmup_steps": 217}}),
    "learned_repeat": (
        {"env_id": "CartPole-v1", "env": {"learned_action_repeat": {"max": 3, "gamma": 0.99}, "previous_action": True}},
        {"algorithm": CLEAR},
    ),
    "clear_with_memory": (
        {"env_id": "Pendulum-v1", "env": {"max_episode_steps": 31}},
        {
            "algorithm": CLEAR,
            "replay_policy": "fifo",
            "replay_memory_gib": 1e-4,
            "policy": {"memory": {"kind": "gru", "hidden_size": 8, "sequence_length": 8, "burn_in": 5}},
        },
    ),
    "kl_penalty": (
        {"env_id": "CartPole-v1"},
        {
            "algorithm": PPOKLPenalty,
            "adaptive_kl_target": 1e-4,
            "kl_cutoff_coef": 10.0,
            "normalization": {"rewards": "reward_std"},
        },
    ),
    "tf_agents": (
        {"env_id": "Pendulum-v1"},
        {
            "algorithm": TFAgentsPPO,
            "num_epochs": 2,
            "normalization": {"update": "before"},
            "advantages": {"recompute_values": True},
        },
    ),
    "nested_actions": (
        # Rollouts end in the middle of the episodes, which have eight steps.
        {
            "env_id": "tests.probes:Probe/Aim-v0",
            "env": {"kwargs": {"action_space": HYBRID}},
            "num_envs": 4,
            "rollout_length": 23,
        },
        {"policy": {"action_distribution": {"arm.0": "beta"}}},
    ),
    "squashed": (
        {"env_id": "Pendulum-v1", "backend": "async"},
        {"policy": {"action_distribution": "squashed_gaussian"}},
    ),
    "dict_with_image": (
        {"env_id": "tests.nested_probes:Probe/Puzzle-v0"},
        {"normalization": {"observations": True}, "policy": {"critic_only": ["answer"]}, "num_epochs": 1},
    ),
    "tuple": (
        {"env_id": "tests.probes:Probe/Space-v0", "env": {"kwargs": {"observation_space": PAIR}}, "backend": "async"},
        {
            "policy": {"network": "mlp", "discrete_encoding": "embedding"},
            "normalization": {"observations": True},
            "num_epochs": 1,
        },
    ),
    "wrapper_options": (
        {
            "env_id": "Pendulum-v1",
            "env": {
                "max_episode_steps": 31,
                "action_repeat": 2,
                "reward_scale": 0.5,
                "reward_clip": "soft_asymmetric",
                "frame_stack": 3,
                "flatten_observations": True,
                "previous_action": True,
                "previous_reward": True,
            },
        },
        {"normalization": {"observations": True}},
    ),
    "previous_nested_action": (
        {
            "env_id": "tests.probes:Probe/Aim-v0",
            "env": {"kwargs": {"action_space": HYBRID}, "previous_action": True, "previous_reward": True},
            "num_envs": 4,
            "rollout_length": 23,
            "backend": "async",
        },
        {"num_epochs": 1},
    ),
    "masked": (
        # Rollouts end in the middle of the episodes, which have three steps.
        {
            "env_id": "tests.mask_probes:Probe/Invalid-v0",
            "env": {"kwargs": kwargs_of("hybrid"), "action_mask": "info.action_mask"},
            "num_envs": 4,
            "rollout_length": 25,
        },
        {"num_epochs": 1},
    ),
    "conditional_masks": (
        {
            "env_id": "tests.mask_probes:Probe/Invalid-v0",
            "env": {
                "kwargs": kwargs_of("pair", conditional=True, where="method"),
                "action_mask": "method.action_masks",
            },
            "num_envs": 4,
            "rollout_length": 25,
            "backend": "async",
        },
        {"policy": {"action_distribution": "autoregressive"}},
    ),
    "restarts": (FRAGILE, {"normalization": {"rewards": True}}),
    "memory": ({"env_id": "CartPole-v1"}, {"policy": {"memory": "lstm", "shared_encoder": True}, "num_minibatches": 3}),
    "mingru": ({"env_id": "CartPole-v1"}, {"policy": {"memory": "mingru"}, "num_minibatches": 3}),
    "gtrxl": (
        {"env_id": "CartPole-v1"},
        {"policy": {"memory": {"kind": "gtrxl", "hidden_size": 8, "context_length": 6}}, "num_minibatches": 3},
    ),
    "memory_of_each": (
        {"env_id": "tests.probes:Probe/Random-v0", "env": {"on_failure": "restart"}},
        {
            "policy": {"memory": {"kind": "gru", "hidden_size": 8, "sequence_length": 8, "burn_in": 5}},
            "normalization": {"observations": True},
            "num_minibatches": 3,
        },
    ),
    "restarted_workers": (FRAGILE | {"backend": "async"}, {}),
}

_LONG_EPISODES = ("ALE/Breakout-v5", "Hopper-v5", "LunarLander-v3")


def fit(
    name: str,
    folder: Path,
    rollouts: int,
    ckpt_path: str | None = None,
    data: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    save_after: tuple[int, ...] = (),
    **trainer: Any,
) -> OnPolicyAlgorithm:
    """Train for a number of rollouts, three to an epoch, with a validation and a checkpoint after each epoch.

    There are more checkpoints at the end and in `save_after`. `data`, `model` and `trainer` replace options
    of the setting.
    """
    data, model = SETTINGS[name][0] | (data or {}), SETTINGS[name][1] | (model or {})
    return _fit(folder, rollouts, ckpt_path, data, model, save_after, trainer)


def _fit(
    folder: Path,
    rollouts: int,
    ckpt_path: str | None,
    data_options: dict[str, Any],
    model_options: dict[str, Any],
    save_after: tuple[int, ...],
    trainer: dict[str, Any],
) -> OnPolicyAlgorithm:
    seed_everything(3, verbose=False)
    small = {"num_envs": 3, "rollout_length": 24, "rollouts_per_epoch": 3, "evaluation": {"episodes": 1}}
    data = RolloutDataModule(**small | data_options)
    options = merged({"algorithm": PPO, "policy": {"hidden_sizes": (8,)}}, model_options)
    algorithm: type[OnPolicyAlgorithm] = options.pop("algorithm")
    model = algorithm(data.observation_space, data.action_space, **options)
    # All parts of a run have the same max_epochs, the horizon of annealing.
    trainer = {
        "max_epochs": 4,
        "max_steps": -1,
        "callbacks": [_StopAfter(rollouts, save_after), ModelCheckpoint(folder, save_last=True)],
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0 if data_options["env_id"] in _LONG_EPISODES else 1,
        "log_every_n_steps": 4,
    } | trainer
    fitted = Trainer(**trainer)
    fitted.fit(model, data, ckpt_path=ckpt_path)
    fitted.save_checkpoint(folder / "end.ckpt")
    return model


class _StopAfter(ModelCheckpoint):
    """Saves a checkpoint after some rollouts, and stops after the last of them, also within an epoch."""

    def __init__(self, rollouts: int, save_after: tuple[int, ...]) -> None:
        super().__init__(save_top_k=0)
        self.rollouts = rollouts
        self.save_after = save_after

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = pl_module.policy_version
        if done in (*self.save_after, self.rollouts):
            trainer.save_checkpoint(Path(trainer.checkpoint_callbacks[1].dirpath) / f"after_{done}.ckpt")
        trainer.should_stop |= done == self.rollouts


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the paths at which two nested structures differ in any bit."""
    if isinstance(one, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return [d for key in keys for d in differences(one.get(key), other.get(key), f"{path}.{key}")]
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=True)
        return [d for index, (a, b) in enumerate(pairs) for d in differences(a, b, f"{path}.{index}")]
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [path]


def run_state(path: Path) -> dict[str, Any]:
    """Return the parts of a checkpoint that must be equal: all except Lightning's callbacks and times."""
    checkpoint = torch.load(path, weights_only=True)
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "lightning_rl", "RolloutDataModule", "global_step")
    state = {key: checkpoint[key] for key in kept}
    state["RolloutDataModule"] = {**state["RolloutDataModule"], "starts": None}
    for rank in state["lightning_rl"]["ranks"]:
        for name, mean in rank["window"]["means"].items():
            if name.startswith("time/"):  # times differ, their number does not
                mean[0] = 0.0
    return state


def assert_resumes_from(places: tuple[int, ...], name: str, rollouts: int, folder: Path, **options: Any) -> None:
    """Check that several checkpoints of a run lead to the same end."""
    fit(name, folder / "whole", rollouts, save_after=places, **options)
    whole = run_state(folder / f"whole/after_{rollouts}.ckpt")
    for saved in places:
        part = folder / f"from_{saved}"
        resumed = fit(name, part, rollouts, ckpt_path=str(folder / f"whole/after_{saved}.ckpt"), **options)
        assert resumed.policy_version == rollouts
        assert differences(whole, run_state(part / f"after_{rollouts}.ckpt")) == [], f"from {saved}"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[needs_box2d] * (name == "box2d")) for name in SETTINGS])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(name: str, tmp_path: Path) -> None:
    """The run resumes from the end of an epoch and from the middle of the next one."""
    assert_resumes_from((3, 4), name, 6, tmp_path)


@pytest.mark.parametrize("name", ["ppg", "ppg_off_policy"])
def test_run_resumes_from_every_rollout_of_a_phase(name: str, tmp_path: Path) -> None:
    assert_resumes_from((1, 2, 5), name, 8, tmp_path)


@pytest.mark.parametrize("name", ["discrete", "continuous", "a2c", "restarts", "ppg"])
def test_resumed_run_logs_same_values_as_uninterrupted_run(name: str, tmp_path: Path) -> None:
    """All values except times are equal; the run stops within a logging interval of four rollouts."""
    logs = {part: MemoryLogger() for part in ("whole", "first", "second")}
    fit(name, tmp_path / "whole", 8, logger=logs["whole"])
    fit(name, tmp_path / "first", 6, logger=logs["first"])
    fit(name, tmp_path / "second", 8, str(tmp_path / "first/after_6.ckpt"), logger=logs["second"])

    def rows(part: str) -> list[tuple[int | None, dict[str, float]]]:
        calls = [(step, {k: v for k, v in row.items() if not k.startswith("time/")}) for row, step in logs[part].calls]
        return [(step, row) for step, row in calls if row]

    steps = [step for step, _ in rows("whole")]
    assert steps == sorted(steps) and len(rows("second")) >= 2
    assert rows("whole") == rows("first")[: len(rows("whole")) - len(rows("second"))] + rows("second")


def test_stopped_run_differs_from_uninterrupted_run(tmp_path: Path) -> None:
    fit("discrete", tmp_path / "whole", 8)
    fit("discrete", tmp_path / "first", 4)
    assert differences(run_state(tmp_path / "whole/after_8.ckpt"), run_state(tmp_path / "first/after_4.ckpt"))


def test_run_with_restarted_environment_resumes_exactly(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"^environment 1 \(episode 1, seed \d+, step 2\) raised in step"):
        model = fit("restarts", tmp_path, 1)
    assert model.env_steps == 3 * 24 - 1
    state = torch.load(tmp_path / "after_1.ckpt", weights_only=True)
    window = state["lightning_rl"]["ranks"][0]["window"]
    assert window["counts"]["rollout/env_restarts"][0] == 1


def test_wrapper_with_state_across_episodes_is_detected(tmp_path: Path) -> None:
    """The wrapper's observations are restored, its rewards are not."""
    SETTINGS["remembers"] = ({"env_id": "CartPole-v1", "env": {"wrappers": ["gymnasium.wrappers.NormalizeReward"]}}, {})
    try:
        fit("remembers", tmp_path / "first", 2)
        with pytest.warns(UserWarning, match=r"environments 0, 1, 2 of CartPole-v1 .* could not be restored"):
            fit("remembers", tmp_path / "second", 4, ckpt_path=str(tmp_path / "first/after_2.ckpt"))
    finally:
        del SETTINGS["remembers"]


def test_resuming_in_a_new_process_is_exact(tmp_path: Path) -> None:
    fit("continuous", tmp_path / "whole", 8)
    fit("continuous", tmp_path / "first", 4)
    code = (
        "from pathlib import Path; from tests.checkpointing.test_resume import fit; "
        f"fit('continuous', Path({str(tmp_path / 'second')!r}), 8, {str(tmp_path / 'first/after_4.ckpt')!r})"
    )
    assert programs.run("-c", code).returncode == 0
    assert differences(run_state(tmp_path / "whole/after_8.ckpt"), run_state(tmp_path / "second/after_8.ckpt")) == []


@pytest.mark.parametrize(
    ("name", "strategy"), [("continuous", "ddp"), ("discriminator", "ddp_find_unused_parameters_true")]
)
def test_two_ranks_resume_exactly(name: str, strategy: str, tmp_path: Path) -> None:
    """The ranks also keep equal parameters: a resumed run starts with the parameters of rank 0."""

    def run(folder: str, rollouts: int, ckpt_path: str | None = None) -> None:
        ranks = f"devices=2, strategy={strategy!r}"
        code = (
            "from pathlib import Path; from tests.checkpointing.test_resume import fit\n"
            f"fit({name!r}, Path({str(tmp_path / folder)!r}), {rollouts}, {ckpt_path!r}, {ranks})\n"
        )
        programs.run_ranks("-c", code)

    run("whole", 6)
    run("first", 4)
    run("second", 6, str(tmp_path / "first/after_4.ckpt"))
    assert differences(run_state(tmp_path / "whole/after_6.ckpt"), run_state(tmp_path / "second/after_6.ckpt")) == []


def test_resuming_after_validation_at_epoch_end_is_exact(tmp_path: Path) -> None:
    fit("continuous", tmp_path / "whole", 8)
    fit("continuous", tmp_path / "first", 4)  # last.ckpt is from the end of the first epoch, after three rollouts
    fit("continuous", tmp_path / "second", 8, ckpt_path=str(tmp_path / "first/last.ckpt"))
    assert differences(run_state(tmp_path / "whole/after_8.ckpt"), run_state(tmp_path / "second/after_8.ckpt")) == []


def test_unrestorable_environments_warn_and_start_new_episodes(tmp_path: Path) -> None:
    envpool = {"backend": "envpool"}
    fit("discrete", tmp_path / "first", 2, data=envpool)
    with pytest.warns(UserWarning, match=r"environments of CartPole-v1 \(backend 'envpool'\) could not be restored"):
        resumed = fit("discrete", tmp_path / "second", 4, str(tmp_path / "first/after_2.ckpt"), data=envpool)
    assert resumed.policy_version == 4


def test_unrestorable_environments_of_other_ranks_are_named(tmp_path: Path, monkeypatch) -> None:
    fit("discrete", tmp_path / "first", 2)
    monkeypatch.setattr(
        "lightning_rl.data.collector.gather_ranks", lambda fresh: [fresh, [0, 2]] if fresh == [] else [fresh]
    )
    with pytest.warns(UserWarning, match=r"^environments 0, 2 on rank 1 of CartPole-v1 .* could not be restored"):
        fit("discrete", tmp_path / "second", 3, ckpt_path=str(tmp_path / "first/after_2.ckpt"))


def test_all_ranks_take_the_seed_that_a_checkpoint_stores(monkeypatch) -> None:
    """Without a given seed, ranks have different seeds of PyTorch; a checkpoint has only the seed of rank 0."""
    monkeypatch.setattr("lightning_rl.data.datamodule.gather_ranks", lambda seed: [7, seed])
    data = make_data(seed=None)
    make_trainer().fit(make_model(data), data)
    assert data.seed == 7


@needs_box2d
def test_environment_whose_state_survives_reset_is_detected(tmp_path: Path) -> None:
    limit = {"class_path": "gymnasium.wrappers.TimeLimit", "init_args": {"max_episode_steps": 10}}
    walker = {"env_id": "BipedalWalker-v3", "env": {"training_wrappers": [limit]}}
    short = {"data": walker, "limit_val_batches": 0}
    fit("continuous", tmp_path / "first", 2, **short)
    with pytest.warns(UserWarning, match="of BipedalWalker-v3 .* could not be restored"):
        resumed = fit("continuous", tmp_path / "second", 4, str(tmp_path / "first/after_2.ckpt"), **short)
    assert resumed.policy_version == 4


def test_checkpoint_of_another_backend_starts_new_episodes_with_warning(tmp_path: Path) -> None:
    fit("discrete", tmp_path / "first", 2)
    with pytest.warns(UserWarning, match="could not be restored"):
        resumed = fit("native", tmp_path / "second", 4, ckpt_path=str(tmp_path / "first/after_2.ckpt"))
    assert resumed.policy_version == 4


def test_checkpoint_saved_after_training_resumes_exactly(tmp_path: Path) -> None:
    fit("discrete", tmp_path / "whole", 8)
    fit("discrete", tmp_path / "first", 4)
    resumed = fit("discrete", tmp_path / "second", 8, ckpt_path=str(tmp_path / "first/end.ckpt"))
    whole = torch.load(tmp_path / "whole/after_8.ckpt", weights_only=True)["state_dict"]
    assert differences(whole, resumed.state_dict()) == []


@pytest.mark.parametrize("limit", ["max_env_steps", "max_epochs"])
def test_checkpoint_saved_without_training_resumes_exactly(limit: str, tmp_path: Path) -> None:
    fit("discrete", tmp_path / "whole", 4, save_after=(3,))
    limits: dict[str, dict[str, Any]] = {
        "max_env_steps": {"callbacks": [EnvStepLimit(3 * 72)], "enable_checkpointing": False},
        "max_epochs": {"max_epochs": 1},
    }
    fit("discrete", tmp_path / "first", 3, str(tmp_path / "whole/after_3.ckpt"), **limits[limit])
    fit("discrete", tmp_path / "second", 4, ckpt_path=str(tmp_path / "first/end.ckpt"))
    assert differences(run_state(tmp_path / "whole/after_4.ckpt"), run_state(tmp_path / "second/after_4.ckpt")) == []


def test_given_seed_is_kept_and_evaluation_does_not_change_training(tmp_path: Path) -> None:
    fit("discrete", tmp_path / "first", 2)
    checkpoint = str(tmp_path / "first/after_2.ckpt")
    data = RolloutDataModule("CartPole-v1", num_envs=3, rollout_length=24, evaluation={"episodes": 1}, seed=123)
    model = PPO(data.observation_space, data.action_space, policy={"hidden_sizes": (8,)})
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.test(model, data, ckpt_path=checkpoint, verbose=False)
    assert data.seed == 123
    assert data._sampler.starts == 0
    assert model.env_steps == 2 * 3 * 24
    assert model.restored == {}


class LazyReplay(PPO):
    """Makes its replay in its first update instead of its constructor."""

    def update(self, rollout: Any) -> None:
        self.replays.setdefault("lazy", UseLimitedBuffer(64))
        super().update(rollout)


def test_replay_that_is_made_too_late_gives_a_warning(tmp_path: Path) -> None:
    def trainer(epochs: int) -> Trainer:
        return Trainer(accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False)

    data = RolloutDataModule("CartPole-v1", num_envs=1, rollout_length=8, rollouts_per_epoch=1)
    first = trainer(1)
    first.fit(LazyReplay(data.observation_space, data.action_space), data)
    first.save_checkpoint(path := tmp_path / "run.ckpt")
    again = LazyReplay(data.observation_space, data.action_space)
    data = RolloutDataModule("CartPole-v1", num_envs=1, rollout_length=8, rollouts_per_epoch=1)
    with pytest.warns(UserWarning, match="Replays in the checkpoint that LazyReplay does not have are dropped: lazy"):
        trainer(2).fit(again, data, ckpt_path=path)
