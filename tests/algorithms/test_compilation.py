"""`torch.compile(model)` before a run, as Lightning documents it."""

import logging
import shutil

import pytest
import torch

from lightning_rl import PPO, fast
from lightning_rl.training.gradient_steps import EagerEngine
from tests.helpers import assert_equal_parameters, make_data, make_model, make_trainer, parameters_of

SELECTS = r"torch.compile\(model\): its options have no effect; it selects debug.fast_paths: compiled"


def assert_close(model: PPO, other: PPO) -> None:
    expected = parameters_of(other)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-5)


def test_a_compiled_model_learns_the_same_with_the_compiled_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(fast.programs, "Compiled", lambda function, *_: function)  # compiling takes seconds
    torch.compiler.reset()
    data = make_data()
    expected = make_model(data)
    make_trainer().fit(expected, data)
    data = make_data()
    model = make_model(data)
    compiled, trainer = torch.compile(model), make_trainer(limit_val_batches=1)
    with pytest.warns(UserWarning, match=SELECTS):
        trainer.fit(compiled, data)
    assert isinstance(model.steps.engine, fast.CompiledEngine) and not model.steps.engine.failed
    assert model.policy_version == 2
    assert_close(model, expected)

    with pytest.warns(UserWarning, match=SELECTS):
        trainer.test(compiled, data, verbose=False)
    with pytest.warns(UserWarning, match=SELECTS):
        assert len(trainer.predict(compiled, data)[0]) == 2
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    assert_equal_parameters(PPO.load_from_checkpoint(tmp_path / "model.ckpt"), parameters_of(model))


def test_the_log_says_that_a_recurrent_policy_is_not_compiled(caplog):
    data = make_data()
    model = make_model(data, policy={"memory": "lstm"})
    with (
        caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"),
        pytest.warns(UserWarning, match=SELECTS),
    ):
        make_trainer().fit(torch.compile(model), data)
    assert "with autograd: the policy has memory" in caplog.text
    assert model.policy_version == 2


def test_models_that_are_not_compiled_are_left_alone():
    data = make_data()
    model = make_model(data, debug={"fast_paths": "none"})
    make_trainer().fit(model, data)
    assert isinstance(model.steps.engine, EagerEngine) and model.options["debug.fast_paths"] == "none"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_model_compiled_with_the_default_compiler_learns_the_same():
    data = make_data()
    model, expected = make_model(data), make_model(data)
    make_trainer().fit(torch.compile(model), data)
    make_trainer().fit(expected, make_data())
    assert_close(model, expected)
