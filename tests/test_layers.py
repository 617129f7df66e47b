"""The folders of the package stand on floors: a module imports only from its own folder and from floors below."""

import ast
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_rl"

# From the ground up. Folders on the same floor do not import each other.
FLOORS = [
    {"functional"},
    {"rollouts"},
    {"policies"},
    {"fast", "environments"},
    {"data", "training"},
    {"checkpointing"},
    {"algorithms"},
    {"tools"},
    {"callbacks"},
    {"cli"},
]
# Modules outside of folders: a vocabulary that every folder may use, and the top of the house.
VOCABULARY = {"validation", "files", "nested", "masks", "spaces", "distributed", "options"}
TOP = {"__init__", "__main__"}
FLOOR = {name: number for number, names in enumerate([VOCABULARY, *FLOORS, TOP]) for name in names}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def imported(tree: ast.AST) -> set[str]:
    """Return the modules that a source imports, also inside of functions and for type checkers only."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "no relative imports"
            assert node.module is not None
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(tree: ast.AST) -> set[str]:
    names = {name.removeprefix("lightning_rl.") for name in imported(tree) if name.startswith("lightning_rl.")}
    return names & set(MODULES)


def folder_of(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_is_on_a_floor():
    assert {folder_of(module) for module in MODULES} == set(FLOOR)


@pytest.mark.parametrize("folder", sorted(FLOOR))
def test_a_folder_imports_from_floors_below_only(folder):
    for module, tree in MODULES.items():
        if folder_of(module) == folder:
            others = {other for other in own_imports(tree) if folder_of(other) != folder}
            on_the_ground = {other for other in others if other in VOCABULARY}
            wrong = others - on_the_ground if folder in VOCABULARY else others
            assert [other for other in sorted(wrong) if FLOOR[folder_of(other)] >= FLOOR[folder]] == [], module


def test_no_modules_import_each_other_in_a_circle():
    # A module of a folder may name its folder in an import: that is no circle.
    graph = {
        module: {other for other in own_imports(tree) if not module.startswith(f"{other}.")}
        for module, tree in MODULES.items()
    }
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(MODULES)


def test_the_functional_core_imports_torch_alone():
    allowed = {"__future__", "collections", "math", "typing", "torch", "lightning_rl"}
    for name, tree in MODULES.items():
        if folder_of(name) == "functional":
            assert {module.split(".")[0] for module in imported(tree)} <= allowed, name
            assert all(folder_of(other) == "functional" for other in own_imports(tree)), name


def test_the_checks_would_notice_a_wrong_import():
    tree = ast.parse("def f():\n    from lightning_rl.cli.main import main\n    from lightning_rl import data")
    assert own_imports(tree) == {"cli.main", "data"}


def test_optional_packages_are_imported_only_where_they_are_used():
    """Neither `import lightning_rl` nor `--help` imports these: no module imports them at its top level."""
    optional = {"onnx", "onnxruntime", "onnxscript", "optuna", "huggingface_hub", "ray"}
    for module, tree in MODULES.items():
        at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not optional & {name.partition(".")[0] for node in at_import for name in imported(node)}, module
