"""Strategies that fork or spawn processes; the ones that are refused; `test_sharding` has `ModelParallelStrategy`."""

import copy
import multiprocessing
import multiprocessing.context
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)

from lightning_rl import LastCheckpoint
from lightning_rl.cli.main import main
from lightning_rl.training.checks import check_strategy
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    assert_equal_parameters,
    make_data,
    make_model,
    make_trainer,
    needs_weight_averaging,
    parameters_of,
)
from tests.programs import IMPORTED

SHARDED = ["fsdp", "fsdp_cpu_offload", "model_parallel", "deepspeed", "deepspeed_stage_3_offload"]
SMALL = [
    *("--model=PPO", "--data.env_id=CartPole-v1", "--data.num_envs=2", "--data.rollout_length=16"),
    *(
        "--data.rollouts_per_epoch=2",
        "--data.evaluation.episodes=3",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
    ),
]
pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")


class SaveEachRank(Callback):
    """Leaves behind, in a folder, the parameters and the clock that each process ends with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        found = {"parameters": parameters_of(pl_module), "env_steps": pl_module.env_steps}
        torch.save(found, self.folder / f"rank_{trainer.global_rank}.pt")


def train(folder, strategy, max_epochs, ckpt_path=None):
    """Train on two processes; return what the main process knows afterwards, and what each rank knew."""
    folder.mkdir(exist_ok=True)
    data = make_data()
    model = make_model(data, normalization={"observations": True, "rewards": True})
    callbacks = [SaveEachRank(folder), LastCheckpoint(folder)]
    trainer = make_trainer(
        devices=2, strategy=strategy, max_epochs=max_epochs, callbacks=callbacks, enable_checkpointing=True
    )
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return model, trainer, [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that what a launcher sets is taken back
        monkeypatch.delenv(name)


@pytest.fixture
def spawned_faster(monkeypatch):
    """Let spawned processes begin in a new interpreter that has imported Lightning, of which each gets a copy."""
    multiprocessing.set_forkserver_preload([*IMPORTED])
    start = multiprocessing.context.ForkServerProcess._Popen
    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "_Popen", staticmethod(start))


def check_ends(folder, model, trainer, ranks, num_epochs):
    """Processes end with equal weights, which the main process gets."""
    before = parameters_of(make_model(make_data(), normalization={"observations": True}))
    steps = num_epochs * 128
    for name, parameter in model.named_parameters():
        assert torch.equal(ranks[0]["parameters"][name], parameter)
        assert torch.equal(ranks[1]["parameters"][name], parameter)
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.policy.observation_normalizer.moments.count == steps
    assert trainer.callback_metrics["rollout/episode_return"] > 0
    # The clock stays with the processes, as Lightning's own counters and the optimiser do; a checkpoint has them all.
    assert [rank["env_steps"] for rank in ranks] == [steps, steps]
    assert (model.env_steps, trainer.global_step) == (0, 0)
    assert torch.load(folder / "last.ckpt", weights_only=True)["lightning_rl"]["env_steps"] == steps


def test_processes_end_alike_and_spawned_ones_go_on_from_a_checkpoint_of_forked_ones_bit_for_bit(
    tmp_path, spawned_faster
):
    unbroken = train(tmp_path / "unbroken", "ddp_fork", max_epochs=2)
    check_ends(tmp_path / "unbroken", *unbroken, num_epochs=2)
    check_ends(tmp_path / "first", *train(tmp_path / "first", "ddp_notebook", max_epochs=1), num_epochs=1)
    resumed = train(tmp_path / "second", "ddp_spawn", max_epochs=2, ckpt_path=tmp_path / "first/last.ckpt")
    check_ends(tmp_path / "second", *resumed, num_epochs=2)
    assert_equal_parameters(resumed[0], parameters_of(unbroken[0]))


def test_a_copy_of_an_algorithm_orders_minibatches_as_the_original_would():
    model = make_model(make_data())
    model.generator.manual_seed(7)
    torch.randperm(5, generator=model.generator)
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    order = torch.randperm(50, generator=model.generator)
    for one in copies:
        assert torch.equal(torch.randperm(50, generator=one.generator), order)
        assert_equal_parameters(one, parameters_of(model))


def test_predict_prints_the_episodes_of_all_processes(capfd, in_tmp_path):
    main(["predict", *SMALL, "--trainer.strategy=ddp_notebook"])
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("episode ")]
    assert [line.split(":")[0] for line in lines] == ["episode 0", "episode 1", "episode 2"]
    assert all("return " in line and line.endswith(("terminated", "truncated")) for line in lines)


def test_a_run_of_spawned_processes_has_one_folder_and_claims_no_number_of_steps(capfd, in_tmp_path, spawned_faster):
    main(["fit", *SMALL, "--trainer.strategy=ddp_spawn", "--max_env_steps=128"])
    (folder,) = Path("runs/ppo/CartPole-v1").iterdir()
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "checkpoints", "hparams.yaml"}
    assert "\nDone, validation return " in capfd.readouterr().out


@pytest.mark.parametrize("strategy", SHARDED)
def test_the_command_line_refuses_to_divide_a_network_and_writes_nothing(capsys, in_tmp_path, strategy):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *SMALL, f"--trainer.strategy={strategy}"])
    assert stopped.value.code == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"lightning-rl: error: strategy='{strategy}' is not supported: Lightning runs FSDP1")
    assert "ModelParallelStrategy(data_parallel_size=2" in message
    assert not list(in_tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "field"),
    [({"save_distributed_checkpoint": True}, "save_distributed_checkpoint"), ({}, "tensor_parallel_size=2")],
)
def test_tensor_parallelism_and_folders_of_checkpoints_are_refused_before_an_environment_is_made(given, field):
    data = make_data()
    model = make_model(data)
    strategy = ModelParallelStrategy(**{"save_distributed_checkpoint": False} | given)
    strategy.setup_environment = lambda: None  # type: ignore[method-assign]
    model._device_mesh = {"tensor_parallel": mock.Mock(size=lambda: 2)}
    with pytest.raises(ConfigurationError, match=f"{field}.* ModelParallelStrategy.data_parallel_size=2, tensor_p"):
        make_trainer(strategy=strategy).fit(model, data)
    assert data._sampler._collector is None


@needs_weight_averaging
def test_averaged_weights_are_refused_with_sharded_parameters():
    data = make_data()
    strategy = ModelParallelStrategy(save_distributed_checkpoint=False)
    strategy.setup_environment = lambda: None  # type: ignore[method-assign]
    average = lightning_callbacks.EMAWeightAveraging()
    with pytest.raises(ConfigurationError, match=r"WeightAveraging cannot be used: .*ModelParallelStrategy; .*'ddp'"):
        make_trainer(strategy=strategy, callbacks=[average]).fit(make_model(data), data)


def test_every_strategy_that_has_whole_networks_is_accepted():
    accepted = [name for name in StrategyRegistry if not name.startswith(("fsdp", "deepspeed"))]
    assert {"ddp", "ddp_spawn", "ddp_notebook", "single_device", "single_xla", "xla"} <= set(accepted)
    for strategy in ["auto", *accepted, DDPStrategy(), SingleDeviceStrategy()]:
        check_strategy(strategy)
    with pytest.raises(ConfigurationError, match="strategy='FSDPStrategy'"):
        check_strategy(FSDPStrategy())
