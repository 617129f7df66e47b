"""Options that every algorithm has beside those of its paper, in groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rl.policies.normalization import RewardScale, ValueNormalization
from lightning_rl.rollouts.rollout import OnTruncation
from lightning_rl.training.parameter_groups import ParameterGroups
from lightning_rl.training.schedules import Scheduled

NormalizeAdvantages = Literal["minibatch", "rollout", "none"]


@dataclass(frozen=True)
class SchedulerConfig:
    """A learning rate scheduler of PyTorch, stepped once per rollout.

    Args:
        name: Scheduler class or its import path. None uses no scheduler.
        options: Arguments of the scheduler.
    """

    name: str | type[LRScheduler] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CriticOptimizerConfig:
    """A separate optimizer for the critic's own encoder and head; needs separate encoders.

    Args:
        name: Optimizer class or its import path. None with a learning rate uses the class and options of the other
            optimizer.
        options: Arguments of the optimizer.
        learning_rate: Step size, a number or a schedule. None with a name uses `learning_rate`.
    """

    name: str | type[Optimizer] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    learning_rate: Scheduled | None = None


@dataclass(frozen=True)
class L2Config:
    """Coefficients of squared weights that are added to the loss; biases are not penalized, and there is no factor ½.

    Args:
        policy: Coefficient for weights that only the actor has.
        value: Coefficient for weights that only the critic has.
        shared: Coefficient for weights that both have.
    """

    policy: float = 0.0
    value: float = 0.0
    shared: float = 0.0


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, gradient clipping, and how the learning rate changes.

    Args:
        name: Optimizer class or its import path. None uses the algorithm's default: Adam, or RMSprop for A2C and
            IMPALA.
        options: Arguments of the optimizer, without the learning rate. With name None they change single arguments of
            the algorithm's default.
        anneal: Lower the learning rate linearly to 0 over the planned environment steps of the run. Environment steps
            of resets count as planned, so the final rate is slightly above 0 if `max_epochs` alone bounds the run.
        scheduler: Learning rate scheduler, in place of anneal.
        max_grad_norm: Maximum global gradient norm, per optimizer. None disables clipping.
        max_grad_value: Maximum absolute value of every gradient entry, applied before the norm. None disables it.
        critic: Separate optimizer for the critic.
        groups: Optimizer options of some parameters, by the beginning of their names in the policy or a pattern like
            `*.bias`: `learning_rate_scale` multiplies the learning rate, others are arguments of the optimizer, such as
            `weight_decay`. Each parameter uses the options of the first matching pattern.
        l2: Weight penalties.
        adaptive_learning_rate: `{"target_kl": d}` divides the learning rate after a rollout by `factor` (1.5) if the
            mean approximate KL divergence is above 2d, multiplies it if the divergence is below d/2, and keeps it
            between `minimum` (1e-6) and `maximum` (1e-2). Changes the actor's rate if there are two optimizers.
        num_value_epochs: Number of passes of the value loss. None takes as many as of the policy loss. The first
            passes have both losses, the others only one; with a shared encoder each pass changes the encoder.
        critic_warmup_steps: Learn only the value, by the critic's own parameters, in rollouts that start before this
            many environment steps, so that a loaded policy stays as it is.
    """

    name: str | type[Optimizer] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    anneal: bool = False
    scheduler: SchedulerConfig = SchedulerConfig()
    max_grad_norm: float | None = 0.5
    max_grad_value: float | None = None
    critic: CriticOptimizerConfig = CriticOptimizerConfig()
    groups: ParameterGroups = field(default_factory=dict)
    l2: L2Config = L2Config()
    adaptive_learning_rate: dict[str, float] | None = None
    num_value_epochs: int | None = None
    critic_warmup_steps: int = 0


@dataclass(frozen=True)
class AdvantageConfig:
    """How advantages and value targets are computed.

    Args:
        estimator: `gae`, or `monte_carlo`: the sum of rewards up to the end of the episode or rollout, minus the value,
            which equals λ = 1.
        value_target: `td_lambda`: advantage plus value, or `empirical`: the sum of rewards, whatever λ is.
        on_truncation: `bootstrap` uses the value of the last observation where a time limit ends an episode,
            `terminal` treats the time limit as a terminal state.
        normalize: Standardize advantages over each `minibatch`, over the whole `rollout`, or not at all (`none`).
        recompute_values: Recompute the values that targets are computed from at the start of the updates. They differ
            from the values of the collection only with `normalization.update: before`, or by rounding.
        recompute_advantages: Recompute values, advantages and returns with the current critic before every pass but the
            first.
    """

    estimator: Literal["gae", "monte_carlo"] = "gae"
    value_target: Literal["td_lambda", "empirical"] = "td_lambda"
    on_truncation: OnTruncation = "bootstrap"
    normalize: NormalizeAdvantages = "none"
    recompute_values: bool = False
    recompute_advantages: bool = False


