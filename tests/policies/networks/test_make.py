"""Encoders: initialization, image layouts, scaling, custom classes and errors."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.policies.networks import images
from lightning_rl.policies.networks.images import ImpalaEncoder, NatureEncoder
from lightning_rl.policies.networks.make import make_encoder
from lightning_rl.policies.networks.mlp import MLPEncoder
from lightning_rl.spaces import is_image
from lightning_rl.validation import ConfigurationError
from tests.policies.networks.test_mlp import assert_orthogonal


def image_space(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def pixels(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


class PlainEncoder(nn.Module):
    """A user's encoder: takes rows only and ignores dtypes."""

    def __init__(self, space: spaces.Box, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(int(np.prod(space.shape)), width)
        self.out_features = width

    def forward(self, observations: Tensor) -> Tensor:
        assert observations.dim() == 2
        return self.linear(observations)


class Boastful(PlainEncoder):
    """Declares too many features, counts its calls, and draws random numbers."""

    def __init__(self, space: spaces.Box, more: int = 1) -> None:
        super().__init__(space)
        self.out_features += more
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, observations: Tensor) -> Tensor:
        self.seen += len(observations)
        return super().forward(observations.flatten(1)) + 0 * torch.randn(())


class OnlyOnItsDevice(Boastful):
    def forward(self, observations: Tensor) -> Tensor:
        raise NotImplementedError("this kernel needs a GPU")


class WithoutOutFeatures(nn.Module):
    def __init__(self, space: spaces.Box) -> None:
        super().__init__()


@pytest.mark.parametrize(("space", "network"), [(spaces.Box(-1, 1, (3,)), "mlp"), (image_space(4, 36, 36), "nature")])
def test_encoder_layers_are_orthogonal_with_gain_sqrt_2(space, network):
    layers = [m for m in make_encoder(space, network).modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert len(layers) == {"mlp": 2, "nature": 4}[network]
    for layer in layers:
        assert_orthogonal(layer, 2**0.5)


def test_impala_has_smaller_gains_without_a_relu():
    gains = {"linear": 2**0.5, "convolution1": 2**0.5, "convolution2": 6**-0.5}
    layers = [
        (name.rpartition(".")[2], module)
        for name, module in make_encoder(image_space(7, 7, 3), "impala").named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    assert len(layers) == 3 + 2 * 6 + 1
    for name, layer in layers:
        assert_orthogonal(layer, gains.get(name, 1.0))


@pytest.mark.parametrize("network", ["nature", "impala"])
def test_initial_image_features_have_order_1(network):
    torch.manual_seed(0)
    features = make_encoder(image_space(3, 64, 64), network)(pixels(8, 3, 64, 64))
    assert 0.3 < features.square().mean().sqrt() < 1.5


def test_nature_and_impala_have_their_published_sizes():
    """The networks of Mnih et al. 2015 and Espeholt et al. 2018 on four stacked Atari frames, counted by hand."""
    frames = image_space(4, 84, 84)
    nature, impala = NatureEncoder(frames), ImpalaEncoder(frames)
    assert sum(p.numel() for p in nature.parameters()) == 8_224 + 32_832 + 36_928 + 1_606_144
    assert sum(p.numel() for p in impala.parameters()) == 592 + 4 * 2_320 + 4_640 + 9_248 + 8 * 9_248 + 991_488
    assert (nature.out_features, impala.out_features) == (512, 256)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (image_space(4, 84, 84), NatureEncoder),
        (image_space(96, 96, 3), NatureEncoder),
        (image_space(36, 36, 1), NatureEncoder),
        (image_space(35, 36, 1), ImpalaEncoder),
        (image_space(7, 7, 3), ImpalaEncoder),
        (image_space(128), MLPEncoder),
        (spaces.Box(0, 1, (3, 84, 84), np.float32), MLPEncoder),
        (spaces.Box(-1, 1, (5,)), MLPEncoder),
        (spaces.Discrete(4), MLPEncoder),
    ],
)
def test_auto_chooses_nature_impala_or_mlp(space, expected):
    assert type(make_encoder(space)) is expected


