"""Whether EnvPool's Procgen games can be made here: they need Qt 5."""

import pytest

from lightning_rl.environments import EnvironmentSpec, make_environments
from lightning_rl.validation import ConfigurationError


def has_procgen() -> bool:
    try:
        make_environments(EnvironmentSpec("BigfishEasy-v0", backend="envpool"), 1, [0]).close()
    except ConfigurationError:
        return False
    return True


needs_procgen = pytest.mark.skipif(not has_procgen(), reason="Procgen needs Qt 5")
