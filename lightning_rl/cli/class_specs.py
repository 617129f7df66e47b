"""Class specs of dict options on the command line, in parts: `--model.optimizer.init_args.momentum 0.9`.

jsonargparse drops `init_args` from the name of an option whose type is a plain dict, so such arguments are given to it
as one dict. Options that are dataclasses need none of this.
"""

from __future__ import annotations

import ast
import json
import re
from argparse import Action
from collections.abc import Sequence
from typing import Any, get_args, get_origin

import yaml
from jsonargparse import Namespace


def as_class_spec(argument: str, actions: Sequence[Action], namespace: Namespace | None) -> str:
    """Return an argument that sets a part of a class spec as one that sets the whole of it; others as they are.

    For the parser a class spec is a dict like any other, and it takes `init_args` for a word of its own.

    Args:
        argument: `--optimizer.class_path=…`, `--optimizer.init_args.momentum=0.9`, or of one leaf of an observation
            `--network.camera.init_args.width=64`.
        actions: Of the parser.
        namespace: What was set before; a class spec that the argument replaces is taken out of it, since the parser
            fails where one takes the place of another.
    """
    option, _, text = argument.partition("=")
    part = re.fullmatch(r"--(\w+)(?:\.(?:(.+?)\.)?(class_path|init_args\.(.+)))?", option)
    if part is None or not any(action.dest == part[1] and _takes_dict(action) for action in actions):
        return argument
    name, leaf, which, key = part.groups()
    before = _plain(namespace.get(name)) if namespace else None
    if namespace and isinstance(before, dict) and "class_path" in before:
        namespace[name] = None
    if which is None:
        return argument
    leaves = before if leaf is not None and isinstance(before, dict) and "class_path" not in before else {}
    spec = before if leaf is None else leaves.get(leaf)
    spec = {"class_path": spec} if isinstance(spec, str) else dict(spec or {})
    if key is not None:
        *outer, last = key.split(".")
        arguments = spec["init_args"] = dict(spec.get("init_args") or {})
        for one in outer:
            arguments[one] = arguments = dict(arguments.get(one) or {})
        arguments[last] = _value(text)
    elif "class_path" in spec:  # what was an argument of another class
        spec = {"class_path": text}
    else:
        spec = {"class_path": text, **spec}
    return f"--{name}={json.dumps(spec if leaf is None else {**leaves, leaf: spec})}"


def _takes_dict(action: Action) -> bool:
    """Whether an option can be a dict."""
    kind = getattr(action, "_typehint", None)
    return any((get_origin(one) or one) is dict for one in (kind, *get_args(kind)))


def _plain(value: Any) -> Any:  # noqa: ANN401 - what a parser made of an option
    """Return a class as its path, and a namespace as a dict."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return value.as_dict() if isinstance(value, Namespace) else value


def _value(text: str) -> Any:  # noqa: ANN401 - of any argument
    """Return what an argument stands for; the parser has made Python of some already: `None`."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return yaml.safe_load(text)
