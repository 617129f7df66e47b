"""Schedules: values that depend on the environment step, described as plain data."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_rl.validation import (
    ConfigurationError,
    check,
    check_bool,
    check_number,
    is_int,
    is_list,
    is_one_of,
    whole_number,
)

Scheduled = float | dict[str, Any]
"""A number or a schedule, as `parse_schedule` accepts it."""
OR_SCHEDULE = ", or a schedule such as {'kind': 'linear', 'start': 0.2, 'end': 0.0}"
"""End of error messages about options that may also be a schedule. The example is valid in Python and in YAML."""


@dataclass(frozen=True)
class Schedule:
    """Values at environment steps, and a `curve` between them; constant before the first step and after the last.

    The curve is `constant`, `linear`, or half a period of a `cosine`. The last step may be None for the end of the run:
    then `over_run` is true, and the value needs the planned number of steps.
    """

    steps: tuple[int | None, ...]
    values: tuple[float, ...]
    curve: Literal["constant", "linear", "cosine"] = "constant"

    @property
    def over_run(self) -> bool:
        return None in self.steps

    @property
    def varies(self) -> bool:
        return len(self.values) > 1

    def at(self, env_steps: int, planned: int | None) -> float:
        """Return the value at a step of a run with `planned` steps; the first value if this number is not known yet."""
        steps = [planned or math.inf if step is None else step for step in self.steps]
        following = bisect_right(steps, env_steps)
        last = max(0, following - 1)
        if following in (0, len(steps)) or self.curve == "constant":
            return self.values[last]
        done = (env_steps - steps[last]) / (steps[following] - steps[last])
        if self.curve == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.values[last] * (1 - done) + self.values[following] * done


def parse_schedule(
    field: str,
    value: Scheduled,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Schedule:
    """Return the schedule that the value of an option describes.

    * a number, or `{"kind": "constant", "value": a}`
    * `{"kind": "linear", "start": a, "end": b, "over": steps}`: linear from a at step 0 to b, then constant. Without
      `over`, the line ends with the run.
    * `{"kind": "cosine", ...}`: the same with half a period of a cosine
    * `{"kind": "piecewise", "points": [[0, a], [n, b], ...], "interpolate": False}`: the value of the last point
      reached, or with `interpolate` linear between points; constant before the first and after the last

    Numbers must be above `above`, which schedules may reach; all values must be between `at_least` and `at_most`.
    Otherwise a `ConfigurationError` names the `field`.
    """
    if not isinstance(value, Mapping):
        try:
            check_number(field, value, above=above, at_least=at_least, at_most=at_most)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}{OR_SCHEDULE}") from None
        return Schedule((0,), (float(value),))
    lowest = above if at_least is None else at_least

    def number(name: str, given: Any) -> float:  # checked here
        check_number(f"{field}: {name}", given, at_least=lowest, at_most=at_most)
        return float(given)

    kind = value.get("kind")
    check(is_one_of(kind, _KEYS), f"{field}: kind", kind, "one of " + ", ".join(_KEYS))
    keys, optional = _KEYS[kind]
    expected = f"{', '.join(keys)} beside kind={kind}" + f", and optionally {optional}" * bool(optional)
    check({*keys} <= value.keys() <= {"kind", *keys, optional}, field, value, expected)
    if kind == "constant":
        check_number(f"{field}: value", value["value"], above=above, at_least=at_least, at_most=at_most)
        return Schedule((0,), (float(value["value"]),))
    if kind == "piecewise":
        return _piecewise(field, value["points"], value.get("interpolate", False), number)
    over = whole_number(value.get("over"))
    is_number = over is None or (is_int(over) and over >= 1)
    check(is_number, f"{field}: over", over, "a number of environment steps, or null")
    ends = number("start", value["start"]), number("end", value["end"])
    return Schedule((0, over), ends, "cosine" if kind == "cosine" else "linear")


# Required keys of each kind, and the optional one.
_KEYS: dict[Any, tuple[tuple[str, ...], str]] = {
    "constant": (("value",), ""),
    "linear": (("start", "end"), "over"),
    "cosine": (("start", "end"), "over"),
    "piecewise": (("points",), "interpolate"),
}


def _piecewise(field: str, points: Any, interpolate: bool, number: Callable[[str, Any], float]) -> Schedule:
    check_bool(f"{field}: interpolate", interpolate)

    def is_point(x: object) -> bool:
        return is_list(x) and len(x) == 2 and is_int(whole_number(x[0])) and x[0] >= 0

    expected = "a list of [environment steps, value], ordered by steps"
    check(is_list(points) and len(points) > 0 and all(map(is_point, points)), f"{field}: points", points, expected)
    steps, values = tuple(int(step) for step, _ in points), tuple(number("points", value) for _, value in points)
    check(list(steps) == sorted(set(steps)), f"{field}: points", points, expected)
    return Schedule(steps, values, "linear" if interpolate else "constant")
