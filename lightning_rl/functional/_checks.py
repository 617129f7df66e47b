"""Checks of shapes and ranges, for the places where broadcasting would silently give a wrong number.

All look at shapes and Python numbers only: none reads a tensor's values, so none makes the host wait for the
device.
"""

import torch
from torch import Tensor


def same_shape(**tensors: Tensor) -> None:
    """Raise unless all tensors have the shape of the first.

    Args:
        **tensors: The tensors by the names to call them in the error.

    Raises:
        ValueError: If a shape differs from the first one.
    """
    (reference, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != first.shape:
            expected = f"expected {list(first.shape)} like {reference}"
            raise ValueError(f"{name} has shape {list(tensor.shape)}, {expected}")


def broadcasts(like: Tensor, **coefficients: Tensor | float) -> None:
    """Raise unless each coefficient is a scalar or broadcasts to `like` with as many dimensions.

    The number of dimensions must agree because broadcasting aligns the last ones: a ``[T]`` tensor would be
    taken for one of shape ``[B]`` whenever ``T == B``.

    Args:
        like: The tensor that the coefficients are applied to.
        **coefficients: The coefficients by the names to call them in the error.

    Raises:
        ValueError: If a coefficient does not fit.
    """
    for name, value in coefficients.items():
        if isinstance(value, Tensor) and value.ndim > 0:
            fits = all(n in (1, m) for n, m in zip(value.shape, like.shape, strict=False))
            if value.ndim != like.ndim or not fits:
                expected = f"expected {list(like.shape)}, 1 in some of these places, or a scalar"
                raise ValueError(f"{name} has shape {list(value.shape)}, {expected}")


def not_negative(**numbers: Tensor | float | None) -> None:
    """Raise if a Python number is negative or NaN; tensors are taken on trust.

    Args:
        **numbers: The numbers by the names to call them in the error.

    Raises:
        ValueError: If a number is below 0 or NaN.
    """
    for name, number in numbers.items():
        if number is not None and not isinstance(number, Tensor) and not number >= 0:
            raise ValueError(f"{name} is {number}, expected a number >= 0")


def above_one(**numbers: float | None) -> None:
    """Raise if a number is not above 1.

    Args:
        **numbers: The numbers by the names to call them in the error.

    Raises:
        ValueError: If a number is 1 or below, or NaN.
    """
    for name, number in numbers.items():
        if number is not None and not number > 1:
            raise ValueError(f"{name} is {number}, expected a number > 1")


def clip_range(like: Tensor, clip_range: Tensor | float) -> None:
    """Raise unless `clip_range` is a number >= 0 or a tensor that broadcasts to `like`.

    Args:
        like: What is to be clipped.
        clip_range: The argument of that name.

    Raises:
        ValueError: If it does not fit or is negative.
    """
    broadcasts(like, clip_range=clip_range)
    not_negative(clip_range=clip_range)


def computation_dtype(*arguments: Tensor | float | None) -> torch.dtype:
    """Return the dtype to compute in: the promoted one, but float32 at least.

    Sums over time or over a batch lose too much in the 8 bits of bfloat16. Scalars do not take part,
    as in torch.

    Args:
        *arguments: At least one tensor; those with dimensions decide. Numbers and None are passed over.

    Returns:
        A floating-point dtype of 32 bits or more.
    """
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    dtype, *others = [a.dtype for a in tensors if a.ndim > 0] or [tensors[0].dtype]
    for other in others:
        dtype = torch.promote_types(dtype, other)
    return dtype if dtype.is_floating_point and dtype.itemsize >= 4 else torch.float32