@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        ((4, 84, 84), 4),
        ((84, 84, 4), 4),
        ((84, 84, 12), 12),
        ((12, 84, 84), 12),
        ((210, 160, 3), 3),
        ((3, 210, 160), 3),
        ((1, 50, 40), 1),
        ((17, 8, 8), 17),
        ((8, 8, 17), 17),
        ((3, 3, 3), 3),
    ],
)
def test_channel_order_is_detected(shape, channels):
    encoder = ImpalaEncoder(image_space(*shape), (4,), 8)
    assert encoder.channels == channels
    assert encoder.stages[0].in_channels == channels
    assert encoder(pixels(2, *shape)).shape == (2, 8)


@pytest.mark.parametrize("make", [NatureEncoder, ImpalaEncoder])
def test_channels_first_and_last_give_the_same_features(make):
    first, last = make(image_space(3, 40, 44)), make(image_space(40, 44, 3))
    last.load_state_dict(first.state_dict())
    images = pixels(5, 3, 40, 44)
    torch.testing.assert_close(first(images), last(images.permute(0, 2, 3, 1)))


@pytest.mark.parametrize("shape", [(4, 36, 40), (36, 40, 3)])
def test_pixels_are_scaled_and_channels_last_in_memory(shape):
    encoder, rows = NatureEncoder(image_space(*shape)), pixels(3, *shape)
    found = encoder._to_pixels(rows, torch.float32)
    expected = rows if shape[0] == 4 else rows.permute(0, 3, 1, 2)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, expected.float() * (1 / 255))


@pytest.mark.parametrize("shape", [(4, 36, 40), (36, 40, 3)])
def test_images_in_floating_point_stay_as_they_are(shape):
    encoder, rows = NatureEncoder(image_space(*shape)), pixels(2, *shape)
    given = rows.float()
    torch.testing.assert_close(encoder(given), encoder(rows))
    assert torch.equal(given, rows.float())


@pytest.mark.parametrize("make", [NatureEncoder, ImpalaEncoder])
def test_splitting_a_batch_of_images_keeps_features_and_gradients(make, monkeypatch):
    encoder, rows, seen = make(image_space(4, 36, 40)).double(), pixels(7, 4, 36, 40), []
    of_all = encoder(rows)
    expected = torch.autograd.grad(of_all.square().sum(), encoder.parameters())
    monkeypatch.setattr(images, "_PIXELS_AT_A_TIME", 3 * 4 * 36 * 40)
    to_pixels = type(encoder)._to_pixels
    monkeypatch.setattr(make, "_to_pixels", lambda self, x, dtype: (seen.append(len(x)), to_pixels(self, x, dtype))[1])
    features = encoder(rows)
    found = torch.autograd.grad(features.square().sum(), encoder.parameters())
    assert seen == [3, 3, 1]
    torch.testing.assert_close([features, *found], [of_all, *expected])


@pytest.mark.parametrize("network", ["mlp", "nature", "impala"])
def test_uint8_observations_are_divided_by_255(network):
    bytes_, floats = image_space(4, 36, 36), spaces.Box(0, 1, (4, 36, 36), np.float32)
    encoder, reference = make_encoder(bytes_, network).double(), make_encoder(floats, network).double()
    reference.load_state_dict(encoder.state_dict())
    images = pixels(2, 4, 36, 36)
    torch.testing.assert_close(encoder(images), reference(images.double() / 255))


@pytest.mark.parametrize(
    ("space", "network"),
    [
        (spaces.Box(-1, 1, (3,)), "mlp"),
        (spaces.Box(-1, 1, (2, 3)), "mlp"),
        (spaces.Box(-1, 1, ()), "mlp"),
        (spaces.Discrete(4), "mlp"),
    ],
)
def test_mlps_take_any_leading_dimensions(space, network):
    encoder = make_encoder(space, network, hidden_sizes=(8,))
    rows = torch.from_numpy(np.stack([space.sample() for _ in range(6)]))
    features = encoder(rows)
    assert features.shape == (6, encoder.out_features)
    torch.testing.assert_close(encoder(rows.unflatten(0, (3, 2))), features.unflatten(0, (3, 2)))
    torch.testing.assert_close(encoder(rows[0]), features[0])


