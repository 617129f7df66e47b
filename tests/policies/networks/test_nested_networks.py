"""Encoders of nested and discrete observations."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lightning_rl.policies.networks.images import ImpalaEncoder, NatureEncoder
from lightning_rl.policies.networks.make import make_encoder
from lightning_rl.policies.networks.mlp import MLPEncoder, embedding_size
from lightning_rl.validation import ConfigurationError
from tests.nested_probes import SENSORS
from tests.policies.test_nested_policy import ROBOT, Mean, samples


def test_multi_discrete_entries_become_concatenated_one_hot_vectors():
    encoder = MLPEncoder(spaces.MultiDiscrete([3, 2], start=[5, 0]), hidden_sizes=())
    assert encoder(torch.tensor([[5, 1], [7, 0]])).tolist() == [[1, 0, 0, 0, 1], [0, 0, 1, 1, 0]]
    grid = MLPEncoder(spaces.MultiDiscrete([[2, 2], [2, 3]]), hidden_sizes=())
    assert grid(torch.tensor([[1, 0], [0, 2]])).tolist() == [0, 1, 1, 0, 1, 0, 0, 0, 1]


def test_multi_binary_becomes_floats():
    encoder = MLPEncoder(spaces.MultiBinary([2, 2]), hidden_sizes=())
    assert encoder(torch.tensor([[[0, 1], [1, 1]]], dtype=torch.int8)).tolist() == [[0.0, 1.0, 1.0, 1.0]]


def test_embedding_has_a_vector_for_each_class_of_each_entry():
    assert [embedding_size(n) for n in (1, 2, 10, 500, 10**6)] == [2, 2, 6, 52, 600]
    encoder = MLPEncoder(spaces.MultiDiscrete([10, 2], start=[1, 0]), (), discrete_encoding="embedding")
    first, second = (table.weight for table in encoder.inputs[":"].tables)
    assert encoder.out_features == 6 + 2
    assert torch.equal(encoder(torch.tensor([[4, 1]])), torch.cat([first[3], second[1]]).unsqueeze(0))
    encoder(torch.tensor([[4, 1]])).sum().backward()
    assert first.grad.nonzero()[:, 0].unique().tolist() == [3]


def test_mlp_concatenates_leaves_and_image_features_in_any_key_order():
    encoder = make_encoder(SENSORS, hidden_sizes=())
    camera = encoder.encoders[":camera"]
    assert isinstance(camera, ImpalaEncoder) and list(encoder.encoders) == [":camera"]
    x = samples(SENSORS)
    one_hot = MLPEncoder(spaces.Discrete(5, start=1), ())(x["arm"][0])
    wheels = MLPEncoder(spaces.MultiDiscrete([3, 4], start=[1, 0]), ())(x["body"]["wheels"])
    parts = [one_hot, x["arm"][1].unsqueeze(1), x["body"]["lamps"].float(), wheels, x["place"], camera(x["camera"])]
    assert torch.equal(encoder(x), torch.cat(parts, 1))
    assert encoder.out_features == 5 + 1 + 3 + 7 + 2 + 256
    assert torch.equal(encoder(dict(reversed(x.items()))), encoder(x))


def test_an_image_in_the_mlp_is_divided_by_255():
    space = spaces.Dict({"image": spaces.Box(0, 255, (2, 2, 1), np.uint8), "x": spaces.Box(-1, 1, (1,))})
    x = {"image": torch.full((1, 2, 2, 1), 51, dtype=torch.uint8), "x": torch.ones(1, 1)}
    assert make_encoder(space, "mlp", ())(x).tolist() == [pytest.approx([0.2] * 4 + [1.0])]


@pytest.mark.parametrize(
    ("network", "expected"), [("auto", NatureEncoder), ("nature", NatureEncoder), ("impala", ImpalaEncoder)]
)
def test_network_of_images_is_chosen_by_size_or_by_name(network, expected):
    space = spaces.Tuple([spaces.Box(0, 255, (36, 36, 1), np.uint8), spaces.Discrete(2)])
    assert type(make_encoder(space, network).encoders[":0"]) is expected


def test_leaf_encoders_are_replaced_by_path():
    mean = {"class_path": "tests.policies.test_nested_policy.Mean", "init_args": {"scale": 2.0}}
    encoder = make_encoder(SENSORS, {"camera": mean, "arm.1": "mlp"}, (8,))
    assert type(encoder.encoders[":camera"]) is Mean and encoder.encoders[":camera"].shape == (6, 6, 3)
    assert type(encoder.encoders[":arm:1"]) is MLPEncoder and encoder.encoders[":arm:1"].out_features == 8
    assert encoder.layers[0].in_features == 5 + 3 + 7 + 2 + 8 + 1
    bare = make_encoder(SENSORS, {"camera": mean}, ())
    x = samples(SENSORS)
    assert torch.equal(bare(x)[:, -1], 2 * x["camera"].float().flatten(1).mean(1))


@pytest.mark.parametrize(
    ("space", "network", "message"),
    [
        (SENSORS, {"lens": "mlp"}, r"network=.* expected paths of leaves \(arm\.0, arm\.1, .*place\), got 'lens'"),
        (SENSORS, {"arm": "mlp"}, r"network=.* expected paths of leaves .*, got 'arm'"),
        (SENSORS, {"place": "nature"}, r"policy.network=.*image of three dimensions"),
        (
            SENSORS,
            {"place": "large"},
            r"^policy.network\.place='large' .* expected auto, mlp, nature, impala or a class",
        ),
        (SENSORS, {"place": "no.such.Thing"}, r"^policy.network\.place='no.such.Thing' cannot be imported"),
        (SENSORS, "nature", r"network='nature' .* at least 36x36 pixels, got 6x6"),
        (ROBOT, "impala", r"network='impala' .* expected auto or mlp, since there is no image in Dict"),
    ],
)
def test_invalid_networks_raise(space, network, message):
    with pytest.raises(ConfigurationError, match=message):
        make_encoder(space, network)
