"""The example scripts run, shortened, and do what they say."""

import importlib
from pathlib import Path

import pytest
import torch

from lightning_rl import PPO

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def importable(in_tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def example(name: str):
    return importlib.import_module(name)


def test_train_keeps_the_best_checkpoint_and_returns_its_score(in_tmp_path):
    score = example("train").main(max_env_steps=14_336, root="run")
    # An untrained policy gets about 20.
    assert 40 < score <= 500
    assert list(Path("run/checkpoints").glob("best-step=*.ckpt"))


def test_resume_goes_on_from_the_first_half(in_tmp_path):
    first, second = example("resume").main(max_env_steps=6_000, root="run")
    assert (first.env_steps, first.policy_version) == (3072, 3)
    assert (second.env_steps, second.policy_version) == (6144, 6)
    # Moments of the observations of both halves.
    assert second.policy.observation_normalizer.moments.count == 6144


def test_custom_networks_are_used_trained_and_loaded_again(in_tmp_path):
    module = example("custom_network")
    fourier, linear = module.main(max_env_steps=1024)
    for encoder in (fourier.policy.actor_encoder, fourier.policy.critic_encoder):
        assert isinstance(encoder, module.FourierEncoder)
        assert encoder.frequencies.shape == (4, 16)
    assert linear.policy.value_head.weight.shape == (1, 4)
    # Four epochs of four minibatches.
    assert all(linear.optimizer.state[p]["step"] == 16 for p in linear.policy.value_head.parameters())

    # The class path and its arguments are all that a checkpoint needs to hold.
    assert fourier.hparams["network"] == {
        "class_path": "custom_network.FourierEncoder",
        "init_args": {"num_frequencies": 16},
    }
    again = PPO(**fourier.hparams)
    again.load_state_dict(fourier.state_dict())
    observations = torch.randn(5, 4)
    assert torch.equal(again.policy(observations)[1], fourier.policy(observations)[1])


def test_action_masks_are_obeyed_and_learned_with(in_tmp_path):
    """The game ends the run where a field is taken; two players who move at random are even, up to who moves first."""
    assert example("action_masks").main(max_env_steps=16_384) > 0.6


def test_a_club_and_a_swing_are_learned_together(in_tmp_path):
    """At first nearly seven strokes are needed of the ten that there are."""
    assert example("hybrid_actions").main(max_env_steps=1024) > 4
    assert example("hybrid_actions").main(max_env_steps=24_576) < 3


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert 30 <= len(text.splitlines()) <= 80
    assert f"    python examples/{path.name}\n" in text
    assert text.endswith('if __name__ == "__main__":\n    main()\n')