@dataclass(frozen=True)
class ClippingConfig:
    """Bounds of what one rollout may change, beside `clip_range`.

    Args:
        low: ε of the lower bound of the importance ratio. None uses `clip_range`. May be a schedule.
        high: ε of the upper bound of the importance ratio. None uses `clip_range`. May be a schedule.
        log_prob: Clip the log-probabilities of the current policy to ± this in the importance ratio, not the recorded
            log-probabilities. None does not clip.
        dual: Bound the surrogate from below by this times the advantage where the advantage is negative (Ye et al.
            2020); above 1. None does not.
        value: Clip the change of the value since the rollout to ± this. None does not clip. May be a schedule.
        value_huber_delta: Value errors above this count linearly (Huber loss) instead of squared. None squares all.
        rollback: Undo an update, parameters and optimizer state, after which the KL divergence of its own minibatch
            exceeds the bound of `target_kl`; no further update follows.
    """

    low: Scheduled | None = None
    high: Scheduled | None = None
    log_prob: float | None = None
    dual: float | None = None
    value: Scheduled | None = None
    value_huber_delta: float | None = None
    rollback: bool = False


@dataclass(frozen=True)
class NormalizationConfig:
    """Running normalization of observations, rewards and values.

    Args:
        observations: Standardize every `Box` observation that is no image by its running moments. A dict changes how:
            `clip` bounds the result (10), `epsilon` is added to the variance (1e-8), `initial_variance` is the variance
            before any data (1).
        rewards: Divide rewards by the running deviation of the discounted return (true or `return_std`), or of the
            rewards themselves (`reward_std`).
        reward_clip: Bound of the absolute normalized reward. None does not clip.
        values: `running_std`: the value head predicts returns divided by their running deviation, and the value loss is
            in these units. `popart`: the running mean is subtracted too, and the head is rescaled when the moments
            change (van Hasselt et al. 2016). None does neither.
        update: `after` updates the running moments with a rollout once it has been learned from, so that collection and
            learning use the same moments; `before` updates them first, and importance ratios then do not start at 1.
    """

    observations: bool | dict[str, float] = False
    rewards: bool | RewardScale = False
    reward_clip: float | None = 10.0
    values: ValueNormalization | None = None
    update: Literal["after", "before"] = "after"


@dataclass(frozen=True)
class DebugConfig:
    """Checks, histograms and the choice of code paths.

    Args:
        check_numerics: Check for NaN and infinity after every minibatch instead of after every rollout; slower.
        max_skipped_updates: Number of consecutive rollouts whose updates may be skipped because a loss or gradient is
            not finite. One more ends the run with an error that names a file for `FailedUpdate.load`.
        histograms: Log histograms of actions, advantages, parameters and gradients at the end of the first and the last
            pass over a logged rollout; needs a logger like TensorBoard's.
        fast_paths: Faster code for acting and learning, with the same numbers up to rounding. `auto` uses code that
            needs no compiler, such as a closed form of PPO's loss for small networks on the CPU. `compiled` compiles
            the update into one program, and the `step` of environments of tensors. `none` uses plain PyTorch and
            Lightning. See docs/algorithms/ppo.md.
    """

    check_numerics: bool = False
    max_skipped_updates: int = 0
    histograms: bool = False
    fast_paths: Literal["auto", "compiled", "none"] = "auto"


# Users may give a dict of the fields to change. jsonargparse must not see the union: it would ask for `class_path`.
if TYPE_CHECKING:
    OptimizerOptions = OptimizerConfig | Mapping[str, Any]
    AdvantageOptions = AdvantageConfig | Mapping[str, Any]
    NormalizationOptions = NormalizationConfig | Mapping[str, Any]
    DebugOptions = DebugConfig | Mapping[str, Any]
    ClippingOptions = ClippingConfig | Mapping[str, Any]
else:
    OptimizerOptions, AdvantageOptions = OptimizerConfig, AdvantageConfig
    NormalizationOptions, DebugOptions, ClippingOptions = NormalizationConfig, DebugConfig, ClippingConfig

OPTIONS_OF_PASSES = (
    *("optimizer.num_value_epochs", "optimizer.critic_warmup_steps", "optimizer.adaptive_learning_rate"),
    "advantages.recompute_advantages",
)
"""Options that need several passes over a rollout, or a measured KL divergence."""
OPTIONS_OF_TARGETS = ("advantages.estimator", "advantages.value_target", "advantages.recompute_values")
"""Options that decide what advantages and value targets are computed from."""
