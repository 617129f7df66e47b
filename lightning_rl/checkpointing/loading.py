"""Makes an algorithm from a checkpoint, or copies parameters of another run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

import lightning_rl
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, check_format
from lightning_rl.files import read_data
from lightning_rl.options import default_groups, parameters_of, with_changes
from lightning_rl.training.normalizers import reward_scale
from lightning_rl.training.parameter_groups import PARTS, Part, part_of
from lightning_rl.validation import ConfigurationError, check, constructor_options, import_class, loading

_GIVEN_TWICE = re.compile(r"got multiple values for keyword argument '(\w+)'")


def from_checkpoint(
    cls: type[Any],
    source: str | Path | IO[bytes],
    map_location: Any,  # as torch.load has it
    strict: bool | None,
    weights_only: bool | None,
    trust: Sequence[str],
    given: Mapping[str, Any],
) -> Any:  # an instance of `cls`
    """Return an algorithm of a class from its checkpoint, with the options `given` changed."""
    checkpoint = read_data(source, map_location or _nearest_device, weights_only, "checkpoint_path")
    check_format(checkpoint)
    stored, saved = checkpoint["hyper_parameters"], checkpoint[CHECKPOINT_KEY]["algorithm"]
    with loading(trust):
        path = stored.get("_class_path")  # Lightning's command line adds it
        is_own = saved == cls.__name__ and not cls.__module__.startswith("lightning_rl.")  # and may have been moved
        algorithm = cls if path is None or is_own else import_class("_class_path", path, LightningModule)
        options = constructor_options(algorithm, stored)
        # A user's class that adds no options can be loaded as its base class. The constructor names unknown options.
        adds_options = saved != algorithm.__name__ and options.keys() - {x.name for x in parameters_of(algorithm)}
        is_other = saved in dir(lightning_rl) and saved not in {base.__name__ for base in algorithm.__mro__}
        if is_other or adds_options or not issubclass(algorithm, cls):
            raise ConfigurationError(
                f"checkpoint_path={str(source)!r} is a checkpoint of {saved}, not of {cls.__name__}: "
                f"use {saved}.load_from_checkpoint"
            )
        module = _construct(algorithm, options, with_changes(stored, given, default_groups(algorithm)))
        module.configure_model()
    default, state = module.strict_loading, checkpoint["state_dict"]
    module.strict_loading = default if strict is None else strict
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(state, strict=module.strict_loading)
    module.strict_loading = default
    return module.to(next((x.device for x in state.values()), torch.device("cpu")))


def _construct(algorithm: type[Any], stored: dict[str, Any], changes: Mapping[str, Any]) -> Any:
    """Construct an algorithm from stored options, without the options that its class sets for a base class."""
    while True:
        try:
            return algorithm(**{**stored, **changes})
        except TypeError as error:
            match = _GIVEN_TWICE.search(str(error))
            if match is None or match[1] not in stored:
                raise
            fixed = match[1]
            check(fixed not in changes, fixed, changes.get(fixed), f"no value, since {algorithm.__name__} sets it")
            stored = {name: value for name, value in stored.items() if name != fixed}


def _nearest_device(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Return None to keep a tensor's device, or the storage on the CPU if this machine has no such device."""
    found, (kind, _, index) = torch.accelerator.current_accelerator(check_available=True), location.partition(":")
    is_here = found is not None and found.type == kind and int(index or 0) < torch.accelerator.device_count()
    return None if kind == "cpu" or is_here else storage.cpu()  # type: ignore[no-untyped-call]


class WarmStart(NamedTuple):
    """Names of the tensors that were loaded, and of all others with the reason; `str` gives a report.

    Attributes:
        loaded: Tensors that were loaded.
        other_shape: Not loaded because the shapes differ: name → (shape in the module, shape in the checkpoint). Also
            counts of running statistics whose mean has another shape.
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
    module: Any,  # an algorithm
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
    other_shape = {n: (tuple(own[n].shape), tuple(stored[n].shape)) for n in both if own[n].shape != stored[n].shape}
    # The count of running statistics would give weight to a mean and variance that do not fit.
    other_shape |= {n: ((), ()) for n in both if n.endswith(".count") and f"{n[:-5]}mean" in other_shape}
    result = WarmStart(
        loaded=[name for name in both if name not in other_shape and name not in other_scale],
        other_shape=other_shape,
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
