"""Begin a run with parameters of another one: what fits is taken over, what does not is listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_rl.training.normalizers import reward_scale
from lightning_rl.training.parameter_groups import PARTS, Part, part_of
from lightning_rl.validation import ConfigurationError, check


class WarmStart(NamedTuple):
    """What became of each tensor of the parts that were asked for.

    Attributes:
        loaded: Names of those taken over.
        other_shape: Those of another shape here, left as they were: name → (shape here, shape in the checkpoint).
        other_scale: Those of a reward normaliser that divides by something else, left as they were.
        not_stored: Those that the checkpoint does not have, left as they were.
        not_here: Those that only the checkpoint has.
    """

    loaded: list[str]
    other_shape: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    other_scale: list[str]
    not_stored: list[str]
    not_here: list[str]

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors were taken over: {', '.join(self.loaded) or 'none'}"]
        shapes = [f"{name} {here}, stored {stored}" for name, (here, stored) in self.other_shape.items()]
        for names, what in (
            (shapes, "left as they were, since their shapes differ"),
            (self.other_scale, "left as they were, since normalization.rewards is another"),
            (self.not_stored, "left as they were, since the checkpoint does not have them"),
            (self.not_here, "not used, since nothing here is called so"),
        ):
            if names:
                lines.append(f"{len(names)} {what}: {', '.join(names)}")
        return "\n  ".join(lines)


def warm_start(
    module: LightningModule, checkpoint: Mapping[str, Any], parts: Sequence[Part] | None, source: str
) -> WarmStart:
    """Copy into `module` what fits of the parameters in a checkpoint.

    Args:
        module: An algorithm.
        checkpoint: Of the same algorithm or another one.
        parts: Those to take; None takes all, as far as they are there.
        source: Where it comes from, for errors.

    Raises:
        ConfigurationError: There is no such part, or nothing of one that was asked for fits.
    """
    for part in parts or ():
        check(part in PARTS, "init_parts", part, f"some of {', '.join(PARTS)}")
    wanted = set(parts or PARTS)
    own: dict[str, Any] = {name: x for name, x in module.state_dict().items() if part_of(name) in wanted}
    stored: Mapping[str, Tensor] = checkpoint["state_dict"]
    given = {name: x for name, x in stored.items() if part_of(name) in wanted}
    both = [name for name in own if name in given]
    scales = [reward_scale(x["normalization"]["rewards"]) for x in (module.hparams, checkpoint["hyper_parameters"])]
    other_scale = [name for name in both if name.startswith("reward_normalizer.") and scales[0] != scales[1]]
    result = WarmStart(
        loaded=[name for name in both if own[name].shape == given[name].shape and name not in other_scale],
        other_shape={n: (tuple(own[n].shape), tuple(given[n].shape)) for n in both if own[n].shape != given[n].shape},
        other_scale=other_scale,
        not_stored=[name for name in own if name not in given],
        not_here=[name for name in given if name not in own],
    )
    filled = {part_of(name) for name in result.loaded}
    for part in parts or ():
        if part not in filled:
            raise ConfigurationError(f"init_from={source!r}: nothing of the part {part!r} fits. {result}")
    if not filled:
        raise ConfigurationError(f"init_from={source!r}: nothing fits. {result}")
    with torch.no_grad():
        for name in result.loaded:
            own[name].copy_(given[name])
    return result