def test_discrete_observations_become_one_hot():
    encoder = MLPEncoder(spaces.Discrete(4, start=10), hidden_sizes=())
    assert encoder(torch.tensor([10, 13, 12])).tolist() == [[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    assert encoder.out_features == 4


def test_mlp_is_linear_layers_with_the_activation_after_each():
    encoder = MLPEncoder(spaces.Box(-1, 1, (3,)), (8, 5), "relu")
    first, second = encoder.layers[0], encoder.layers[2]
    x = torch.randn(6, 3)
    expected = ((x @ first.weight.T + first.bias).clamp(min=0) @ second.weight.T + second.bias).clamp(min=0)
    torch.testing.assert_close(encoder(x), expected)
    assert encoder.out_features == 5


def test_images_are_three_dimensional_and_uint8():
    assert is_image(image_space(7, 7, 3))
    assert not is_image(image_space(7))
    assert not is_image(spaces.Box(0, 1, (7, 7, 3), np.float32))
    assert not is_image(spaces.Discrete(3))


def test_custom_encoder_is_made_from_its_class_path():
    spec = {"class_path": f"{__name__}.PlainEncoder", "init_args": {"width": 5}}
    encoder = make_encoder(spaces.Box(-1, 1, (3,)), spec)
    assert isinstance(encoder, PlainEncoder)
    assert encoder.out_features == 5
    assert isinstance(make_encoder(spaces.Box(-1, 1, (3,)), f"{__name__}.PlainEncoder"), PlainEncoder)


def test_checking_the_width_of_an_encoder_has_no_side_effects():
    space, spec = spaces.Box(-1, 1, (3,)), {"class_path": f"{__name__}.Boastful", "init_args": {"more": 0}}
    space.seed(3)
    torch.manual_seed(3)
    encoder = make_encoder(space, spec)
    drawn, sampled = torch.rand(3), space.sample()
    assert encoder.seen == 0
    space.seed(3)
    torch.manual_seed(3)
    Boastful(space, 0)
    assert torch.equal(drawn, torch.rand(3)) and np.array_equal(sampled, space.sample())


def test_encoder_that_needs_a_gpu_is_not_checked():
    assert make_encoder(spaces.Box(-1, 1, (3,)), f"{__name__}.OnlyOnItsDevice").out_features == 9


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        (image_space(7, 7, 3), {"network": "nature"}, r"network='nature' .* at least 36x36 pixels, got 7x7"),
        (spaces.Box(-1, 1, (3,)), {"network": "nature"}, r"policy.network=.*image of three dimensions"),
        (spaces.Box(-1, 1, (3,)), {"network": "resnet"}, r"network='resnet' .* expected auto, mlp, nature, impala"),
        (spaces.Box(-1, 1, (3,)), {"activation": "sigmoid"}, r"activation='sigmoid' .* expected one of tanh, relu"),
        (spaces.Box(-1, 1, (3,)), {"hidden_sizes": (64, 0)}, r"hidden_sizes=0 .* an integer of at least 1"),
        (spaces.Text(3), {}, r"observation_space=Text.* expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict"),
        (
            spaces.Box(-1, 1, (3,)),
            {"network": "no.such.Thing"},
            r"network='no.such.Thing' cannot be imported",
        ),
        (
            spaces.Box(-1, 1, (3,)),
            {"network": f"{__name__}.WithoutOutFeatures"},
            r"network='.*WithoutOutFeatures' is not valid: expected .* integer attribute out_features",
        ),
        (
            spaces.Box(-1, 1, (3,)),
            {"network": {"class_path": f"{__name__}.PlainEncoder", "init_args": {"depth": 3}}},
            r"network: .*PlainEncoder refused the arguments \{'depth': 3\}",
        ),
        (
            spaces.Box(-1, 1, (3,)),
            {"network": f"{__name__}.Boastful"},
            r"network='.*Boastful' is not valid: expected features \[2, 9\] for 2 .*, got \[2, 8\]",
        ),
        (
            spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Box(-9, 9, (2, 2), np.float64)}),
            {"network": {"b": f"{__name__}.Boastful"}},
            r"network\.b='.*Boastful' is not valid: expected features \[2, 9\]",
        ),
        (spaces.Box(-1, 1, (3,)), {"network": {"width": 3}}, r"network=.* a dict with 'class_path'"),
    ],
)
def test_error_names_the_field_the_value_and_what_was_expected(space, options, message):
    with pytest.raises(ConfigurationError, match=message):
        make_encoder(space, **options)
