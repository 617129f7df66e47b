"""A digest of the code that computes: two checkouts with the same digest give the same numbers.

The digest covers every top-level definition of the package, each as its syntax tree without docstrings, comments and
imports. It does not depend on the file or the order of the definitions, so code can be moved between modules.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import Any

from record import ROOT

# Files and folders whose code only starts, displays, logs or exports a run.
NOT_COMPUTING = {
    *("__init__", "__main__", "cli", "callbacks", "tools"),
    "warning_filters",
}


class _OnlyCode(ast.NodeTransformer):
    """Removes imports, docstrings and other strings that are statements."""

    def visit_Import(self, node: ast.Import) -> None:
        """Remove the import: it names the module that holds the code."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Remove the import."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Remove a docstring."""
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else self.generic_visit(node)


def definitions(source: str) -> set[str]:
    """Return the digest of each top-level definition of a module."""
    tree: Any = _OnlyCode().visit(ast.parse(source))
    return {hashlib.sha256(ast.dump(node).encode()).hexdigest() for node in tree.body}


def digest(package: Path = ROOT / "lightning_rl") -> str:
    """Return the digest of all modules of a package that compute."""
    found: set[str] = set()
    for path in package.rglob("*.py"):
        if NOT_COMPUTING.isdisjoint(path.relative_to(package).with_suffix("").parts):
            found |= definitions(path.read_text())
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()
