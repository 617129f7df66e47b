"""Option groups that algorithms share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rl.options import OrDict
from lightning_rl.policies.normalization import RewardScale, ValueNormalization
from lightning_rl.rollouts.rollout import OnTruncation
from lightning_rl.training.parameter_groups import ParameterGroups
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range

NormalizeAdvantages = Literal["minibatch", "rollout", "none"]


@dataclass(frozen=True)
class SchedulerConfig:
    """Learning rate scheduler of PyTorch, stepped once per rollout.

    Args:
        name: Scheduler class or its import path. None uses no scheduler.
        options: Arguments of the scheduler.
    """

    name: str | type[LRScheduler] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CriticOptimizerConfig:
    """Separate optimizer for the encoder and head of the critic; needs separate encoders.

    Args:
        name: Optimizer class or its import path. None uses the class and options of the other optimizer.
        options: Arguments of the optimizer.
        learning_rate: Number or schedule. None uses the learning rate of the other optimizer.
    """

    name: str | type[Optimizer] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    learning_rate: Scheduled | None = None


@dataclass(frozen=True)
class L2Config:
    """Coefficients of the sums of squared weights in the loss, without factor ½ and without biases.

    Args:
        policy: Coefficient for weights of the actor only.
        value: Coefficient for weights of the critic only.
        shared: Coefficient for weights of both.
    """

    policy: NonNegativeFloat = 0.0
    value: NonNegativeFloat = 0.0
    shared: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, gradient clipping, and how the learning rate changes.

    Args:
        name: Optimizer class or its import path. None uses Adam, or RMSprop for A2C and IMPALA.
        options: Arguments of the optimizer except the learning rate. With name None they change single arguments of the
            algorithm's default.
        anneal: Lower the learning rate linearly to 0 over the planned environment steps of the run. Resets count as
            planned steps, so a run that only `max_epochs` bounds ends slightly above 0.
        scheduler: Learning rate scheduler, instead of `anneal`.
        max_grad_norm: Maximum global gradient norm, per optimizer. None disables clipping.
        max_grad_value: Maximum absolute value of every gradient entry, applied before the norm. None disables it.
        critic: Separate optimizer for the critic.
        groups: Optimizer options by parameter name in the policy, module name or pattern such as `*.bias`.
            `learning_rate_scale` multiplies the learning rate; other options are arguments of the optimizer, such as
            `weight_decay`. Each parameter uses the options of the first matching pattern.
        l2: Weight penalties.
        adaptive_learning_rate: `{"target_kl": d}` divides the learning rate by `factor` (1.5) after rollouts with a
            mean approximate KL divergence above 2d, multiplies it below d/2, and keeps it between `minimum` (1e-6) and
            `maximum` (1e-2). With two optimizers it changes the rate of the actor.
        num_value_epochs: Number of passes of the value loss. None: as many as of the policy loss. The first passes have
            both losses, the others only one; with a shared encoder each pass changes the encoder.
        critic_warmup_steps: Train only the critic's own parameters in rollouts that start before this environment step,
            for example after a warm start with a trained policy.
    """

    name: str | type[Optimizer] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    anneal: bool = False
    scheduler: OrDict[SchedulerConfig] = SchedulerConfig()
    max_grad_norm: PositiveFloat | None = 0.5
    max_grad_value: PositiveFloat | None = None
    critic: OrDict[CriticOptimizerConfig] = CriticOptimizerConfig()
    groups: ParameterGroups = field(default_factory=dict)
    l2: OrDict[L2Config] = L2Config()
    adaptive_learning_rate: dict[str, float] | None = None
    num_value_epochs: PositiveInt | None = None
    critic_warmup_steps: NonNegativeInt = 0


@dataclass(frozen=True)
class AdvantageConfig:
    """How advantages and value targets are computed.

    Args:
        estimator: `gae`, or `monte_carlo`: the discounted sum of rewards up to the end of the episode, or up to the end
            of the rollout and the value there, minus the value; equal to λ = 1.
        value_target: `td_lambda`: advantage plus value; `empirical`: the discounted sum of rewards, for every λ.
        on_truncation: `bootstrap` uses the value of the last observation if a time limit ends an episode, `terminal`
            treats the time limit as a terminal state.
        normalize: Standardize advantages over each `minibatch`, over the whole `rollout`, or not at all (`none`).
        recompute_values: Recompute values at the start of the updates. They differ from the collected values only with
            `normalization.update: before`, or by rounding.
        recompute_advantages: Recompute values, advantages and returns before every pass except the first.
    """

    estimator: Literal["gae", "monte_carlo"] = "gae"
    value_target: Literal["td_lambda", "empirical"] = "td_lambda"
    on_truncation: OnTruncation = "bootstrap"
    normalize: NormalizeAdvantages = "none"
    recompute_values: bool = False
    recompute_advantages: bool = False


