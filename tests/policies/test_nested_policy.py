"""Normalizers and actor-critics of nested observations."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl import PPO
from lightning_rl.cli.main import main
from lightning_rl.nested import map_leaves, map_stacked
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.networks.images import ImpalaEncoder
from lightning_rl.policies.networks.mlp import embedding_size
from lightning_rl.validation import ConfigurationError
from tests.helpers import make_data, make_model, make_trainer
from tests.nested_probes import PAIR, SENSORS

DISCRETE = spaces.Discrete(3)
ROBOT = spaces.Dict({"joints": spaces.Box(-9, 9, (3,)), "robot": spaces.Dict({"mass": spaces.Box(0, 9, (1,))})})


class Mean(nn.Module):
    """An encoder that a user might write."""

    def __init__(self, space: spaces.Box, scale: float = 1.0) -> None:
        super().__init__()
        self.shape, self.scale, self.out_features = space.shape, scale, 1

    def forward(self, observations: Tensor) -> Tensor:
        return self.scale * observations.float().flatten(1).mean(1, keepdim=True)


class Keys(nn.Module):
    """An encoder of the whole observation that records its keys."""

    def __init__(self, space: spaces.Dict) -> None:
        super().__init__()
        self.keys, self.seen, self.out_features = sorted(space.keys()), set(), 1
        self.linear = nn.Linear(3, 1)

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        self.seen.add(tuple(sorted(observations)))
        return self.linear(observations["joints"])


def samples(space, num_rows=6):
    space.seed(0)
    rows = map_stacked(np.stack, [space.sample() for _ in range(num_rows)])
    return map_leaves(lambda x: torch.from_numpy(x).float() if x.dtype.kind == "f" else torch.from_numpy(x), rows)


def test_unknown_discrete_encoding_raises():
    with pytest.raises(ConfigurationError, match=r"^policy.discrete_encoding='binary' .* one of one_hot, embedding"):
        ActorCritic(spaces.Discrete(3), DISCRETE, discrete_encoding="binary")


@pytest.mark.parametrize("space", [SENSORS, PAIR], ids=["dict", "tuple"])
def test_nested_observations_may_have_any_leading_dimensions(space):
    torch.manual_seed(0)
    policy = ActorCritic(space, DISCRETE, network="mlp", normalize_observations=True)
    x = samples(space)
    values = policy.value(x)
    assert values.shape == (6,)
    folded = map_leaves(lambda leaf: leaf.unflatten(0, (3, 2)), x)
    torch.testing.assert_close(policy.value(folded), values.unflatten(0, (3, 2)))
    torch.testing.assert_close(policy.value(map_leaves(lambda leaf: leaf[0], x)), values[0])
    torch.testing.assert_close(policy(folded)[1], values.unflatten(0, (3, 2)))


def test_encoder_is_shared_if_a_leaf_is_an_image():
    assert ActorCritic(SENSORS, DISCRETE).critic_encoder is None
    assert ActorCritic(ROBOT, DISCRETE).critic_encoder is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_leaf_is_cast_to_the_network_precision(dtype):
    for network in ("auto", "mlp"):
        policy = ActorCritic(PAIR, DISCRETE, network=network, discrete_encoding="embedding").to(dtype)
        assert policy.value(samples(PAIR)).isfinite().all()


def test_each_box_but_images_has_its_own_moments():
    policy = ActorCritic(SENSORS, DISCRETE, normalize_observations=True)
    normalizer = policy.observation_normalizer
    x = samples(SENSORS, 50)
    normalizer.update(x)
    names = {name for name in policy.state_dict() if "normalizer" in name}
    moments = ("count", "mean", "variance")
    assert names == {f"observation_normalizer.leaves.{p}.moments.{m}" for p in (":arm:1", ":place") for m in moments}
    y = normalizer(x)
    for given, found in ((x["place"], y["place"]), (x["arm"][1], y["arm"][1])):
        expected = (given - given.mean(0)) / given.std(0, correction=0)
        torch.testing.assert_close(found, expected.clamp(-10, 10), rtol=1e-4, atol=1e-4)
    assert y["camera"] is x["camera"] and y["arm"][0] is x["arm"][0] and y["body"] == x["body"]


@pytest.mark.parametrize("network", ["auto", "impala", {"camera": "impala"}, {"place": "mlp", "camera": "auto"}])
def test_images_in_a_dict_are_normalized_if_asked(network):
    policy = ActorCritic(SENSORS, DISCRETE, network=network, normalize_observations={"images": True})
    plain = ActorCritic(SENSORS, DISCRETE, network=network)
    x = samples(SENSORS, 50)
    policy.observation_normalizer.update(x)
    camera = x["camera"].float()
    expected = (camera - camera.mean(0)) / camera.std(0, correction=0)
    normalized = policy.observation_normalizer(x)
    torch.testing.assert_close(normalized["camera"], expected.clamp(-10, 10), rtol=1e-4, atol=1e-4)
    encoders = [{type(x) for x in policy.actor_encoder.modules()} for policy in (policy, plain)]
    assert ImpalaEncoder in encoders[0] and encoders[0] == encoders[1]


def test_nested_moments_are_updated_from_rollouts():
    data = make_data("tests.nested_probes:Probe/Puzzle-v0")
    model = make_model(data, policy={"network": "mlp"}, normalization={"observations": True})
    make_trainer().fit(model, data)
    moments = model.policy.observation_normalizer.leaves[":noise"].moments
    assert moments.count == 2 * 2 * 16 and (moments.variance - 1 / 3).abs().max() < 0.15


def test_normalizing_observations_without_a_box_raises():
    space = spaces.Dict({"image": SENSORS["camera"], "class": spaces.Discrete(2)})
    with pytest.raises(ConfigurationError, match=r"^normalization.observations=True .* and Dict\(.* has none"):
        ActorCritic(space, DISCRETE, normalize_observations=True)
    with pytest.raises(ConfigurationError, match=r"^normalization.observations=\{'clip': 5.0\} .* has none"):
        ActorCritic(space, DISCRETE, normalize_observations={"clip": 5.0})


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("path", ["robot", "robot.mass"])
def test_critic_only_parts_change_values_but_not_actions(path, normalize):
    torch.manual_seed(0)
    policy = ActorCritic(ROBOT, DISCRETE, critic_only=[path], normalize_observations=normalize)
    x, other = samples(ROBOT), samples(ROBOT)
    other["robot"]["mass"] = x["robot"]["mass"] + 1
    (one, values), (two, other_values) = policy(x), policy(other)
    assert torch.equal(one.logits, two.logits)
    assert not torch.isclose(values, other_values).any()
    actions = policy.act(x, deterministic=True).action
    assert torch.equal(policy.act({"joints": x["joints"]}, deterministic=True).action, actions)
    other["joints"] = x["joints"] + 1
    assert not torch.isclose(policy(other)[0].logits, one.logits).all()


def test_custom_actor_encoder_gets_no_critic_only_parts():
    policy = ActorCritic(ROBOT, DISCRETE, critic_only=["robot"], network=f"{__name__}.Keys")
    policy(samples(ROBOT))
    assert (policy.actor_encoder.keys, policy.actor_encoder.seen) == (["joints"], {("joints",)})
    assert (policy.critic_encoder.keys, policy.critic_encoder.seen) == (["joints", "robot"], {("joints", "robot")})


@pytest.mark.parametrize("network", ["auto", "impala", {"camera": "impala"}])
def test_network_of_images_suits_an_image_of_the_critic_alone(network):
    space = spaces.Dict({"camera": spaces.Box(0, 255, (12, 12, 3), np.uint8), "joints": ROBOT["joints"]})
    policy = ActorCritic(space, DISCRETE, critic_only=["camera"], network=network)
    assert isinstance(policy.critic_encoder.encoders[":camera"], ImpalaEncoder)
    assert not len(policy.actor_encoder.encoders)


def test_paths_of_networks_are_refused_for_a_flat_image():
    with pytest.raises(ConfigurationError, match=r"^policy\.network=\{'cam': 'mlp'\} .* 'class_path', got 'cam'"):
        PPO(SENSORS["camera"], DISCRETE, policy={"network": {"cam": "mlp"}})


def test_leaf_encoder_of_a_critic_only_part_belongs_to_the_critic():
    network = {"robot.mass": f"{__name__}.Mean", "joints": "mlp"}
    policy = ActorCritic(ROBOT, DISCRETE, critic_only=["robot"], network=network)
    assert list(policy.actor_encoder.encoders) == [":joints"]
    assert list(policy.critic_encoder.encoders) == [":joints", ":robot:mass"]


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        (
            ROBOT,
            {"critic_only": ["mass"]},
            r"critic_only=\['mass'\] .* robot\.mass\), got 'mass'",
        ),
        (
            ROBOT,
            {"critic_only": ["joints", "robot"]},
            r"critic_only=.* expected at least one part for the actor",
        ),
        (SENSORS, {"critic_only": ["arm.0"]}, r"critic_only=.*, got 'arm\.0'"),
        (SENSORS, {"critic_only": ["arm.0"]}, r".* Dict \(arm, body, body\.lamps, body\.wheels, camera, place\), got"),
        (PAIR, {"critic_only": ["0"]}, r"critic_only=\['0'\] .* expected parts of a Dict"),
        (ROBOT, {"critic_only": ["robot"], "shared_encoder": True}, r"shared_encoder=True .* None or False, since"),
        (ROBOT, {"critic_only": "robot"}, r"critic_only='robot' .* a list of names"),
    ],
)
def test_invalid_critic_only_paths_raise(space, options, message):
    with pytest.raises(ConfigurationError, match=rf"^policy\.{message}"):
        PPO(space, DISCRETE, policy=options)


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (spaces.Text(5), "Text"),
        (spaces.Sequence(spaces.Discrete(2)), "Sequence"),
        (spaces.Graph(spaces.Discrete(2), None), "Graph"),
        (spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]), "OneOf"),
    ],
)
def test_spaces_without_fixed_shape_raise_with_their_path(leaf, kind):
    nested = spaces.Dict({"arm": spaces.Tuple([spaces.Discrete(2), leaf])})
    for space, path in ((nested, r"\.arm\.1"), (leaf, "")):
        message = (
            rf"^observation_space{path}: {kind} is not supported; expected Box, Discrete, .* a Dict or Tuple of these"
        )
        with pytest.raises(ConfigurationError, match=message):
            PPO(space, DISCRETE)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Dict({"a.b": DISCRETE}), r"the key 'a\.b' is not supported; expected a name without '\.' and ':'"),
        (spaces.Dict({1: DISCRETE}), r"the key 1 is not supported"),
        (spaces.Dict({}), r"Dict\(\) is empty; expected a space with at least one part"),
    ],
)
def test_spaces_with_invalid_keys_raise(space, message):
    with pytest.raises(ConfigurationError, match=rf"^observation_space: {message}"):
        PPO(space, DISCRETE)


def test_leaf_encoders_and_critic_only_parts_survive_yaml_and_checkpoint(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "model:\n  class_path: PPO\n  init_args:\n    num_minibatches: 2\n    policy:\n      critic_only: [answer]\n"
        "      discrete_encoding: embedding\n      network:\n        noise: mlp\n        picture:\n"
        f"          class_path: {__name__}.Mean\n          init_args: {{scale: 2.0}}\n"
        "data:\n  env_id: tests.nested_probes:Probe/Puzzle-v0\n  rollout_length: 8\n  rollouts_per_epoch: 1\n"
        f"trainer:\n  default_root_dir: {tmp_path}\n  max_epochs: 1\n  limit_val_batches: 0\n  accelerator: cpu\n"
        "  enable_progress_bar: false\n"
    )
    cli = main(["fit", "--config", str(tmp_path / "run.yaml")])
    assert cli.model.policy.actor_encoder.encoders[":picture"].scale == 2.0
    assert list(cli.model.policy.actor_encoder.inputs) == [":switch"]
    assert list(cli.model.policy.critic_encoder.inputs) == [":answer", ":switch"]
    assert cli.model.policy.actor_encoder.inputs[":switch"].out_features == embedding_size(2)
    loaded = PPO.load_from_checkpoint(cli.run_dir / "checkpoints" / "last.ckpt")
    x = samples(cli.datamodule.observation_space)
    assert torch.equal(loaded.policy.value(x), cli.model.policy.value(x))
    assert torch.equal(loaded(x), cli.model(x))


def test_classes_of_leaf_encoders_are_stored_by_their_paths():
    model = PPO(SENSORS, DISCRETE, policy={"network": {"camera": Mean, "place": "mlp"}})
    assert model.hparams["policy"]["network"] == {
        "camera": {"class_path": f"{__name__}.Mean", "init_args": {}},
        "place": "mlp",
    }
