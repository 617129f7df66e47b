"""On-policy reinforcement learning for PyTorch Lightning."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rl.cli.public import *  # noqa: F403

__version__ = "0.1.0.dev0"


def _public(name: str) -> Any:  # classes, functions and modules
    """Import public names on first use, so that the command line answers typos without PyTorch and Lightning."""
    if not name.startswith("__") and find_spec(f"{__name__}.{name}") is not None:
        return _imported(name)
    if not name.startswith("__") or name == "__all__":
        # The first name imports all classes, so that `LightningCLI` knows their short names.
        public = {key: value for key, value in vars(_imported("cli.public")).items() if not key.startswith("_")}
        globals().update(public, __all__=[*public, "__version__"])
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # type checkers would take any name for one of the package
    __getattr__ = _public


def __dir__() -> list[str]:
    """Return the public names, for completion in a console or notebook."""
    return sorted({*globals(), *_public("__all__")})


def _imported(name: str) -> ModuleType:
    try:
        return import_module(f"{__name__}.{name}")
    except AttributeError as error:  # Python would take it for a missing attribute of this module and retry
        raise ImportError(f"{__name__}.{name} cannot be imported: {error}") from error
