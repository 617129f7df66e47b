"""One update here and in other libraries, from the same weights and the same rollout, with the presets of the guide."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import lightning_rl
from lightning_rl import EnvStepLimit, Rollout
from tests.helpers import FixedRollouts, make_trainer, parameters_of
from tests.vectors.libraries import scripted

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

PAGE = Path(__file__).parents[2] / "docs" / "same_update.md"
RECORDED = sorted(path.stem for path in Path(scripted.__file__).parent.glob("*.npz"))
# What each library takes for the value that follows a time limit.
AFTER_TIME_LIMIT = {"rsl_rl": "previous", "rl_games": "previous", "cleanrl": "none"}
AFTER_TIME_LIMIT |= dict.fromkeys(("sb3", "skrl", "torchrl", "tianshou"), "final")
LEARNING = {"learning_rate": scripted.LEARNING_RATE, "policy": {"hidden_sizes": scripted.HIDDEN}}
PASSES = {"num_epochs": scripted.NUM_EPOCHS, "num_minibatches": scripted.NUM_MINIBATCHES}


def preset(title):
    """Return class and options of the block below a heading of the page."""
    (block,) = re.findall(rf"^## {re.escape(title)}\n.*?^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    model = yaml.safe_load(block)["model"]
    return model["class_path"], model["init_args"]


TITLES = {
    "sb3_ppo": "Stable-Baselines3 PPO",
    "sb3_a2c": "Stable-Baselines3 A2C",
    "cleanrl_ppo_discrete": "CleanRL, discrete actions",
    "cleanrl_ppo_continuous": "CleanRL, continuous actions",
    "rsl_rl_ppo": "rsl_rl",
    "skrl_ppo": "skrl",
    "rl_games_ppo": "rl_games",
    "torchrl_ppo": "TorchRL",
    "tianshou_ppo": "Tianshou",
}


def policy_weights(weights):
    """Return the state of our policy from weights by the neutral names of the files."""
    head = "action_head.mean" if "log_std" in weights else "action_head.logits"
    modules = {"actor.0": "actor_encoder.layers.0", "actor.1": "actor_encoder.layers.2", "actor.2": head}
    modules |= {"critic.0": "critic_encoder.layers.0", "critic.1": "critic_encoder.layers.2", "critic.2": "value_head"}
    named = {
        f"{ours}.{kind}": weights[f"{theirs}.{kind}"] for theirs, ours in modules.items() for kind in ("weight", "bias")
    }
    return named | ({"action_head.log_std": weights["log_std"]} if "log_std" in weights else {})


def parts(name):
    """Return the library of a file, the title of its preset, and the kind of actions."""
    prefix, _, kind = name.rpartition("_")
    return prefix.rpartition("_")[0], TITLES.get(prefix) or TITLES[name], kind


def make(name, orders, options):
    """Return our algorithm with these options; its minibatches follow the recorded orders."""
    _, title, kind = parts(name)
    algorithm = preset(title)[0]
    remaining = iter(orders)

    class Recorded(getattr(lightning_rl, algorithm)):
        def minibatch_order(self, num_items):
            return torch.from_numpy(next(remaining).astype(np.int64))

    short = LEARNING | (PASSES if algorithm == "PPO" else {})
    options = {key: value for key, value in options.items() if key != "minibatch_size"} | short
    return Recorded(scripted.OBSERVATION_SPACE, scripted.SPACES[kind], **options)


def rollout_of(found, policy, after_time_limit):
    """Return the recorded rollout, with log-probabilities and values of our policy."""
    observations, finals = torch.from_numpy(found["observations"]), torch.from_numpy(found["finals"])
    actions, truncated = torch.from_numpy(found["actions"]), torch.from_numpy(found["truncated"])
    with torch.no_grad():
        log_probs, values = policy.log_prob(observations[:-1], actions), policy.value(observations)
        following = {"final": policy.value(finals), "previous": values[:-1], "none": torch.full_like(values[:-1], 7.0)}
    return Rollout(
        observations=observations,
        actions=actions,
        rewards=torch.from_numpy(found["rewards"]),
        terminated=torch.from_numpy(found["terminated"]),
        truncated=truncated,
        log_probs=log_probs,
        values=values[:-1],
        next_values=torch.where(truncated, following[after_time_limit], values[1:]),
        final_indices=truncated.nonzero(),
        final_observations=finals[truncated],
    )


def updated(name, options):
    """Return the file, the rollout that our policy learned from, and the weights after the update, theirs and ours."""
    found = dict(np.load(Path(scripted.__file__).with_name(f"{name}.npz")))
    initial, final = (
        policy_weights({k.partition("/")[2]: torch.from_numpy(x) for k, x in found.items() if k.startswith(when)})
        for when in ("initial", "final")
    )
    model = make(name, found["orders"], options)
    model.policy.load_state_dict(initial)
    rollout = rollout_of(found, model.policy, AFTER_TIME_LIMIT[parts(name)[0]])
    make_trainer(callbacks=[EnvStepLimit(2 * scripted.ROWS)]).fit(model, FixedRollouts([rollout], model))
    return found, rollout, final, parameters_of(model.policy)


def largest_difference(theirs, ours):
    assert theirs.keys() == ours.keys()
    return max(float((theirs[name] - parameter).abs().max()) for name, parameter in ours.items())


@pytest.mark.parametrize("fast_paths", ["auto", "none"])
@pytest.mark.parametrize("name", RECORDED)
def test_an_update_ends_with_the_parameters_of_the_other_library(name, fast_paths):
    options = preset(parts(name)[1])[1] | {"debug": {"fast_paths": fast_paths}}
    found, rollout, theirs, ours = updated(name, options)
    for kind in ("log_probs", "values"):
        np.testing.assert_allclose(getattr(rollout, kind), found[kind], rtol=0, atol=2e-6)
    assert largest_difference(theirs, ours) < 1e-6


def needed(name):
    """Return the options of a preset, by full name, that the test does not replace and that act on one rollout."""
    options = flat_options(preset(parts(name)[1])[1])
    return [option for option in options if option not in {*LEARNING, *PASSES, "minibatch_size", "optimizer.anneal"}]


def flat_options(options, path=""):
    for key, value in options.items():
        nested = isinstance(value, dict) and key != "options"
        yield from flat_options(value, f"{path}{key}.") if nested else [f"{path}{key}"]


def without(options, option):
    key, _, rest = option.partition(".")
    if rest:
        return options | {key: without(options[key], rest)}
    return {name: value for name, value in options.items() if name != key}


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in RECORDED for option in needed(name)])
def test_without_any_option_of_a_preset_the_update_differs(name, option):
    *_, theirs, ours = updated(name, without(preset(parts(name)[1])[1], option))
    assert largest_difference(theirs, ours) > 2e-6
