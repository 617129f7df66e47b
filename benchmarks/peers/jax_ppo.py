"""W1 by PPO written whole in JAX, as PureJaxRL does it: environment, rollout and update are one compiled program.

CartPole is gymnax's. An episode that its time limit ends bootstraps from nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import measure

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
run = measure.begin(images=False)
if run.args.workload != "W1":
    sys.exit(f"workload={run.args.workload!r}: expected 'W1'")

import gymnax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

run.imported()
workload = run.workload
NUM_ENVS, LENGTH, CLIP = workload["num_envs"], workload["num_steps"], workload["clip"]
GAMMA, LAMBDA = workload["gamma"], workload["gae_lambda"]
environment, parameters = gymnax.make("CartPole-v1")
reset, step = jax.vmap(environment.reset, (0, None)), jax.vmap(environment.step, (0, 0, 0, None))
optimizer = optax.chain(
    optax.clip_by_global_norm(workload["max_grad_norm"]), optax.adam(workload["lr"], eps=workload["adam_eps"])
)


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, observations: Any) -> tuple[Any, Any]:
        def mlp(outputs: int, gain: float) -> Any:
            x = observations
            for width in workload["hidden"]:
                x = nn.tanh(nn.Dense(width, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
            return nn.Dense(outputs, kernel_init=nn.initializers.orthogonal(gain))(x)

        return mlp(2, 0.01), mlp(1, 1.0)[..., 0]


network = ActorCritic()


def collect_step(carry: Any, _: None) -> tuple[Any, Any]:
    weights, state, observations, returns, key = carry
    key, of_action, of_step = jax.random.split(key, 3)
    logits, values = network.apply(weights, observations)
    actions = jax.random.categorical(of_action, logits)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0]
    following, state, rewards, *ends, _ = step(jax.random.split(of_step, NUM_ENVS), state, actions, parameters)
    done = jnp.stack(ends).any(0)  # terminated, and in newer versions truncated
    returns = returns + rewards
    row = observations, actions, log_probs, values, rewards, done, jnp.where(done, returns, jnp.nan)
    return (weights, state, following, jnp.where(done, 0.0, returns), key), row


def loss(weights: Any, minibatch: Any) -> Any:
    observations, actions, old_log_probs, advantages, returns = minibatch
    logits, values = network.apply(weights, observations)
    log_softmax = jax.nn.log_softmax(logits)
    ratios = jnp.exp(jnp.take_along_axis(log_softmax, actions[:, None], 1)[:, 0] - old_log_probs)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = -jnp.minimum(ratios * advantages, jnp.clip(ratios, 1 - CLIP, 1 + CLIP) * advantages).mean()
    entropy = -(jnp.exp(log_softmax) * log_softmax).sum(-1).mean()
    value_loss = 0.5 * ((values - returns) ** 2).mean()
    return policy_loss + workload["vf_coef"] * value_loss - workload["ent_coef"] * entropy


@jax.jit
def learn(carry: Any) -> tuple[Any, Any]:
    """One rollout and its update."""
    weights, optimizer_state, *of_environments = carry
    collected, rows = jax.lax.scan(collect_step, (weights, *of_environments), None, LENGTH)
    _, state, following, returns_so_far, key = collected
    observations, actions, log_probs, values, rewards, done, episode_returns = rows

    def advantage(after: Any, row: Any) -> tuple[Any, Any]:
        next_advantage, next_value = after
        reward, ended, value = row
        now = reward - value + GAMMA * (1 - ended) * (next_value + LAMBDA * next_advantage)
        return (now, value), now

    last = jnp.zeros(NUM_ENVS), network.apply(weights, following)[1]
    _, advantages = jax.lax.scan(advantage, last, (rewards, done, values), reverse=True)
    batch = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:]), (observations, actions, log_probs, advantages, advantages + values)
    )

    def epoch(carry: Any, _: None) -> tuple[Any, None]:
        weights, optimizer_state, key = carry
        key, of_order = jax.random.split(key)
        order = jax.random.permutation(of_order, workload["rows"])
        parts = jax.tree.map(lambda x: x[order].reshape(workload["minibatches"], -1, *x.shape[1:]), batch)

        def descend(carry: Any, minibatch: Any) -> tuple[Any, None]:
            weights, optimizer_state = carry
            updates, optimizer_state = optimizer.update(jax.grad(loss)(weights, minibatch), optimizer_state, weights)
            return (optax.apply_updates(weights, updates), optimizer_state), None

        (weights, optimizer_state), _ = jax.lax.scan(descend, (weights, optimizer_state), parts)
        return (weights, optimizer_state, key), None

    (weights, optimizer_state, key), _ = jax.lax.scan(epoch, (weights, optimizer_state, key), None, workload["epochs"])
    return (weights, optimizer_state, state, following, returns_so_far, key), episode_returns


key, of_weights, of_reset = jax.random.split(jax.random.PRNGKey(run.args.seed), 3)
weights = network.init(of_weights, jnp.zeros(4))
observations, state = reset(jax.random.split(of_reset, NUM_ENVS), parameters)
carry = weights, optimizer.init(weights), state, observations, jnp.zeros(NUM_ENVS), key
for _ in range(workload["rollouts"]):
    carry, found = learn(carry)
    episode_returns = np.asarray(found)
    measure.EPISODE_RETURNS.extend(episode_returns[~np.isnan(episode_returns)].tolist())
    run.tick()
run.report("jax", jax.__version__, measure.EPISODE_RETURNS, note="environment, rollout and update compiled")
