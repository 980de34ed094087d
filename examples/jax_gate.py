"""Which of 40 features count, and how many? A Flax model with a learned k.

The target depends on 6 of the features. A gate in front of a small network lets k of them through, at random,
by `khot_jax.sample_khot`. Logits, k and the network learn together, with a price a feature. A k between
two integers lets through as many as one of them, so that the expected loss is smooth in k.

It needs khot for JAX, flax and optax: pip install ./khot-jax flax optax

    python examples/jax_gate.py           # 20 s on one core
    python examples/jax_gate.py --seed 1 --steps 2000
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import khot_jax

FEATURES, COUNTS, BATCH, PRICE = 40, 6, 256, 0.1


class Gated(nnx.Module):
    """A network that sees as many features as it pays for."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.logits = nnx.Param(jnp.zeros(FEATURES))
        self.k = nnx.Param(jnp.array(FEATURES / 2))
        self.hidden = nnx.Linear(FEATURES, 64, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def size(self) -> jax.Array:
        """k, where the soft top-k is defined."""
        return jnp.clip(self.k[...], 0.5, FEATURES - 0.5)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """With a key, through a random gate; without one, through the features with the largest logits."""
        k = self.size()
        if key is None:
            gate = khot_jax.topk_mask(self.logits[...], k)
        else:
            gate = khot_jax.sample_khot(key, jnp.broadcast_to(self.logits[...], x.shape), k)
        return self.out(jax.nn.relu(self.hidden(x * gate)))[:, 0]


def target(x: jax.Array) -> jax.Array:
    """Of the first features alone."""
    return 2 * jax.nn.relu(x[:, 0]) + x[:, 1:COUNTS].sum(-1)


def train(seed: int, steps: int) -> tuple[float, float, int]:
    """The learned k, the error in units of the target's variance, and how many chosen features are right."""
    model = Gated(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(
        model,
        optax.multi_transform(
            {"gate": optax.adam(0.03), "rest": optax.adam(5e-3)},
            lambda state: jax.tree_util.tree_map_with_path(
                lambda path, _: "gate" if path[0].key in ("k", "logits") else "rest", state
            ),
        ),
        wrt=nnx.Param,
    )

    @nnx.jit
    def step(model: Gated, optimizer: nnx.Optimizer, key: jax.Array) -> None:
        x_key, gate_key = jax.random.split(key)
        x = jax.random.normal(x_key, (BATCH, FEATURES))

        def loss(model: Gated) -> jax.Array:
            return ((model(x, gate_key) - target(x)) ** 2).mean() + PRICE * model.size()

        optimizer.update(model, nnx.grad(loss)(model))

    for key in jax.random.split(jax.random.key(seed), steps):
        step(model, optimizer, key)
    x = jax.random.normal(jax.random.key(seed + 1), (4096, FEATURES))
    error = ((model(x) - target(x)) ** 2).mean() / target(x).var()
    chosen = khot_jax.topk_mask(model.logits[...], COUNTS)
    return float(model.size()), float(error), int(chosen[:COUNTS].sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    k, error, right = train(given.seed, given.steps)
    print(f"learned k: {k:.1f} of {FEATURES} features, of which {COUNTS} count")
    print(
        f"of the {COUNTS} with the largest logits {right} count; error {error:.3f} of the target's variance"
    )
