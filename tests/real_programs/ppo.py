"""PPO as purejaxrl writes it: rollouts, advantages and epochs of updates, in one scan.

The environments are what is split over the replicas: they begin and remain per-replica, while the
policy is mirrored.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from flax.training.train_state import TrainState

import mirror
from tests.real_programs.harness import Program, alone, initial_key, replica_mean, train

NUM_ENVS, NUM_STEPS, NUM_UPDATES, EPOCHS, MINIBATCHES, HORIZON = 8, 8, 5, 2, 2, 6
GAMMA, GAE_LAMBDA, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5
PUSHES = np.asarray([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)


class ActorCritic(linen.Module):
    @linen.compact
    def __call__(self, x):
        logits = linen.Dense(len(PUSHES))(jnp.tanh(linen.Dense(12)(x)))
        value = linen.Dense(1)(jnp.tanh(linen.Dense(12)(x)))
        return logits, value[..., 0]


class Transition(NamedTuple):
    done: Any
    action: Any
    value: Any
    reward: Any
    log_prob: Any
    obs: Any


def observe(env, goal):
    return jnp.concatenate([env["place"] - goal, env["speed"]])


def env_step(env, goal, action):
    """Pushes a point towards its goal; after `HORIZON` steps it begins at the origin again."""
    speed = 0.8 * env["speed"] + 0.2 * jnp.asarray(PUSHES)[action]
    place = env["place"] + speed
    time = env["time"] + 1
    done = time >= HORIZON
    env = jax.tree.map(
        lambda x: jnp.where(done, jnp.zeros_like(x), x),
        {"place": place, "speed": speed, "time": time},
    )
    return env, -jnp.sum((place - goal) ** 2), done


@jax.jit
def _create(key):
    network = ActorCritic()
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3, eps=1e-5))
    params = network.init(key, jnp.zeros(4))
    return TrainState.create(apply_fn=network.apply, params=params, tx=tx)


def make():
    env = {
        "place": np.zeros((NUM_ENVS, 2), np.float32),
        "speed": np.zeros((NUM_ENVS, 2), np.float32),
        "time": np.arange(NUM_ENVS, dtype=np.int32) % HORIZON,
    }
    return _create(initial_key()), env, jax.random.key(0)


def batches():
    rng = np.random.RandomState(0)
    return [{"goal": rng.randn(NUM_ENVS, 2).astype(np.float32)} for _ in range(2)]


def log_probability(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]


def loss_fn(params, policy, batch, advantages, targets):
    logits, value = policy.apply_fn(params, batch.obs)
    clipped = batch.value + jnp.clip(value - batch.value, -CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum((value - targets) ** 2, (clipped - targets) ** 2).mean()
    ratio = jnp.exp(log_probability(logits, batch.action) - batch.log_prob)
    actor_loss = -jnp.minimum(
        ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages
    ).mean()
    probabilities = jax.nn.softmax(logits)
    entropy = -jnp.sum(probabilities * jax.nn.log_softmax(logits), -1).mean()
    return actor_loss + VALUE * value_loss - ENTROPY * entropy


def train_updates(policy, env, key, batch, mean, keys_of, forgets=False):
    goal = batch["goal"]

    def rollout_step(carry, _):
        policy, env, key = carry
        key, action_key = jax.random.split(key)
        obs = jax.vmap(observe)(env, goal)
        logits, value = policy.apply_fn(policy.params, obs)
        action = jax.vmap(jax.random.categorical)(keys_of(action_key, obs), logits)
        env, reward, done = jax.vmap(env_step)(env, goal, action)
        log_prob = log_probability(logits, action)
        return (policy, env, key), Transition(done, action, value, reward, log_prob, obs)

    def advantage_step(carry, transition):
        gae, next_value = carry
        alive = 1 - transition.done
        delta = transition.reward + GAMMA * next_value * alive - transition.value
        gae = delta + GAMMA * GAE_LAMBDA * alive * gae
        return (gae, transition.value), gae

    def minibatch_step(policy, minibatch):
        batch, advantages, targets = minibatch
        center = mean(advantages.mean())
        spread = jnp.sqrt(mean(jnp.mean((advantages - center) ** 2)))
        advantages = (advantages - center) / (spread + 1e-8)
        loss, grads = jax.value_and_grad(loss_fn)(policy.params, policy, batch, advantages, targets)
        return policy.apply_gradients(grads=grads if forgets else mean(grads)), mean(loss)

    def epoch_step(carry, _):
        policy, rollout, key = carry
        key, shuffle_key = jax.random.split(key)
        order = jax.random.permutation(shuffle_key, NUM_STEPS)
        split = lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:])  # noqa: E731
        policy, losses = jax.lax.scan(minibatch_step, policy, jax.tree.map(split, rollout))
        return (policy, rollout, key), losses.mean()

    def update_step(carry, _):
        (policy, env, key), transitions = jax.lax.scan(rollout_step, carry, None, NUM_STEPS)
        _, last_value = policy.apply_fn(policy.params, jax.vmap(observe)(env, goal))
        _, advantages = jax.lax.scan(
            advantage_step, (jnp.zeros_like(last_value), last_value), transitions, reverse=True
        )
        rollout = (transitions, advantages, advantages + transitions.value)
        (policy, _, key), losses = jax.lax.scan(epoch_step, (policy, rollout, key), None, EPOCHS)
        metrics = {"loss": losses.mean(), "reward": mean(transitions.reward.mean())}
        return (policy, env, key), metrics

    carry, metrics = jax.lax.scan(update_step, (policy, env, key), None, NUM_UPDATES)
    return *carry, metrics


def step(policy, env, key, batch):
    return train_updates(policy, env, key, batch, replica_mean, mirror.example_keys)


def broken_step(policy, env, key, batch):
    return train_updates(policy, env, key, batch, replica_mean, mirror.example_keys, forgets=True)


def keys_of_all(key, obs):
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(obs)))


def plain(num_replicas):
    alone_step = jax.jit(partial(train_updates, mean=alone, keys_of=keys_of_all))
    return train(make(), alone_step, batches())


PROGRAM = Program(
    make=make,
    batches=batches,
    step=step,
    broken_step=broken_step,
    drifting="params",
    plain=plain,
    split=(1,),
)
