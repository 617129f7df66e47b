"""Begin a run with parameters of another one: what fits is taken over, what does not is listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lightning_rl.validation import ConfigurationError, check

Part = Literal["policy", "critic", "normalizers"]
PARTS: tuple[Part, ...] = get_args(Part)


class WarmStart(NamedTuple):
    """What became of each tensor of the parts that were asked for.

    Attributes:
        taken: Names of those taken over.
        other_shape: Those of another shape here, left as they were: name → (shape here, shape in the checkpoint).
        not_stored: Those that the checkpoint does not have, left as they were.
        not_here: Those that only the checkpoint has.
    """

    taken: list[str]
    other_shape: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    not_stored: list[str]
    not_here: list[str]

    def __str__(self) -> str:
        lines = [f"{len(self.taken)} tensors were taken over: {', '.join(self.taken) or 'none'}"]
        shapes = [f"{name} {here}, stored {stored}" for name, (here, stored) in self.other_shape.items()]
        for names, what in (
            (shapes, "left as they were, since their shapes differ"),
            (self.not_stored, "left as they were, since the checkpoint does not have them"),
            (self.not_here, "not used, since nothing here is called so"),
        ):
            if names:
                lines.append(f"{len(names)} {what}: {', '.join(names)}")
        return "\n  ".join(lines)


def part_of(name: str) -> Part | None:
    """Return the part that a tensor of an algorithm's `state_dict` belongs to; None for what counts a run."""
    if "normalizer" in name and not name.startswith("policy.value_"):  # in whose units the critic predicts
        return "normalizers"
    if not name.startswith("policy."):
        return None
    return "critic" if name.startswith(("policy.critic_", "policy.value_")) else "policy"


def warm_start(module: nn.Module, stored: Mapping[str, Tensor], parts: Sequence[Part] | None, source: str) -> WarmStart:
    """Copy into `module` what fits of `stored`.

    Args:
        module: An algorithm.
        stored: `state_dict` of the same algorithm or another one.
        parts: Those to take; None takes all, as far as they are there.
        source: Where it comes from, for errors.

    Raises:
        ConfigurationError: There is no such part, or nothing of one that was asked for fits.
    """
    for part in parts or ():
        check(part in PARTS, "init_parts", part, f"some of {', '.join(PARTS)}")
    wanted = set(parts or PARTS)
    own: dict[str, Any] = {name: x for name, x in module.state_dict().items() if part_of(name) in wanted}
    given = {name: x for name, x in stored.items() if part_of(name) in wanted}
    both = [name for name in own if name in given]
    result = WarmStart(
        taken=[name for name in both if own[name].shape == given[name].shape],
        other_shape={n: (tuple(own[n].shape), tuple(given[n].shape)) for n in both if own[n].shape != given[n].shape},
        not_stored=[name for name in own if name not in given],
        not_here=[name for name in given if name not in own],
    )
    filled = {part_of(name) for name in result.taken}
    for part in parts or ():
        if part not in filled:
            raise ConfigurationError(f"init_from={source!r}: nothing of the part {part!r} fits. {result}")
    if not filled:
        raise ConfigurationError(f"init_from={source!r}: nothing fits. {result}")
    with torch.no_grad():
        for name in result.taken:
            own[name].copy_(given[name])
    return result
