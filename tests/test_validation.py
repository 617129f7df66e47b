"""Checks of user input."""

from collections import OrderedDict
from functools import partial

import pytest
import torch

from lightning_rl.validation import (
    ConfigurationError,
    check_number,
    check_positive_int,
    how_to_install,
    import_class,
    instantiate,
    to_class_spec,
)


@pytest.mark.parametrize("value", [0, -3, 1.0, "1", None, True])
def test_only_positive_integers_pass(value):
    with pytest.raises(ConfigurationError) as caught:
        check_positive_int("count", value)
    assert str(caught.value) == f"count={value!r} is not valid: expected an integer of at least 1"
    check_positive_int("count", 1)


@pytest.mark.parametrize(
    ("value", "bounds", "expected"),
    [
        (1.1, {"at_least": 0, "at_most": 1}, "a number at least 0 and at most 1"),
        (-0.1, {"at_least": 0, "at_most": 1}, "a number at least 0 and at most 1"),
        (0, {"above": 0}, "a number above 0"),
        (float("nan"), {"above": 0}, "a number above 0"),
        (float("inf"), {"above": 0}, "a number above 0"),
        ("1", {"above": 0}, "a number above 0"),
        (True, {"above": 0}, "a number above 0"),
        (None, {"above": 0}, "a number above 0"),
    ],
)
def test_number_outside_its_bounds_is_refused(value, bounds, expected):
    with pytest.raises(ConfigurationError) as caught:
        check_number("gamma", value, **bounds)
    assert str(caught.value) == f"gamma={value!r} is not valid: expected {expected}"


def test_bounds_themselves_pass():
    check_number("gamma", 0, at_least=0, at_most=1)
    check_number("gamma", 1.0, at_least=0, at_most=1)
    check_number("rate", 1e-300, above=0)


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        ("torch.optim.SGD", {"class_path": "torch.optim.SGD", "init_args": {}}),
        (torch.nn.Linear, {"class_path": "torch.nn.modules.linear.Linear", "init_args": {}}),
        (partial(OrderedDict, a=1), {"class_path": "collections.OrderedDict", "init_args": {"a": 1}}),
        ({"class_path": "x.Y"}, {"class_path": "x.Y", "init_args": {}}),
        ({"class_path": "x.Y", "init_args": None}, {"class_path": "x.Y", "init_args": {}}),
    ],
)
def test_class_is_reduced_to_plain_data(value, spec):
    assert to_class_spec("field", value) == spec


@pytest.mark.parametrize("value", [lambda: None, partial(OrderedDict, {}), torch.relu, 5])
def test_what_cannot_be_rebuilt_from_a_name_is_refused(value):
    with pytest.raises(ConfigurationError, match=r"^field=.* cannot be stored in a checkpoint: expected a class"):
        to_class_spec("field", value)


def test_class_of_a_function_is_refused():
    class Local:
        pass

    with pytest.raises(ConfigurationError, match="cannot be stored"):
        to_class_spec("field", Local)


def test_dict_with_other_keys_is_refused():
    with pytest.raises(ConfigurationError, match=r"expected no keys besides .*, got \['args'\]$"):
        to_class_spec("field", {"class_path": "x.Y", "args": {}})


@pytest.mark.parametrize("path", ["Y", "no.such.Y", "collections.Nothing", ".Y", ""])
def test_path_that_leads_nowhere_is_refused(path):
    with pytest.raises(ConfigurationError, match=r"^field=.* cannot be imported .*: expected package"):
        import_class("field", path, object)


def test_misspelled_class_gets_a_suggestion():
    with pytest.raises(ConfigurationError, match=r"in PYTHONPATH; did you mean json.JSONEncoder\?$"):
        import_class("field", "json.JSONEncodr", object)


def test_class_of_a_missing_module_gets_no_suggestion():
    with pytest.raises(ConfigurationError, match=r"in PYTHONPATH; if the class was moved"):
        import_class("field", "no.such.init", object)


def test_path_of_no_class_is_refused():
    with pytest.raises(ConfigurationError, match=r"^field='os.path.join' is not valid: expected the path"):
        import_class("field", "os.path.join", object)


class TakesTuples:
    """Records the types of its arguments."""

    def __init__(
        self, pair: tuple[int, int], size: "int | tuple[int, ...]", rows: list[tuple[int, int]], other=None
    ) -> None:
        self.types = [type(x) for x in (pair, size, rows, other)]


def test_lists_become_tuples_where_a_class_takes_only_tuples():
    spec = {"class_path": f"{__name__}.TakesTuples", "init_args": {"pair": [1, 2], "size": [3], "rows": [[4, 5]]}}
    made = instantiate("field", {**spec, "init_args": {**spec["init_args"], "other": [6]}}, object)
    assert made.types == [tuple, tuple, list, list]


def test_arguments_that_a_class_refuses_are_named():
    spec = {"class_path": "torch.nn.Linear", "init_args": {"width": 3}}
    with pytest.raises(ConfigurationError, match=r"^field: torch.nn.Linear refused the arguments \{'width': 3\}: "):
        instantiate("field", spec, torch.nn.Module)
    layer = instantiate(
        "field", {"class_path": "torch.nn.Linear", "init_args": {"bias": False}}, torch.nn.Module, 2, out_features=3
    )
    assert layer.weight.shape == (3, 2) and layer.bias is None


def test_commands_that_install_an_extra_can_be_typed_on_windows(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("os.name", "nt")
        said = how_to_install("video")
    assert said == 'pip install "lightning-rl[video]", in a checkout pip install -c constraints.txt -e ".[video]"'
