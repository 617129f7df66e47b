"""Options of the policy: its networks, memory and action distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from lightning_rl.policies.networks import DiscreteEncoding, Network
from lightning_rl.policies.recurrent import Memory
from lightning_rl.validation import ClassSpec


@dataclass(frozen=True)
class PolicyConfig:
    """Networks, memory and action distributions.

    Args:
        network: `auto`, `mlp`, `nature`, `impala`, an encoder class, or a dict from the path of an observation leaf to
            one of these; see `lightning_rl.policies.networks.make_encoder`.
        hidden_sizes: Layer widths of the MLP.
        activation: Activation of the MLP: `tanh`, `relu`, `elu`, `gelu` or `silu`.
        discrete_encoding: MLP input for `Discrete` and `MultiDiscrete`: `one_hot` vectors or a learned `embedding`.
        shared_encoder: Share one encoder between actor and critic. None does so for images unless critic_only is set.
        critic_only: Paths of parts of a `Dict` observation that only the critic sees: `goal`, `robot.mass`.
        memory: Recurrent core between encoder and heads: `lstm`, `gru`, `mingru`, `gtrxl`, or
            `{"kind": "lstm", option: value}` with `hidden_size`, `num_layers`, `separate`, `sequence_length`, `burn_in`
            and `context_length` (`gtrxl` only, 32 steps by default). None has no core. See
            docs/policies.md.
        initial_log_std: Initial logarithm of the standard deviation of continuous actions.
        action_distribution: `gaussian`, `squashed_gaussian`, `beta` or others, by name or as `{"kind": name, option:
            value}`; a dict from path to one of these for parts of a `Dict` or `Tuple` action (`{"arm.0": "beta"}`).
            None uses the default of each space. See docs/policies.md.
    """

    network: Network = "auto"
    hidden_sizes: Sequence[int] = (64, 64)
    activation: str = "tanh"
    discrete_encoding: DiscreteEncoding = "one_hot"
    shared_encoder: bool | None = None
    critic_only: Sequence[str] | None = None
    memory: Memory = None
    initial_log_std: float = 0.0
    action_distribution: str | ClassSpec | None = None


# Users may give a dict of the fields to change. jsonargparse must not see the union: it would ask for `class_path`.
if TYPE_CHECKING:
    PolicyOptions = PolicyConfig | Mapping[str, Any]
else:
    PolicyOptions = PolicyConfig

POLICY_OPTIONS = {field.name: f"policy.{field.name}" for field in fields(PolicyConfig)} | {
    "normalize_observations": "normalization.observations",
    "value_normalization": "normalization.values",
}
"""Full name of the option for each argument of `ActorCritic`."""
