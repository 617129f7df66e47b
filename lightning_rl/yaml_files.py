"""Reads YAML files that somebody else may have written: as plain data, within bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lightning_rl.validation import ConfigurationError

# A configuration of a run has about 200.
_MOST_ENTRIES = 100_000


def read_yaml(path: str | Path, field: str) -> Any:  # noqa: ANN401 - YAML
    """Return the content of a YAML file: lists and dicts of plain values.

    Args:
        path: The file.
        field: The option that named it, for errors.

    Raises:
        ConfigurationError: The file cannot be read or is no YAML, names Python objects, or aliases make it huge.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        entries = _entries(yaml.compose(text, yaml.SafeLoader), {})
        content = yaml.safe_load(text) if entries <= _MOST_ENTRIES else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"{field}={str(path)!r} cannot be read: expected plain YAML: {why}") from error
    if entries > _MOST_ENTRIES:
        raise ConfigurationError(
            f"{field}={str(path)!r} has more than {_MOST_ENTRIES} entries once its aliases are followed: expected the "
            "configuration of a run"
        )
    return content


def _entries(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Return how many entries a document has with each alias followed, which takes no longer than reading it.

    Args:
        node: The document, or a part of it.
        known: The counts of parts that were met before.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = _MOST_ENTRIES + 1  # an alias of itself has no end
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if pairs else node.value
        known[id(node)] = 1 + sum(_entries(part, known) for part in parts)
    return known[id(node)]
