"""`torch.compile(model)` before a run, as Lightning documents it."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from lightning_rl import PPO
from lightning_rl.rollouts.batch import Batch
from lightning_rl.training.loss import Loss
from tests.helpers import assert_equal_parameters, make_data, make_model, make_trainer, parameters_of


def assert_close(model: PPO, other: PPO) -> None:
    expected = parameters_of(other)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_compiled_model_learns_the_same_and_compiles_policy_and_loss_alone(env_id, tmp_path):
    """Trace like the compiler, but run the graph without one."""
    data = make_data(env_id)
    expected = make_model(data)
    make_trainer().fit(expected, data)

    torch._dynamo.reset()
    counters.clear()
    data = make_data(env_id)
    model = make_model(data)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    trainer = make_trainer(limit_val_batches=1)
    trainer.fit(compiled, data)
    assert counter.frame_count == 1 and not counters["graph_break"]
    assert model.policy_version == 2
    assert_close(model, expected)

    trainer.test(compiled, data, verbose=False)
    assert len(trainer.predict(compiled, data)[0]) == 2
    assert counter.frame_count == 1
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    assert_equal_parameters(PPO.load_from_checkpoint(tmp_path / "model.ckpt"), parameters_of(model))


class Traced(PPO):
    """Records whether the compiler traces the loss."""

    traced = False

    def loss(self, batch: Batch) -> Loss:
        self.traced = torch.compiler.is_compiling()
        return super().loss(batch)


def test_the_loss_is_compiled_too():
    torch._dynamo.reset()
    data = make_data()
    model = Traced(**make_model(data).hparams)
    make_trainer().fit(torch.compile(model, backend="eager"), data)
    assert model.traced and model.policy_version == 2


def test_compiling_a_recurrent_policy_logs_that_it_is_not_compiled():
    torch._dynamo.reset()
    data = make_data()
    model = make_model(data, policy={"memory": "lstm"})
    counter = CompileCounterWithBackend("eager")
    with pytest.warns(UserWarning, match=r"torch.compile\(model\): the policy has memory and is not compiled"):
        make_trainer().fit(torch.compile(model, backend=counter), data)
    assert model.policy_version == 2
    assert counter.frame_count == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_model_compiled_with_the_default_compiler_learns_the_same():
    data = make_data()
    model, expected = make_model(data), make_model(data)
    make_trainer().fit(torch.compile(model), data)
    make_trainer().fit(expected, make_data())
    assert_close(model, expected)
