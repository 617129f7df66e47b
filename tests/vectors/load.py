"""Read the golden vectors."""

import functools
import json
from pathlib import Path
from typing import Any

import torch


@functools.cache
def load(name: str) -> Any:
    """Read `<name>.json` of this folder, turning each `{"dtype", "shape", "data"}` into a tensor.

    Everything else stays as it is: lists, numbers, and the strings "nan" and "inf". The result is kept for
    the next call, so callers must not modify it.
    """
    return json.loads((Path(__file__).parent / f"{name}.json").read_text(), object_hook=_decode)


def _decode(item: dict[str, Any]) -> Any:
    if item.keys() != {"dtype", "shape", "data"}:
        return item
    dtype = getattr(torch, item["dtype"])
    number = float if dtype.is_floating_point else int  # float() also reads "nan" and "inf"
    return torch.tensor([number(x) for x in item["data"]], dtype=dtype).reshape(item["shape"])
