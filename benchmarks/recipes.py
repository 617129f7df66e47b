"""What runs before a shipped configuration that begins with what other runs leave.

The commands are those of the guide, from recorded episodes to reinforcement learning
(`docs/algorithms/behaviourcloning.md`). All of them, and then the configuration, run in one folder with one seed.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from lightning_rl.cli.main import main


@dataclass(frozen=True)
class Recipe:
    """How the result of a configuration is made, beyond training it.

    Args:
        before: Commands that run first, as they are typed.
        arguments: Of the configuration's own run, to find what those left.
        logged: What is kept of its log beside mean returns, by name.
    """

    before: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()

    def run_before(self, seed: int) -> None:
        """Run the commands that come first, in the working folder."""
        for command in self.before:
            main([*shlex.split(command)[1:], "--seed_everything", str(seed)])


_RECORDED = (
    "lightning-rl fit --config ppo/cartpole",
    "lightning-rl predict --config ppo/cartpole --ckpt_path last --data.evaluation.episodes 20 --record expert"
    " --record_as minari",
)
RECIPES = {
    "behaviour_cloning/cartpole": Recipe(before=_RECORDED),
    "critic_pretraining/cartpole": Recipe(
        before=(*_RECORDED, "lightning-rl fit --config behaviour_cloning/cartpole"),
        arguments=("--init_from", "runs/behaviourcloning/CartPole-v1/version_0/checkpoints/last.ckpt"),
        logged=("critic_pretraining/value_loss", "critic_pretraining/explained_variance"),
    ),
}
"""By the name of the configuration; one that is not here needs nothing."""
