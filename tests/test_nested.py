"""Functions for nested data: single leaves, dicts and tuples."""

import pytest
import torch
from gymnasium import spaces

from lightning_rl.nested import (
    first_leaf,
    leaves,
    map_leaves,
    map_space,
    map_stacked,
    nested_paths,
    part_at,
    replace_leaves,
    space_leaves,
    without,
)

X = {"b": (torch.tensor(1), {"c": torch.tensor(2)}), "a": torch.tensor(3)}


def test_map_leaves_keeps_structure_and_order():
    assert map_leaves(lambda x: x.item() + 1, X) == {"b": (2, {"c": 3}), "a": 4}
    assert map_leaves(lambda x, y: (x * y).item(), X, X) == {"b": (1, {"c": 4}), "a": 9}
    assert [x.item() for x in leaves(X)] == [1, 2, 3]
    assert first_leaf(X).item() == 1


def test_nested_paths_keeps_keys_with_dots_apart():
    leaf = spaces.Discrete(2)
    assert nested_paths(spaces.Dict({"a.b": leaf, "a": spaces.Dict({"b": leaf})})) == {"a.b": "a.b", "a": {"b": "a.b"}}
    assert nested_paths(spaces.Tuple([leaf])) == ("0",)


def test_single_leaf_is_nested_data():
    leaf = torch.ones(2)
    assert torch.equal(map_leaves(lambda x, y: x + y, leaf, leaf), 2 * leaf)
    assert leaves(leaf) == [leaf] and first_leaf(leaf) is leaf


def test_map_stacked_stacks_leaves():
    stacked = map_stacked(torch.stack, [X, X, X])
    assert stacked["b"][1]["c"].tolist() == [2, 2, 2]
    assert map_stacked(torch.stack, [torch.ones(2)] * 3).shape == (3, 2)


def test_different_structures_raise():
    with pytest.raises(ValueError, match="shorter"):
        map_leaves(lambda x, y: x, (1, 2), (1,))
    with pytest.raises(KeyError):
        map_leaves(lambda x, y: x, {"a": 1}, {"b": 1})


def test_map_space_has_the_structure_of_the_elements():
    space = spaces.Dict(
        {"arm": spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (3,))]), "on": spaces.MultiBinary(4)}
    )
    assert map_space(lambda leaf: leaf.shape, space) == {"arm": ((), (3,)), "on": (4,)}
    assert list(space_leaves(space)) == ["arm.0", "arm.1", "on"]
    assert space_leaves(spaces.Discrete(3)) == {"": spaces.Discrete(3)}
    sample = space.sample()
    assert map_leaves(lambda x: x, sample).keys() == map_space(lambda leaf: leaf, space).keys()


ARM = spaces.Dict({"arm": spaces.Tuple([spaces.Discrete(2), spaces.Dict({"x": spaces.Box(0, 1, (3,))})])})


def test_part_at_finds_parts_of_spaces_and_elements():
    assert nested_paths(ARM) == {"arm": ("arm.0", {"x": "arm.1.x"})}
    assert nested_paths(spaces.Discrete(2)) == ""
    x = {"arm": (1, {"x": 2})}
    for path, part in (("", x), ("arm", (1, {"x": 2})), ("arm.0", 1), ("arm.1.x", 2)):
        assert part_at(x, path) == part
    for path, leaf in space_leaves(ARM).items():
        assert part_at(ARM, path) is leaf


def test_replace_leaves_keeps_the_structure():
    replaced = replace_leaves(lambda path, leaf: spaces.Discrete(9) if path == "arm.1.x" else leaf, ARM)
    assert replaced == spaces.Dict({"arm": spaces.Tuple([spaces.Discrete(2), spaces.Dict({"x": spaces.Discrete(9)})])})


def test_without_removes_parts_of_dicts_and_spaces():
    space = spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2), "c": spaces.Discrete(3)}), "d": spaces.Discrete(4)})
    x = {"a": {"b": 0, "c": 1}, "d": 2}
    assert without(x, ["a.b"]) == {"a": {"c": 1}, "d": 2}
    assert without(x, ["a", "d"]) == {} and without(x, ["b"]) == x
    assert without(space, ["a.b"]) == spaces.Dict(
        {"a": spaces.Dict({"c": spaces.Discrete(3)}), "d": spaces.Discrete(4)}
    )
    assert without((0, 1), ["0"]) == (0, 1)
    assert without(x, ["a.b", "a.c"]) == {"d": 2}
    assert list(without(space, [f"a.{key}" for key in space["a"]])) == [key for key in space if key != "a"]