@dataclass(frozen=True)
class ClippingConfig:
    """Bounds of the policy and value change per rollout, besides `clip_range`.

    Args:
        low: ε of the lower bound of the importance ratio. None uses `clip_range`. May be a schedule.
        high: ε of the upper bound of the importance ratio. None uses `clip_range`. May be a schedule.
        log_prob: Clip the current policy's log-probabilities to ± this before the importance ratio is computed; the
            log-probabilities in the rollout are not clipped. None does not clip.
        dual: Lower bound of the surrogate for negative advantages, as a factor of the advantage (Ye et al. 2020); above
            1. None does not bound.
        value: Clip the change of the value since the rollout to ± this, with `normalization.values` in units of the
            value head. None does not clip. May be a schedule.
        value_huber_delta: Value errors above this, in the same units, count linearly (Huber loss). None squares all.
        rollback: Undo an update of parameters and optimizer state after which the KL divergence of its minibatch
            exceeds the bound of `target_kl`, and take no further update.
    """

    low: Scheduled | None = None
    high: Scheduled | None = None
    log_prob: PositiveFloat | None = None
    dual: Annotated[float, Range(above=1)] | None = None
    value: Scheduled | None = None
    value_huber_delta: PositiveFloat | None = None
    rollback: bool = False


@dataclass(frozen=True)
class NormalizationConfig:
    """Running normalization of observations, rewards and values.

    Args:
        observations: Standardize all `Box` observations except images by their running moments. A dict sets options:
            `clip` bounds the result (10), `epsilon` is added to the variance (1e-8), `initial_variance` is the variance
            before any data (1; 255² for images), and `images: true` standardizes each pixel of images too.
        rewards: Divide rewards by the running standard deviation of the discounted return (true or `return_std`) or of
            the rewards (`reward_std`).
        reward_clip: Bound of the absolute normalized reward; no effect without `rewards`. None does not clip.
        values: `running_std`: the value head predicts returns divided by their running standard deviation, and the
            value loss is in these units. `popart`: also subtracts the running mean, and rescales the head when the
            moments change (van Hasselt et al. 2016). None: no normalization.
        update: `after` updates the running moments after learning from a rollout, so that collection and learning use
            the same moments. `before` updates them first, except for values; importance ratios then do not start at 1.
    """

    observations: bool | dict[str, bool | float] = False
    rewards: bool | RewardScale = False
    reward_clip: PositiveFloat | None = 10.0
    values: ValueNormalization | None = None
    update: Literal["after", "before"] = "after"


@dataclass(frozen=True)
class DebugConfig:
    """Checks, histograms and fast code paths.

    Args:
        check_numerics: Check for NaN and infinity after every minibatch instead of after every rollout; slower.
        max_skipped_updates: Number of consecutive rollouts whose updates may be skipped because a loss or gradient is
            not finite. One more ends the run with an error that names a file for `FailedUpdate.load`.
        histograms: Log histograms of actions, advantages, parameters and gradients after the first and the last pass
            over each logged rollout; needs a `TensorBoardLogger`.
        gradient_norms: Log the gradient norm of each parameter as `train/grad_norm/<parameter>`, before clipping.
        fast_paths: Faster code for acting and learning; results are equal up to rounding. `auto` uses code that needs
            no compiler, such as a closed form of the PPO loss for small networks on the CPU. `compiled` compiles the
            update into one program, and also the `step` of tensor environments. `none` uses plain PyTorch and
            Lightning. See docs/algorithms/ppo.md.
    """

    check_numerics: bool = False
    max_skipped_updates: NonNegativeInt = 0
    histograms: bool = False
    gradient_norms: bool = False
    fast_paths: Literal["auto", "compiled", "none"] = "auto"


OPTIONS_OF_PASSES = (
    *("optimizer.num_value_epochs", "optimizer.critic_warmup_steps", "optimizer.adaptive_learning_rate"),
    "advantages.recompute_advantages",
)
"""Options that need several passes over a rollout or the approximate KL divergence."""
OPTIONS_OF_TARGETS = ("advantages.estimator", "advantages.value_target", "advantages.recompute_values")
"""Options of the computation of advantages and value targets."""
