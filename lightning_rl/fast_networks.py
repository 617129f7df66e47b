"""Actor and critic of linear layers with tanh, forward and backward without autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn import functional

from lightning_rl.distributions import closed_form, plain_layer
from lightning_rl.distributions.gaussian_heads import GaussianHead
from lightning_rl.fast_layers import is_numpys, product, tanh_features, tanh_gradients
from lightning_rl.layers import HeadLinear
from lightning_rl.networks import plain_layers
from lightning_rl.policy import ActorCritic
from lightning_rl.trunk import Trunk
from lightning_rl.watching import anybody_watches, is_watched

MakeRows: TypeAlias = Callable[..., closed_form.Rows]
"""Takes actions `[N, ...]`, outputs `[N, width]` and what all rows share."""


_METHODS = {name for cls in (ActorCritic, Trunk) for name, attribute in vars(cls).items() if callable(attribute)}


class FastNetwork:
    """Linear layers with tanh after each but the last.

    Args:
        parameters: Weight and bias of each layer.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs `[N, width]` for rows `[N, features]`, and remember what `backward` needs."""
        self._features = tanh_features(x, self.parameters[:-2])
        return functional.linear(self._features[-1], *self.parameters[-2:])

    def backward(self, gradient: Tensor) -> list[Tensor]:
        """Return the gradients of all parameters, given that of the outputs `[N, width]` of the last `forward`."""
        features, self._features = self._features, []
        of_last = product(gradient.t(), features[-1]), gradient.sum(0)
        _, *of_others = tanh_gradients(features, self.parameters[:-2], gradient.mm(self.parameters[-2]))
        return [*of_others, *of_last]


class FastNetworks:
    """Those of an `ActorCritic`, with what makes action distributions of the outputs of the actor.

    Attributes:
        actor: Gives the first parameter of the distributions.
        critic: Gives values, `[N, 1]`.
        make_rows: Makes distributions at given actions.
        shared: Further parameters of the distributions, the same for all rows.
    """

    def __init__(
        self,
        actor: FastNetwork,
        critic: FastNetwork,
        make_rows: MakeRows,
        shared: Sequence[nn.Parameter] = (),
    ) -> None:
        self.actor, self.critic, self.make_rows, self.shared = actor, critic, make_rows, shared
        self.parameters = [*actor.parameters, *critic.parameters, *shared]

    @classmethod
    def of(cls, policy: nn.Module) -> FastNetworks | None:
        """Return those of a policy as it is now; None where it is another, or somebody looks at its modules."""
        if type(policy) is not ActorCritic or anybody_watches() or any(map(is_watched, policy.modules())):
            return None
        if vars(policy).keys() & _METHODS:
            return None
        if policy.memory is not None or policy.value_normalizer is not None:
            return None
        actor, critic = plain_layers(policy.actor_encoder), plain_layers(policy.critic_encoder)
        last = plain_layer(policy.action_head)
        last_of_critic = policy.value_head.plain_parameters if type(policy.value_head) is HeadLinear else None
        if actor is None or critic is None or last is None or last_of_critic is None:
            return None
        actor_network, critic_network = FastNetwork([*actor, *last]), FastNetwork([*critic, *last_of_critic])
        make_rows, shared = _makers(policy.action_head)
        made = cls(actor_network, critic_network, make_rows, shared)
        return made if made._suit() else None

    def _suit(self) -> bool:
        """Whether all are learned, each in one place, and of one dtype, and nobody waits for the gradient of any."""
        dtype = self.parameters[0].dtype
        return len(set(map(id, self.parameters))) == len(self.parameters) and all(
            type(x) is nn.Parameter
            and x.requires_grad
            and x.dtype == dtype
            and is_numpys(x)
            and not x._backward_hooks
            and not x._post_accumulate_grad_hooks
            for x in self.parameters
        )


def _makers(head: nn.Module) -> tuple[MakeRows, list[nn.Parameter]]:
    """Return what makes rows of the outputs of a head that has a plain layer, and what else it makes them of."""
    if isinstance(head, GaussianHead):
        return closed_form.GaussianRows, [head.log_std]
    return closed_form.CategoricalRows, []
