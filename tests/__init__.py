"""Tests; in their processes the entry points of installed packages, which every Trainer looks for, are read once."""

import functools
import importlib.metadata

# Before Lightning is imported: reading the metadata of some hundred packages takes as long as a rollout of a test.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
