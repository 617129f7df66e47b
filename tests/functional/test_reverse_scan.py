"""The reverse scan against its loop and by hand, with any shapes and dtypes."""

import pytest
import torch
from torch import Tensor

from lightning_rl.functional import reverse_scan

from .helpers import EXACT, LENGTHS
from .loops import loop_scan


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_reverse_scan_equals_the_loop(steps: int, shape: tuple[int, ...]) -> None:
    x, decay = torch.randn(2, steps, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    initial = torch.full(shape, 1.7, dtype=torch.float64)
    torch.testing.assert_close(reverse_scan(x, decay), loop_scan(x, decay), **EXACT)
    torch.testing.assert_close(reverse_scan(x, decay, initial), loop_scan(x, decay, initial), **EXACT)


def test_reverse_scan_by_hand() -> None:
    x, decay = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.25, 2.0])
    # 4 + 2 * 3 = 10;  2 + 10 / 4 = 4.5;  1 + 4.5 / 2 = 3.25
    assert reverse_scan(x, decay, torch.tensor(3.0)).tolist() == [3.25, 4.5, 10.0]
    assert reverse_scan(x, decay).tolist() == [2.5, 3.0, 4.0]


@pytest.mark.parametrize("decay", [0.9, torch.tensor(0.9, dtype=torch.float64)])
def test_reverse_scan_takes_a_scalar_decay(decay: Tensor | float) -> None:
    x = torch.randn(6, 2, dtype=torch.float64)
    torch.testing.assert_close(reverse_scan(x, decay), loop_scan(x, torch.full_like(x, 0.9)), **EXACT)


def test_reverse_scan_broadcasts_a_decay_of_one_column() -> None:
    x, decay = torch.randn(6, 3, dtype=torch.float64), torch.rand(6, 1, dtype=torch.float64)
    torch.testing.assert_close(reverse_scan(x, decay), loop_scan(x, decay.expand(6, 3)), **EXACT)


def test_reverse_scan_of_concatenated_trajectories_is_bit_identical() -> None:
    generator = torch.Generator().manual_seed(2)
    lengths = [1, 5, 17, 2, 64, 30]
    xs = [torch.randn(n, 4, generator=generator) for n in lengths]
    decays = [0.9 + 0.1 * torch.rand(n, 4, generator=generator) for n in lengths]
    for decay in decays:
        decay[-1] = 0  # a trajectory's end
    alone = torch.cat([reverse_scan(x, decay) for x, decay in zip(xs, decays, strict=True)])
    assert torch.equal(reverse_scan(torch.cat(xs), torch.cat(decays), torch.full((4,), 1e6)), alone)


def test_reverse_scan_of_no_steps_is_empty() -> None:
    assert reverse_scan(torch.zeros(0, 3), torch.zeros(0, 3), torch.ones(3)).shape == (0, 3)
    assert reverse_scan(torch.zeros(0, 3), 0.5).shape == (0, 3)


def test_reverse_scan_does_not_modify_its_inputs() -> None:
    inputs = x, decay, initial = torch.randn(9, 2), torch.rand(9, 2), torch.randn(2)
    before = [tensor.clone() for tensor in inputs]
    y = reverse_scan(x, decay, initial)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert y.data_ptr() != x.data_ptr()
    assert reverse_scan(x[:1], 0.5).data_ptr() != x.data_ptr()


def test_reverse_scan_takes_expanded_and_transposed_inputs() -> None:
    x, decay = torch.randn(1, 1, dtype=torch.float64).expand(5, 3), torch.rand(3, 5, dtype=torch.float64).T
    torch.testing.assert_close(reverse_scan(x, decay), loop_scan(x, decay), **EXACT)


def test_reverse_scan_promotes_dtypes_including_integers_and_booleans() -> None:
    x = torch.tensor([1, 2, 3])
    assert reverse_scan(x, torch.tensor([True, False, True])).tolist() == [3.0, 2.0, 3.0]
    assert reverse_scan(x.float(), torch.ones(3, dtype=torch.float64)).dtype == torch.float64
    assert reverse_scan(x.float(), torch.tensor(1.0, dtype=torch.float64)).dtype == torch.float32


def test_wrong_shapes_raise_with_the_argument_name() -> None:
    x = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"decay has shape \[4\], expected \[4, 4\]"):
        reverse_scan(x, torch.zeros(4))
    with pytest.raises(ValueError, match=r"initial has shape \[4, 1\], expected \[4\]"):
        reverse_scan(x, 0.9, torch.zeros(4, 1))
    with pytest.raises(ValueError, match=r"x has shape \[\]"):
        reverse_scan(torch.tensor(1.0), 0.9)
