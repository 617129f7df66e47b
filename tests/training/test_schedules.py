"""Schedules: each kind with values by hand, and errors."""

import ast

import pytest
import yaml

from lightning_rl.training.schedules import parse_schedule
from lightning_rl.validation import ConfigurationError

STEPS = [[100, 1.0], [200, 3.0], [400, 2.0]]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, {0: 0.5, 10**9: 0.5}),
        ({"kind": "constant", "value": 2}, {0: 2.0, 7: 2.0}),
        ({"kind": "linear", "start": 1.0, "end": 0.2, "over": 1000}, {0: 1.0, 250: 0.8, 1000: 0.2, 5000: 0.2}),
        ({"kind": "linear", "start": 0, "end": 4}, {0: 0.0, 100: 0.5, 800: 4.0, 900: 4.0}),
        # (1 - cos 60°) / 2 = 1 / 4 of the way after a third of the time.
        ({"kind": "cosine", "start": 8.0, "end": 4.0, "over": 300}, {0: 8.0, 100: 7.0, 150: 6.0, 200: 5.0, 301: 4.0}),
        ({"kind": "cosine", "start": 1.0, "end": 0.0, "over": None}, {0: 1.0, 400: 0.5, 800: 0.0}),
        ({"kind": "piecewise", "points": STEPS}, {0: 1.0, 199: 1.0, 200: 3.0, 399: 3.0, 400: 2.0, 999: 2.0}),
        (
            {"kind": "piecewise", "points": STEPS, "interpolate": True},
            {0: 1.0, 100: 1.0, 150: 2.0, 200: 3.0, 300: 2.5, 400: 2.0, 999: 2.0},
        ),
    ],
)
def test_schedule_values_by_hand(value, expected):
    schedule = parse_schedule("x", value)
    assert {step: schedule.at(step, 800) for step in expected} == pytest.approx(expected, rel=1e-12)


def test_only_schedules_without_over_need_the_length_of_the_run():
    line = {"kind": "linear", "start": 1, "end": 0}
    assert parse_schedule("x", line).over_run
    assert parse_schedule("x", line).at(0, None) == 1
    for value in (1.0, line | {"over": 5}, {"kind": "piecewise", "points": STEPS}):
        assert not parse_schedule("x", value).over_run
    assert not parse_schedule("x", {"kind": "constant", "value": 1}).varies


def test_schedule_may_reach_an_exclusive_bound():
    line = {"kind": "linear", "start": 1, "end": 0, "over": 10}
    assert parse_schedule("x", line, above=0).at(10, None) == 0
    for value in (0, {"kind": "constant", "value": 0}):
        with pytest.raises(ConfigurationError, match=r"x.*=0 .* above 0"):
            parse_schedule("x", value, above=0)


LINE = {"kind": "linear", "start": 1, "end": 0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fast", r"x='fast' .* a number"),
        (True, r"x=True .* a number"),
        ({}, r"x: kind=None .* one of constant, linear, cosine, piecewise"),
        ({"kind": "exponential"}, r"x: kind='exponential' .* one of constant"),
        ({"kind": "linear", "start": 1}, r"x=.* expected start, end beside kind=linear, and optionally over"),
        (LINE | {"steps": 5}, r"x=.* expected start, end beside kind=linear, and optionally over"),
        (LINE | {"over": 0}, r"x: over=0 .* a number of environment steps, or null"),
        (LINE | {"over": 99.5}, r"x: over=99\.5 .* a number of environment steps"),
        (LINE | {"end": -0.1}, r"x: end=-0\.1 .* at least 0 and at most 1"),
        (LINE | {"start": 1.5}, r"x: start=1\.5 .* at least 0 and at most 1"),
        ({"kind": "constant", "value": float("nan")}, r"x: value=nan"),
        ({"kind": "piecewise", "points": []}, r"x: points=\[\] .* a list of \[environment steps, value\]"),
        ({"kind": "piecewise", "points": [[5, 1], [5, 0]]}, r"x: points=.* ordered by steps"),
        ({"kind": "piecewise", "points": [[0.5, 1]]}, r"x: points=.* a list of"),
        ({"kind": "piecewise", "points": [[0, 2]]}, r"x: points=2 .* at most 1"),
        ({"kind": "piecewise", "points": [[0, 1]], "interpolate": 1}, r"x: interpolate=1 .* true or false"),
    ],
)
def test_invalid_schedules_are_refused(value, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_schedule("x", value, at_least=0, at_most=1)


@pytest.mark.parametrize("value", ["linear", -1.0])
def test_error_of_a_scheduled_option_shows_a_valid_example(value):
    with pytest.raises(ConfigurationError) as refused:
        parse_schedule("clip_range", value, above=0)
    message, _, text = str(refused.value).partition(" such as ")
    assert message == f"clip_range={value!r} is not valid: expected a number above 0, or a schedule"
    example = yaml.safe_load(text)
    assert example == ast.literal_eval(text)
    assert parse_schedule("clip_range", example, above=0).varies


def test_steps_may_be_whole_floats():
    line = parse_schedule("x", {"kind": "linear", "start": 1.0, "end": 0.0, "over": 1e3})
    points = parse_schedule("x", {"kind": "piecewise", "points": [[0, 1.0], [1e3, 0.5]]})
    assert (line.at(500, None), points.at(999, None), points.at(1000, None)) == (0.5, 1.0, 0.5)
    with pytest.raises(ConfigurationError, match=r"over=1.5 .* a number of environment steps"):
        parse_schedule("x", {"kind": "linear", "start": 1.0, "end": 0.0, "over": 1.5})
