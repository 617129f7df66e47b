"""L2 penalties on the weights of actor, critic and what they share."""

from __future__ import annotations

import functools
import operator

from torch import Tensor, nn

from lightning_rl.algorithms.parameter_groups import is_of_critic
from lightning_rl.functional import squared_norm
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.validation import check


class WeightPenalty:
    """Adds up the squares of weights, each part times a coefficient of its own.

    Weights are the matrices of layers: no biases, no standard deviations, no gains of normalising layers and no
    embeddings. Unlike weight decay, the penalty goes through the optimiser's moments and the clipping of gradients.

    Args:
        policy: Coefficient for what only the actor has.
        value: For what only the critic has.
        shared: For what both have.
    """

    def __init__(self, policy: float = 0.0, value: float = 0.0, shared: float = 0.0) -> None:
        self.coefficients = {"policy": policy, "value": value, "shared": shared}

    def check_policy(self, policy: nn.Module) -> None:
        """Raise unless the weights that a penalty is wanted on can be told apart, and there are some.

        Raises:
            ConfigurationError: The policy is no `ActorCritic`, or has no such weights.
        """
        for part, coefficient in self.coefficients.items():
            if coefficient:
                known = isinstance(policy, ActorCritic)
                expected = f"0, since actor and critic of a {type(policy).__name__} cannot be told apart"
                check(known, f"{part}_l2", coefficient, expected)
                expected = "0, since actor and critic share nothing: set policy_l2 and value_l2"
                check(bool(weights_by_part(policy)[part]), f"{part}_l2", coefficient, expected)

    def __call__(self, policy: nn.Module) -> Tensor | None:
        """Return the penalty on the weights of a policy, a scalar; None where there is none."""
        wanted = {part: coefficient for part, coefficient in self.coefficients.items() if coefficient}
        if not wanted:
            return None
        weights = weights_by_part(policy)
        return functools.reduce(operator.add, (c * squared_norm(weights[part]) for part, c in wanted.items()))


def weights_by_part(policy: nn.Module) -> dict[str, list[Tensor]]:
    """Return the weights of an actor-critic that belong to `policy`, `value` and `shared`."""
    pairs = (("actor_encoder", "critic_encoder"), ("actor_core", "critic_core"))
    shared = tuple(actors for actors, critics in pairs if getattr(policy, critics, None) is None)
    parts: dict[str, list[Tensor]] = {"policy": [], "value": [], "shared": []}
    for name, module in policy.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            if is_of_critic(name):
                parts["value"].append(parameter)
            else:
                parts["shared" if name.startswith(shared) else "policy"].append(parameter)
    return parts
