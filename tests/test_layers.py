"""A module imports only from rows above its own, so that each can be read knowing no more than those."""

import ast
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_rl"

# Modules of a row do not import each other. A package is one entry; the base of the algorithms counts by itself.
LAYERS = [
    {"trust"},
    {
        "__about__",
        "functional",
        "validation",
        "layers",
        "nested",
        "clock",
        "profiling",
        "diagnostics",
        "extras",
        "event_files",
        "random_state",
        "ranks",
        "rank_errors",
        "quiet",
        "shipped_configs",
    },
    {"yaml_files"},
    {"checksums", "curves", "masks", "sequences", "episode_memory", "step_storage", "video"},
    {"observation_tensors"},
    {
        "spaces",
        "networks",
        "distributions",
        "memory",
        "normalization",
        "plots",
        "rollout",
        "schedules",
        "strategies",
        "notebook_line",
        "event_files",
        "progress_text",
    },
    {"checkpoint_format", "checkpoints", "observations", "policy_interface", "replay", "value_normalization"},
    {"interruption", "runs", "trunk"},
    {"policy", "environments", "metrics"},
    {"acting", "estimates", "fast"},
    {"export"},
    {"collector", "tensor_collector", "evaluation"},
    {"loaders", "evaluator", "minari_data", "restoring"},
    {"sampler"},
    {"actors"},
    {"episodes_datamodule"},
    {"datamodule", "algorithms.base"},
    {"algorithms", "callbacks", "progress", "recorded_episodes"},
    {"trained"},
    {"hub"},
    {"cli_errors", "cli_parts"},
    {"commands"},
    {"cli"},
    {"__init__", "__main__"},
]
ROW = {name: row for row, names in enumerate(LAYERS) for name in names}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def imported(tree: ast.AST) -> set[str]:
    """The modules that a source imports, anywhere in it."""
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


def layer_of(module: str) -> str:
    package, _, name = module.partition(".")
    if package == "algorithms":
        own = (
            "",
            "a2c",
            "behaviour_cloning",
            "clear",
            "critic_pretraining",
            "impala",
            "overlap",
            "unrolls",
            "phases",
            "ppg",
            "ppg_off_policy",
            "ppo",
            "ppo_kl",
            "ppo_settings",
            "tf_agents",
            "vmpo",
        )
        return "algorithms" if name in own else "algorithms.base"
    return package


def test_every_module_has_its_place():
    assert {layer_of(module) for module in MODULES} == set(ROW)
    assert sum(map(len, LAYERS)) == len(ROW)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_imports_only_from_rows_above_its_own(module):
    layer = layer_of(module)
    others = {other for other in own_imports(MODULES[module]) if layer_of(other) != layer}
    assert [other for other in sorted(others) if ROW[layer_of(other)] >= ROW[layer]] == []


def test_no_modules_import_each_other_in_a_circle():
    # The parts of a package name it where they mean one another: that is no circle.
    graph = {
        module: {other for other in own_imports(tree) if not module.startswith(f"{other}.")}
        for module, tree in MODULES.items()
    }
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(MODULES)


def test_data_and_algorithms_do_not_know_each_other():
    assert not any(other.startswith("algorithms") for other in own_imports(MODULES["datamodule"]))
    assert not any("datamodule" in own_imports(tree) for name, tree in MODULES.items() if name.startswith("algorithms"))


def test_the_functional_core_imports_torch_alone():
    allowed = {"__future__", "collections", "math", "typing", "torch", "lightning_rl"}
    for name, tree in MODULES.items():
        if name.startswith("functional"):
            assert {module.split(".")[0] for module in imported(tree)} <= allowed, name
            assert all(other.startswith("functional") for other in own_imports(tree)), name


def test_the_checks_would_notice_a_wrong_import():
    tree = ast.parse("def f():\n    from lightning_rl.cli.main import main\n    from lightning_rl import datamodule")
    assert own_imports(tree) == {"cli", "datamodule"}


def test_what_few_need_is_imported_by_those_alone():
    """Neither `import lightning_rl` nor `--help` waits for these: nothing imports them where a module begins."""
    rare = {"onnx", "onnxruntime", "onnxscript", "optuna", "huggingface_hub", "ray"}
    for module, tree in MODULES.items():
        at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not rare & {name.partition(".")[0] for node in at_once for name in imported(node)}, module
