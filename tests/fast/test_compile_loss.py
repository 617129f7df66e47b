"""`compile_loss` gives the same numbers, and does not compile again with every number that a schedule changes."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_rl import PPO
from lightning_rl.validation import ConfigurationError
from tests.helpers import DISCRETE, VECTOR, FixedRollouts, make_trainer, merged, parameters_of, random_rollout

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

OPTIONS: dict[str, Any] = {
    "policy": {"hidden_sizes": (8,)},
    "clipping": {"value": {"kind": "linear", "start": 0.3, "end": 0.1, "over": 150}, "dual": 3.0},
    "num_epochs": 2,
    "num_minibatches": 2,
    "learning_rate": 1e-2,
    "clip_range": {"kind": "linear", "start": 0.3, "end": 0.1, "over": 150},
}


def learn(**options: Any) -> PPO:
    torch.manual_seed(0)
    model = PPO(VECTOR, DISCRETE, **merged(OPTIONS, options))
    rollouts = [random_rollout(model.policy, seed=seed) for seed in range(3)]
    make_trainer().fit(model, FixedRollouts(rollouts, model))
    return model


def assert_close(one: PPO, other: PPO) -> None:
    expected = parameters_of(other)
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-5)
    assert one.losses == pytest.approx(other.losses, rel=1e-4, abs=1e-6)


def test_schedules_compile_at_most_twice(monkeypatch):
    """Traced as for the compiler, but run as it is: this needs none."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda loss, **options: compile_(loss, backend=counter, **options))
    model = learn(debug={"compile_loss": True})
    # With the first numbers, then with those that change as inputs.
    assert counter.frame_count <= 2
    assert_close(model, learn())
    # Nothing is learned here, so nothing is compiled.
    before = counter.frame_count
    model.compute_loss(random_rollout(model.policy))
    assert counter.frame_count == before


def test_it_is_refused_where_it_cannot_work():
    with pytest.raises(ConfigurationError, match=r"debug\.compile_loss='yes' is not valid: expected true or false"):
        PPO(VECTOR, DISCRETE, debug={"compile_loss": "yes"})
    model, trainer = PPO(VECTOR, DISCRETE, debug={"compile_loss": True}), make_trainer()
    on_xla: Any = SimpleNamespace(
        precision="32-true",
        strategy=SimpleNamespace(root_device=torch.device("xla")),
        loggers=[],
        callbacks=[],
        max_epochs=1,
    )
    model.check_run(trainer, None)
    with pytest.raises(ConfigurationError, match=r"debug\.compile_loss=True is not valid: expected false on XLA"):
        model.check_run(on_xla, None)
    recurrent = PPO(VECTOR, DISCRETE, debug={"compile_loss": True}, policy={"memory": "gru"})
    with pytest.raises(ConfigurationError, match=r"debug\.compile_loss=True is not valid: expected false with memory"):
        recurrent.check_run(trainer, None)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_losses_learn_the_same():
    assert_close(learn(debug={"compile_loss": True}), learn())
