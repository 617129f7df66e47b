"""Commands that must run before a shipped configuration that starts from the output of other runs.

They are the commands of `docs/algorithms/behaviourcloning.md` and `docs/algorithms/distillation.md`. All of them, and
then the configuration, run in one folder with one seed.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from lightning_rl.cli.main import main


@dataclass(frozen=True)
class Recipe:
    """How to make the result of a configuration that needs more than its own training.

    Args:
        before: Commands to run first.
        arguments: Additional arguments of the configuration's run, which name the output of these commands.
        logged: Names of logged values to store besides mean returns.
    """

    before: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()

    def run_before(self, seed: int) -> None:
        """Run the preceding commands in the working folder."""
        for command in self.before:
            main([*shlex.split(command)[1:], "--seed_everything", str(seed)])


_RECORDED = (
    "lightning-rl fit --config ppo/cartpole",
    "lightning-rl predict --config ppo/cartpole --ckpt_path last --data.evaluation.episodes 20"
    " --data.evaluation.deterministic false --record expert --record_as minari",
)
RECIPES = {
    "behaviour_cloning/cartpole": Recipe(before=_RECORDED),
    "critic_pretraining/cartpole": Recipe(
        before=(*_RECORDED, "lightning-rl fit --config behaviour_cloning/cartpole"),
        arguments=("--init_from", "runs/behaviourcloning/CartPole-v1/version_0/checkpoints/last.ckpt"),
        logged=("critic_pretraining/value_loss", "critic_pretraining/explained_variance"),
    ),
    "distillation/cartpole": Recipe(
        before=(
            "lightning-rl fit --config ppo/cartpole --trainer.default_root_dir runs/teacher --data.env.wrappers"
            " '[{class_path: lightning_rl.environments.SplitObservation,"
            " init_args: {parts: {position: [0, 2], velocity: [1, 3]}}}]'",
        ),
    ),
}
"""By the name of the configuration; one that is not here needs nothing."""
