"""Checks of shapes and ranges. They read no tensor values, so that the host never waits for the device."""

import torch
from torch import Tensor


def same_shape(**tensors: Tensor) -> None:
    """Raise a `ValueError` unless all tensors have the shape of the first."""
    (reference, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != first.shape:
            expected = f"expected {list(first.shape)} like {reference}"
            raise ValueError(f"{name} has shape {list(tensor.shape)}, {expected}")


def one_dimension(**tensors: Tensor) -> None:
    """Raise a `ValueError` unless all tensors are `[N]`."""
    for name, tensor in tensors.items():
        if tensor.ndim != 1:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected [N]: flatten time and batch")


def broadcasts(like: Tensor, **coefficients: Tensor | float) -> None:
    """Raise a `ValueError` unless each coefficient is a scalar or broadcasts to `like` with as many dimensions.

    The number of dimensions must agree, because a `[T]` tensor would be taken for `[B]` whenever `T == B`.
    """
    for name, value in coefficients.items():
        if isinstance(value, Tensor) and value.ndim > 0:
            fits = all(n in (1, m) for n, m in zip(value.shape, like.shape, strict=False))
            if value.ndim != like.ndim or not fits:
                expected = f"expected {list(like.shape)}, 1 in some of these places, or a scalar"
                raise ValueError(f"{name} has shape {list(value.shape)}, {expected}")


def not_negative(**numbers: Tensor | float | None) -> None:
    """Raise a `ValueError` if a Python number is negative or NaN; the values of tensors are not checked."""
    for name, number in numbers.items():
        if number is not None and not isinstance(number, Tensor) and not number >= 0:
            raise ValueError(f"{name} is {number}, expected a number >= 0")


def clip_ranges(like: Tensor, **ranges: Tensor | float) -> None:
    """Raise a `ValueError` unless each range broadcasts to `like` and is not negative."""
    broadcasts(like, **ranges)
    not_negative(**ranges)


def computation_dtype(*arguments: Tensor | float | None) -> torch.dtype:
    """Return the promoted dtype of the tensors, but at least float32, to compute in.

    Sums over time or over a batch lose too much in the 8 bits of bfloat16. As in torch, scalar tensors only count if
    there are no others.
    """
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    dtype, *others = [a.dtype for a in tensors if a.ndim > 0] or [tensors[0].dtype]
    for other in others:
        dtype = torch.promote_types(dtype, other)
    return dtype if dtype.is_floating_point and dtype.itemsize >= 4 else torch.float32
