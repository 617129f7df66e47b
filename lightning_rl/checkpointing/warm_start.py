"""Starts a run with parameters from a checkpoint of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.checkpointing.format import CHECKPOINT_KEY
from lightning_rl.training.normalizers import reward_scale
from lightning_rl.training.parameter_groups import PARTS, Part, part_of
from lightning_rl.validation import ConfigurationError, check


class WarmStart(NamedTuple):
    """Names of the tensors that were loaded, and of all others with the reason; `str` gives a report.

    Attributes:
        loaded: Tensors that were loaded.
        other_shape: Not loaded because the shapes differ: name → (shape in the module, shape in the checkpoint).
        other_scale: Not loaded because `normalization.rewards` of the checkpoint selects another divisor.
        not_stored: Not loaded because the checkpoint does not have them.
        not_here: Tensors that only the checkpoint has.
    """

    loaded: list[str]
    other_shape: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    other_scale: list[str]
    not_stored: list[str]
    not_here: list[str]

    def __str__(self) -> str:
        shapes = [f"{name} {here}, stored {stored}" for name, (here, stored) in self.other_shape.items()]
        groups = {
            "unchanged because of their shapes": shapes,
            "unchanged because normalization.rewards differs": self.other_scale,
            "unchanged because the checkpoint does not have them": self.not_stored,
            "in the checkpoint only": self.not_here,
        }
        lines = [f"{len(self.loaded)} tensors loaded: {', '.join(self.loaded) or 'none'}"]
        lines += [f"{len(names)} {reason}: {', '.join(names)}" for reason, names in groups.items() if names]
        return "\n  ".join(lines)


def warm_start(
    module: Any,  # noqa: ANN401 - an algorithm
    checkpoint: Mapping[str, Any],
    parts: Sequence[Part] | None,
    source: str,
) -> WarmStart:
    """Copy the `parts`, or all parameters, that fit from a checkpoint of any algorithm into `module`.

    An unknown part, or one of whose tensors none fits, raises a `ConfigurationError`.
    """
    for part in parts or ():
        check(part in PARTS, "init_parts", part, f"some of {', '.join(PARTS)}")
    wanted = set(parts or PARTS)
    own: dict[str, Tensor] = {name: x for name, x in module.state_dict().items() if part_of(name) in wanted}
    stored: dict[str, Tensor] = {name: x for name, x in checkpoint["state_dict"].items() if part_of(name) in wanted}
    both = [name for name in own if name in stored]
    in_effect = module.options, checkpoint[CHECKPOINT_KEY]["options"]
    here, there = (reward_scale(options["normalization.rewards"]) for options in in_effect)
    other_scale = [name for name in both if name.startswith("reward_normalizer.") and here != there]
    result = WarmStart(
        loaded=[name for name in both if own[name].shape == stored[name].shape and name not in other_scale],
        other_shape={n: (tuple(own[n].shape), tuple(stored[n].shape)) for n in both if own[n].shape != stored[n].shape},
        other_scale=other_scale,
        not_stored=[name for name in own if name not in stored],
        not_here=[name for name in stored if name not in own],
    )
    filled = {part_of(name) for name in result.loaded}
    missing = [f"of the part {part!r} " for part in parts or () if part not in filled]
    if missing or not filled:
        raise ConfigurationError(f"init_from={source!r}: nothing {missing[0] if missing else ''}fits. {result}")
    with torch.no_grad():
        for name in result.loaded:
            own[name].copy_(stored[name])
    return result
