"""The package: examples run, names are exported, and only torch is imported."""

import ast
import doctest
import importlib
import pkgutil
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from lightning_rl import functional

MODULES = sorted(module.name for module in pkgutil.iter_modules(functional.__path__))


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"{functional.__name__}.{module}")).failed == 0


def test_every_public_function_is_exported() -> None:
    modules = [importlib.import_module(f"{functional.__name__}.{name}") for name in MODULES if name[0] != "_"]
    public = {
        name
        for module in modules
        for name, item in vars(module).items()
        if name[0] != "_" and getattr(item, "__module__", None) == module.__name__
    }
    assert set(functional.__all__) == public
    assert all(hasattr(functional, name) for name in functional.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_only_torch_is_imported(module: str) -> None:
    tree = ast.parse((Path(functional.__file__).parent / f"{module}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    allowed = ("torch", "typing", functional.__name__)
    assert {name for name in imported if not name.startswith(allowed)} == set()


def test_no_function_reads_a_value_on_the_host() -> None:
    # Tensors on "meta" have no values, so .item() or an if on one raises; and as on a GPU, scalars may be on the CPU.
    x, scalar = torch.ones(6, 3, device="meta"), torch.tensor(0.9)
    for number in (0.9, scalar):
        results = [
            functional.reverse_scan(x, number, x[0]),
            functional.discounted_returns(x, number, x[0]),
            functional.td_lambda_returns(x, x, number, number),
            functional.gae(x, x, x, number, number),
            *functional.vtrace(x, x, x, x, number, number, None, 2.0),
            functional.policy_gradient_loss(x, x),
            functional.clipped_surrogate_loss(x, x, number),
            functional.value_loss(x, x),
            functional.clipped_value_loss(x, x, x, number),
            functional.dual_clipped_surrogate_loss(x, x, number, number, 3.0),
            functional.huber_value_loss(x, x, 0.5),
            functional.approx_kl_k1(x),
            functional.approx_kl_k2(x),
            functional.approx_kl_k3(x),
            functional.clip_indicator(x, number),
            functional.explained_variance(x, x, x),
            functional.normalize_rows(x),
            functional.kl_cutoff_penalty(x.mean(), 0.01, 2.0),
            functional.adapted_kl_coef(x.mean(), x.mean(), 0.01, 0.3),
            functional.squared_norm([x, x[0]]),
        ]
        assert {result.device.type for result in results} == {"meta"}
        assert {result.dtype for result in results} == {torch.float32}


def test_squared_norm_takes_a_list_of_parameters() -> None:
    """Also for a type checker, to which it is no `list[Tensor]`."""
    parameters = list(torch.nn.Linear(2, 3).parameters())
    expected = sum(parameter.square().sum() for parameter in parameters)
    torch.testing.assert_close(functional.squared_norm(parameters), expected)
    assert list[torch.nn.Parameter] in get_args(get_type_hints(functional.squared_norm)["weights"])
