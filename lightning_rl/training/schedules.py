"""Values that change over a run: functions of the environment steps, written as plain data.

A schedule depends on nothing but the clock, so that a resumed run needs no more than that to go on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_rl.validation import ConfigurationError, check, check_bool, check_number, is_int, is_one_of

Scheduled = float | dict[str, Any]
"""A number, or the description of a schedule; see `parse_schedule`."""
OR_SCHEDULE = ", or a schedule such as {'kind': 'linear', 'start': 0.2, 'end': 0.0}"
"""How errors go on that say which number an option may be; its example is Python as well as YAML."""


class Schedule(Protocol):
    """A value for every environment step."""

    @property
    def varies(self) -> bool:
        """Whether the value ever changes."""
        ...

    @property
    def over_run(self) -> bool:
        """Whether it needs to know how long the run is."""
        ...

    def at(self, env_steps: int, planned: int | None) -> float:
        """Return the value at a step, given also the planned number of them; None if that is not known yet."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same value at every step."""

    value: float
    varies = False
    over_run = False

    def at(self, env_steps: int, planned: int | None) -> float:
        """Return the value."""
        return self.value


@dataclass(frozen=True)
class Ramp:
    """From one value to another on a line, or half a period of a cosine; `over` None is the whole run."""

    start: float
    end: float
    over: int | None = None
    cosine: bool = False
    varies = True

    @property
    def over_run(self) -> bool:
        """Whether it ends with the run."""
        return self.over is None

    def at(self, env_steps: int, planned: int | None) -> float:
        """Return the value; before the length of the run is known, the first."""
        length = planned if self.over is None else self.over
        done = min(1.0, env_steps / length) if length else 0.0
        if self.cosine:
            done = (1 - math.cos(math.pi * done)) / 2
        return self.start * (1 - done) + self.end * done


@dataclass(frozen=True)
class Piecewise:
    """The value of the last step that has been reached, or on lines between them."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    interpolate: bool = False
    varies = True
    over_run = False

    def at(self, env_steps: int, planned: int | None) -> float:
        """Return the value; before the first step that of the first."""
        following = bisect_right(self.steps, env_steps)
        last = max(0, following - 1)
        if following in (0, len(self.steps)) or not self.interpolate:
            return self.values[last]
        done = (env_steps - self.steps[last]) / (self.steps[following] - self.steps[last])
        return self.values[last] * (1 - done) + self.values[following] * done


def parse_schedule(
    field: str,
    value: Scheduled,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Schedule:
    """Return the schedule that a setting describes.

    Args:
        field: Name of the setting, for errors.
        value: One of

            * a number, or `{"kind": "constant", "value": a}`;
            * `{"kind": "linear", "start": a, "end": b, "over": steps}`: on a line from a at step 0 to b, and b from
              there on. Without `over`, or with None, over the planned environment steps of the run;
            * `{"kind": "cosine", ...}`, likewise, on half a period of a cosine, steepest in the middle;
            * `{"kind": "piecewise", "points": [[0, a], [n, b], ...], "interpolate": False}`: the value of the last
              point that has been reached, or with `interpolate` on lines between the points; before the first and after
              the last one the value of that.
        above: Bound of a constant, which schedules may reach but not cross.
        at_least: Bound of every value.
        at_most: Bound of every value.

    Raises:
        ConfigurationError: It describes none, or a value is out of bounds; names the field.
    """
    if not isinstance(value, Mapping):
        try:
            check_number(field, value, above=above, at_least=at_least, at_most=at_most)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}{OR_SCHEDULE}") from None
        return Constant(float(value))
    lowest = at_least if above is None else max(above, -math.inf if at_least is None else at_least)

    def number(name: str, given: Any) -> float:  # noqa: ANN401 - it is checked here
        check_number(f"{field}: {name}", given, at_least=lowest, at_most=at_most)
        return float(given)

    kind = value.get("kind")
    check(is_one_of(kind, _KEYS), f"{field}: kind", kind, "one of " + ", ".join(_KEYS))
    keys, optional = _KEYS[kind]
    missing, unknown = [key for key in keys if key not in value], {*map(str, value)} - {"kind", *keys, *optional}
    check(not missing, field, value, f"{', '.join(keys)} beside kind={kind}; missing: {', '.join(missing)}")
    check(
        not unknown,
        field,
        value,
        f"no keys but kind, {', '.join((*keys, *optional))}, got {', '.join(sorted(unknown))}",
    )
    if kind == "constant":
        check_number(f"{field}: value", value["value"], above=above, at_least=at_least, at_most=at_most)
        return Constant(float(value["value"]))
    if kind == "piecewise":
        return _piecewise(field, value["points"], value.get("interpolate", False), number)
    over = value.get("over")
    check(
        over is None or (is_int(over) and over >= 1), f"{field}: over", over, "a number of environment steps, or null"
    )
    return Ramp(number("start", value["start"]), number("end", value["end"]), over, kind == "cosine")


# Keys that each kind must have, and further ones that it may have.
_KEYS: dict[Any, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "constant": (("value",), ()),
    "linear": (("start", "end"), ("over",)),
    "cosine": (("start", "end"), ("over",)),
    "piecewise": (("points",), ("interpolate",)),
}


def _piecewise(
    field: str,
    points: Any,  # noqa: ANN401 - it is checked here
    interpolate: bool,
    number: Callable[[str, Any], float],
) -> Piecewise:
    check_bool(f"{field}: interpolate", interpolate)

    def is_point(x: object) -> bool:
        return isinstance(x, Sequence) and not isinstance(x, str) and len(x) == 2 and is_int(x[0]) and x[0] >= 0

    expected = "a list of [environment steps, value], in the order of their steps"
    is_list = isinstance(points, Sequence) and not isinstance(points, str)
    check(is_list and len(points) > 0 and all(map(is_point, points)), f"{field}: points", points, expected)
    steps, values = tuple(step for step, _ in points), tuple(number("points", value) for _, value in points)
    check(list(steps) == sorted(set(steps)), f"{field}: points", points, expected)
    return Piecewise(steps, values, interpolate)
