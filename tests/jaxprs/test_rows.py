"""Which programs look across the rows of a batch, and where padding enters."""

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

import mirror
from mirror._src.jaxprs.row_facts import NO_ROWS, row
from mirror._src.jaxprs.rows import find_rows
from mirror._src.jaxprs.trace import trace

ROWS, REPLICAS = 6, 4
X = jax.ShapeDtypeStruct((ROWS, 8), jnp.float32)
LONG = jax.ShapeDtypeStruct((ROWS, 7, 8), jnp.float32)
IMAGES = jax.ShapeDtypeStruct((ROWS, 8, 8, 3), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((ROWS, 8, 8), jnp.float32)
LABELS = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
TOKENS = jax.ShapeDtypeStruct((ROWS, 5), jnp.int32)
WEIGHTS = jax.ShapeDtypeStruct((8, 4), jnp.float32)
AXIS = mirror.REPLICA_AXIS
entropy = optax.softmax_cross_entropy_with_integer_labels


def one(rows):
    return jax.ShapeDtypeStruct((1, *rows.shape[1:]), rows.dtype)


class Transformer(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.norm = nnx.Embed(11, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, 8, decode=False, dropout_rate=0.1, rngs=rngs)
        self.drop, self.out = nnx.Dropout(0.3, rngs=rngs), nnx.Linear(8, 11, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        mask = nnx.make_causal_mask(tokens)
        x += self.drop(self.attend(self.norm(x), mask=mask, deterministic=False, rngs=nnx.Rngs(1)))
        return self.out(x)


class Convolutional(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv, self.out = nnx.Conv(3, 4, (3, 3), rngs=rngs), nnx.Linear(64, 3, rngs=rngs)
        self.norm = nnx.GroupNorm(4, num_groups=2, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
        return self.out(nnx.avg_pool(x, (1, 1)).reshape(x.shape[0], -1))


def margin(_, x, y):
    return jnp.maximum(0, x - jnp.take_along_axis(x, y[:, None], 1) + 1).sum(-1)


def last_states(_, x, y):
    layer = nnx.RNN(nnx.GRUCell(8, 4, rngs=nnx.Rngs(0)), return_carry=True, rngs=nnx.Rngs(0))
    return layer(x, seq_lengths=y)[0].sum(-1)


def recurrent(_, x):
    layer = nnx.RNN(nnx.LSTMCell(8, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    return layer(x)[:, -1].sum(-1)


def siamese(_, x):
    both = jnp.tanh(jnp.concatenate([x, 2 * x]))
    return ((both[:ROWS] - both[ROWS:]) ** 2).sum(-1)


def with_keys(_, x):
    keys = mirror.example_keys(jax.random.key(0), x)
    return x.sum(-1) + jax.vmap(jax.random.normal)(keys)


def ring(x):
    return jax.lax.ppermute(x, AXIS, [(i, (i + 1) % REPLICAS) for i in range(REPLICAS)])


def ring_and_back(mask, x):
    """Returns the gradient of products of rows of all replicas, of which none is padding."""

    def loss(x):
        others, total = jnp.where(mask[:, None], x, 0), 0.0
        for _ in range(REPLICAS):
            others = ring(others)
            total += (x @ others.T).sum(-1)
        return jnp.where(mask, total, 0).sum()

    return jax.grad(loss)(x)


def ring_with_mask(mask, x):
    others, shown = ring((x, mask))
    return jax.nn.logsumexp(jnp.where(shown, x @ others.T, -1e9), -1)


def ring_in_a_loop(mask, x, lag=0):
    """Sums exponentials over the rows of all replicas, one replica per round."""

    def step(carry, _):
        others, shown, total = carry
        total += jnp.where(shown, jnp.exp(x @ others.T), 0).sum(-1)
        return (ring(others), ring(shown), total), total

    others, shown = x, mask
    for _ in range(lag):
        others = ring(others)
    (_, _, last), totals = jax.lax.scan(step, (others, shown, jnp.zeros(ROWS)), length=REPLICAS)
    return last + totals.sum(0)


def ring_mean(mask, x, count):
    others, total = x, 0.0
    for _ in range(REPLICAS):
        total += jnp.where(mask, jnp.exp(x @ others.T), 0).sum(-1)
        others, mask = ring((others, mask))
    return total / count


def own_labels(mask, x, shift=0, size=ROWS, axis=0, one_hot=False):
    """Returns the score of each row and itself, among the rows of all replicas."""
    every, shown = (jax.lax.all_gather(v, AXIS, axis=axis) for v in (x, mask))
    scores = x @ every.reshape(REPLICAS * ROWS, -1).T
    labels = jnp.arange(ROWS) + jax.lax.axis_index(AXIS) * size + shift
    if one_hot:
        ones = jax.nn.one_hot(labels, REPLICAS * ROWS)
        scores = jnp.where(shown.reshape(-1), scores, -1e9)
        return optax.softmax_cross_entropy(scores, ones)
    return (
        entropy(jnp.where(shown.reshape(-1), scores, -1e9), labels)
        - scores[jnp.arange(ROWS), labels]
    )


def added_in_turn(mask, x, shift=0, count=1):
    def add(i, total):
        return total + jnp.where(mask[i + shift], x[i], 0)

    return x.sum(-1) - (jax.lax.fori_loop(0, ROWS, add, jnp.zeros(8)) / count).sum()


def second(x):
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2), (2, 2), "VALID")


def written_in_turn(write):
    """Writes the value of a row in each round."""
    return lambda _, x: jax.lax.fori_loop(0, ROWS, lambda i, t: write(t, i, x[i]), jnp.zeros(ROWS))


def until_large(_, x):
    return jax.vmap(
        lambda r: jax.lax.while_loop(lambda v: (v < 9).any(), lambda v: v + 1, r).sum()
    )(x)


def solved(_, x):
    return jnp.linalg.solve(x + jnp.eye(8), jnp.ones((ROWS, 8, 1)))[:, 0, 0]


def normalized(axis=None, masked=False, **options):
    def loss(mask, x):
        norm = nnx.BatchNorm(8, axis_name=axis, rngs=nnx.Rngs(0), **options)
        return norm(x, mask=mask[:, None] if masked else None).sum(-1)

    return loss


def summed(tree):
    return jax.lax.psum(tree, AXIS)


def grouped(x):
    return jax.lax.psum(x, AXIS, axis_index_groups=[[0, 1], [2, 3]])


def everywhere(x):
    return jax.lax.all_gather(x, AXIS, tiled=True)


def ghost(_, x):
    """Normalizes in groups of half a batch."""
    groups = x.reshape(2, ROWS // 2, 8)
    return (groups - groups.mean(1, keepdims=True)).reshape(ROWS, 8).sum(-1)


def balance(_, x):
    share = jax.nn.one_hot(x.argmax(-1), 8).mean(0)
    return x.sum(-1) + (jax.nn.softmax(x).mean(0) * share).sum()


def second_mean(mask, x):
    x = x - jnp.mean(x, 0, where=mask[:, None])
    return (x - x.mean(0)).sum(-1)


def picked_at(x, index):
    """Returns the number at an index vector."""
    axes = tuple(range(x.ndim))
    dimensions = jax.lax.GatherDimensionNumbers((), axes, axes)
    return jax.lax.gather(x, index, dimensions, (1,) * x.ndim)


def temperature(mask, x, w):
    scores = jnp.where(everywhere(mask), x @ everywhere(x).T, -1e9)
    return jax.nn.logsumexp(scores * jnp.minimum(jnp.exp(w[0, 0]), 100), -1)


ONE_BY_ONE = {
    "dense": (lambda _, x, w: jax.nn.softmax(x @ w).max(-1), X, WEIGHTS),
    "entropy": (lambda _, x, w, y: entropy(x @ w, y), X, WEIGHTS, LABELS),
    "picked": (lambda _, x, y: jax.nn.log_softmax(x)[jnp.arange(ROWS), y], X, LABELS),
    "picked with a new axis": (
        lambda _, x, t: x[jnp.arange(ROWS)[:, None], t].sum(-1),
        X,
        TOKENS,
    ),
    "positions along the second axis": (lambda _, x: x[jnp.arange(ROWS)[None], 0][0], X),
    "the index of one row": (
        lambda _, x, y: x.sum(-1) + picked_at(jnp.ones(8), y),
        *map(one, (X, LABELS)),
    ),
    "the position of one row": (lambda _, x: picked_at(x[:, 0], jnp.arange(1))[None], one(X)),
    "margin": (margin, X, LABELS),
    "states at lengths": (last_states, LONG, LABELS),
    "margin of one row": (margin, *map(one, (X, LABELS))),  # JAX gathers differently
    "states at the length of one row": (last_states, *map(one, (LONG, LABELS))),
    "one-hot": (lambda _, x, y: (jax.nn.one_hot(y, 8) * x).sum(-1), X, LABELS),
    "transformer": (lambda _, t: entropy(Transformer()(t), t).mean(-1), TOKENS),
    "convolutional": (lambda _, x, y: entropy(Convolutional()(x), y), IMAGES, LABELS),
    "recurrent": (recurrent, LONG),
    "scan": (lambda _, x: jax.lax.scan(lambda c, a: (c + a, a), x[:, 0], x.T)[0], X),
    "map": (lambda _, x: jax.lax.map(lambda r: (r**2).sum(), x), X),
    "vmap": (lambda _, x: jax.vmap(lambda r: jnp.linalg.norm(jnp.outer(r, r) @ r))(x), X),
    "flattened": (lambda _, x, w: (x.reshape(-1, 8) @ w).reshape(ROWS, 28).sum(1), LONG, WEIGHTS),
    "siamese": (siamese, X),
    "tiled": (lambda _, x: jnp.tile(x, 2).sum(-1), X),
    "transformed": (lambda _, x: jnp.abs(jnp.fft.rfft(x)).sum(-1), X),
    "tiled rows": (lambda _, x: jnp.tile(x, (2, 1))[:ROWS].sum(-1), X),
    "extended": (lambda _, x: jnp.pad(x, ((0, 2), (0, 0)))[:ROWS].sum(-1), X),
    "siamese and split": (lambda _, x: jnp.split(jnp.concatenate([x, x]), 2)[1].sum(-1), X),
    "unstacked": (lambda _, x: sum(jnp.unstack(x, axis=1)), X),
    "keys of examples": (with_keys, X),
    "remat": (lambda _, x: jax.checkpoint(lambda x: jnp.sin(x).sum(-1))(x), X),
    "cond": (lambda _, x: jax.lax.cond(True, lambda x: x.sum(-1), lambda x: x.max(-1), x), X),
    "while": (until_large, X),
    "sort": (lambda _, x: jnp.sort(x, -1)[:, 0] + jax.lax.top_k(x, 2)[0].sum(-1), X),
    "einsum": (lambda _, x: jnp.einsum("bi,bj->bij", x, x).sum((1, 2)), X),
    "convolve": (lambda _, x: jax.vmap(lambda r: jnp.convolve(r, jnp.ones(3)))(x).sum(-1), X),
    "solve": (solved, SQUARE),
    "sum of constants": (lambda _, x: x.sum(-1) + summed(1.0) + summed(jnp.ones(3)).sum(), X),
    "dropout": (lambda _, x: nnx.Dropout(0.5, rngs=nnx.Rngs(0))(x).sum(-1), X),
    "set": (lambda _, x, y: x.at[:, 0].set(0).at[jnp.arange(ROWS), y].set(1.0).sum(-1), X, LABELS),
    "divided by infinity": (lambda _, x: (x / jnp.inf + x * 1e-45).sum(-1), X),
    "set in constants": (
        lambda _, x, y: (x * jnp.full((ROWS, 8), 0.1).at[jnp.arange(ROWS), y].set(0.9)).sum(-1),
        X,
        LABELS,
    ),
    "columns beside each other": (  # JAX reduces along `np.int64(0)`
        lambda _, x: jax.vmap(lambda r: jax.nn.logsumexp(jnp.stack([r, 2 * r])))(x[:, 0]),
        X,
    ),
    "running statistics": (normalized(use_running_average=True), X),
    "ctc": (
        lambda _, x, t: optax.ctc_loss(x, jnp.zeros((ROWS, 7)), t, jnp.zeros((ROWS, 5))),
        LONG,
        TOKENS,
    ),
}
for_loops = {
    "set": lambda t, i, row: t.at[i].set((row**2).sum()),
    "added": lambda t, i, row: t.at[i].add(jnp.sin(row).sum()),
    "updated": lambda t, i, row: jax.lax.dynamic_update_slice(t, row[:1], (i,)),
}
ONE_BY_ONE |= {f"{name} in turn": (written_in_turn(fn), X) for name, fn in for_loops.items()}
EXCLUDED = {  # padding does not enter
    "batch norm": (normalized(masked=True), X),
    "sums": (
        lambda m, x: x.sum(-1) - summed(jnp.where(m[:, None], x, 0).sum()) / summed(m.sum()),
        X,
    ),
    "products": (lambda m, x: x.sum(-1) - summed((m[:, None] * x).sum()) / summed(m.sum()), X),
    "dot": (lambda m, x: x.sum(-1) - summed(m.astype(x.dtype) @ x).sum() / summed(m.sum()), X),
    "mean": (lambda m, x: x.sum(-1) - jnp.mean(x, where=m[:, None]), X),
    "mean of products": (lambda m, x: x.sum(-1) - jnp.mean(m[:, None] * x) / m.mean(), X),
    "negative mean of products": (
        lambda m, x: x.sum(-1) - (-(m[:, None] * x).sum() / x.size) / (m.sum() / len(m)),
        X,
    ),
    "mean of a square": (lambda m, x: x.sum(-1) - (m[:, None] * x)[:, :6].sum(0).mean(), X),
    "mean of features": (lambda m, x: x.sum(-1) - (m[:, None] * x).sum(0).mean(), X),
    "gather": (
        lambda m, x: jnp.where(everywhere(m), x @ everywhere(x).T, -1e9).max(-1),
        X,
    ),
    "largest features": (
        lambda m, x: x.sum(-1) - jax.lax.top_k(m[:, None] * x, 2)[0].sum(),
        X,
    ),
    "singular values": (
        lambda m, x: (
            x.sum(-1)
            - jnp.linalg.svd(m[:, None] * x, compute_uv=False).sum()
            - jnp.linalg.svd(m[:, None] * x, full_matrices=False)[1].sum()
            - jnp.linalg.eigh((y := m[:, None] * x) @ y.T)[0].sum()
        ),
        X,
    ),
    "added to rows at labels": (
        lambda m, x, y: x.at[y].add(m[:, None] * x).sum(-1),
        X,
        LABELS,
    ),
    "until the largest example is large": (
        lambda m, x: jax.lax.while_loop(
            lambda v: jnp.where(m, v, -jnp.inf).max() < 9, lambda v: v + 1, x[:, 0]
        ),
        X,
    ),
    "rows of all replicas in turn": (ring_and_back, X),
    "rows of another replica and their mask": (ring_with_mask, X),
    "halves rounded to even": (
        lambda m, x: x.sum(-1) - jnp.round(jax.nn.sigmoid(m[:, None] * x)).sum(),
        X,
    ),
    "complex": (lambda m, x: x.sum(-1) - jnp.abs((m[:, None] * (x + 1j)).sum()), X),
    "complex zeros": (
        lambda m, x: x.sum(-1) - jnp.abs(jnp.where(m[:, None], x + 1j, 0).sum()),
        X,
    ),
    **{
        f"picked or {fill}": (
            lambda m, x, y, fill=fill: (
                x.sum(-1)
                - jnp.take_along_axis(
                    m[:, None] * x, y[:, None], 1, mode="fill", fill_value=fill
                ).sum()
            ),
            X,
            LABELS,
        )
        for fill in (0.0, None)
    },
    "sums from here": (
        lambda m, x: x.sum(-1) - jax.lax.cumsum(m[:, None] * x, 0, reverse=True).sum(),
        X,
    ),
    "learned temperature": (temperature, X, WEIGHTS),
    "labels of own rows": (own_labels, X),
    "one-hot labels of own rows": (lambda m, x: own_labels(m, x, one_hot=True), X),
    "rows by the index of a round": (added_in_turn, X),
    "a ring in a loop": (ring_in_a_loop, X),
    "a ring, by the number of examples": (lambda m, x: ring_mean(m, x, summed(m.sum())), X),
    "negated": (lambda m, x: jnp.where(~everywhere(m), -1e9, x @ everywhere(x).T).max(-1), X),
    "any": (lambda m, x: x.sum(-1) * (m[:, None] & (x > 0)).any(), X),
    "max": (
        lambda m, x: x.max(-1) - jax.lax.pmax(jnp.where(m[:, None], x, -jnp.inf).max(), AXIS),
        X,
    ),
}
ACROSS = {
    "sums so far in turn": (written_in_turn(lambda t, i, row: t.at[i].set(t.sum() + row[0])), X),
    "written to the next row": (written_in_turn(lambda t, i, row: t.at[i + 1].set(row[0])), X),
    "one-hot labels of other rows": (lambda m, x: own_labels(m, x, shift=1, one_hot=True), X),
    "labels of other rows": (lambda m, x: own_labels(m, x, shift=1), X),
    "labels of rows of other sizes": (lambda m, x: own_labels(m, x, size=ROWS - 1), X),
    "labels of rows in another order": (lambda m, x: own_labels(m, x, axis=1), X),
    "mean in turn by the number of rows": (lambda m, x: added_in_turn(m, x, count=ROWS), X),
    "mask by another index": (lambda m, x: added_in_turn(m, x, shift=-1), X),
    "a ring in a loop, whose mask is late": (lambda m, x: ring_in_a_loop(m, x, lag=1), X),
    "a ring, by the number of rows": (lambda m, x: ring_mean(m, x, REPLICAS * ROWS), X),
    "a ring, by the number of rows of a replica": (lambda m, x: ring_mean(m, x, ROWS), X),
    "every second row": (lambda _, x: x.sum(-1) - jnp.concatenate([second(x)] * 2).sum(-1), X),
    "features beside each other": (
        lambda _, x: jax.lax.all_gather(x, AXIS, axis=1, tiled=True).sum(-1),
        X,
    ),
    "an index vector of all rows": (
        lambda _, x, y: x.sum(-1) * picked_at(jnp.ones((2,) * ROWS), y),
        X,
        LABELS,
    ),
    "labels with positions": (lambda _, x, y: x[y, jnp.arange(ROWS)], X, LABELS),
    "labels in constants with positions": (
        lambda _, x, y: (x * jnp.ones((ROWS, 8)).at[y, jnp.arange(ROWS)].set(0.0)).sum(-1),
        X,
        LABELS,
    ),
    "more rows than constants": (
        lambda _, x: x.sum(-1) * jnp.ones(ROWS - 1).at[jnp.arange(ROWS)].set(x[:, 0])[0],
        X,
    ),
    "constants set to rows of another replica": (
        lambda _, x: jnp.zeros(ROWS).at[jnp.arange(ROWS)].set(ring(x)[:, 0]),
        X,
    ),
    "set to rows of another replica": (
        lambda _, x: x[:, 0].at[jnp.arange(ROWS)].set(ring(x)[:, 0]),
        X,
    ),
    "sum along a stack": (
        lambda _, x: (
            x[:, 0] - jax.vmap(lambda r: jax.nn.logsumexp(jnp.stack([r, r])))(x[:, 0]).sum()
        ),
        X,
    ),
    "masked rows by labels": (
        lambda m, x, y: jnp.where(m[:, None], x, -1e3)[y].sum(-1),
        X,
        LABELS,
    ),
    "masked rows in another order": (
        lambda m, x: (m[:, None] * x)[jnp.arange(ROWS)[::-1]].sum(-1),
        X,
    ),
    **{
        f"{name} of masked rows of another replica": (
            lambda m, x, reduce=reduce: x.sum(-1) - reduce(x, ring(m[:, None] * x)),
            X,
        )
        for name, reduce in {
            "exponentials": lambda x, y: jnp.exp(x @ y.T).sum(1),
            "maximum": lambda x, y: y.max(),
            "mean": lambda x, y: y.mean(),
            "difference": lambda x, y: y.sum(-1),
        }.items()
    },
    "own mask of rows of another replica": (lambda m, x: jnp.where(m, ring(x)[:, 0], 0), X),
    "transformed": (lambda _, x: jnp.abs(jnp.fft.fft(x[:, 0])), X),
    "transformed with zeros": (lambda m, x: jnp.abs(jnp.fft.fft(m * x[:, 0])), X),
    "until the largest is large": (
        lambda _, x: jax.lax.while_loop(lambda v: v.max() < 9, lambda v: v + 1, x[:, 0]),
        X,
    ),
    "added to rows at labels": (lambda _, x, y: x.at[y].add(x).sum(-1), X, LABELS),
    "tiled rows": (lambda _, x: x.sum(-1) - jnp.tile(x, (2, 1)).mean(), X),
    "roll by a number": (
        lambda _, x, w: x[:, 0] * jnp.roll(x[:, 1], w[0, 0].astype(int)),
        X,
        WEIGHTS,
    ),
    "shifted": (lambda _, x: x.sum(-1) - jnp.pad(x, ((1, 0), (0, 0)))[:-1, 0], X),
    "joined and shifted": (lambda _, x: jnp.concatenate([x, x])[1 : ROWS + 1].sum(-1), X),
    "squeezed": (lambda _, x: x.sum(-1) - summed(x[0]).sum(), one(X)),
    **{
        f"bits of rows, {fill}": (
            lambda m, y, reduce=reduce, fill=fill: y - reduce(jnp.where(m, y, fill)),
            LABELS,
        )
        for reduce, fill in (
            (jnp.bitwise_or.reduce, jnp.iinfo(jnp.int32).min),
            (jnp.bitwise_and.reduce, jnp.iinfo(jnp.int32).max),
        )
    },
    "positions of the largest": (
        lambda m, x: x.sum(-1) - jax.lax.top_k(m[:, None] * x, 2)[1].sum(),
        X,
    ),
    "singular vectors": (
        lambda m, x: x.sum(-1) - jnp.linalg.svd(m[:, None] * x, full_matrices=False)[2].sum(),
        X,
    ),
    "eigenvectors": (
        lambda m, x: x.sum(-1) - jnp.linalg.eigh((y := m[:, None] * x) @ y.T)[1].sum(),
        X,
    ),
    "halves rounded up": (
        lambda m, x: x.sum(-1) - jax.lax.round(jax.nn.sigmoid(m[:, None] * x)).sum(),
        X,
    ),
    "imaginary": (lambda _, x: x.sum(-1) - jnp.abs((x * 1j).sum()), X),
    "picked or one": (
        lambda m, x, y: (
            x.sum(-1)
            - jnp.take_along_axis(m[:, None] * x, y[:, None], 1, mode="fill", fill_value=1.0).sum()
        ),
        X,
        LABELS,
    ),
    "sums that wrap": (
        lambda m, y: (
            y
            - jnp.tile(jnp.where(m, y, 1)[:, None].astype("uint8"), 256).sum(1, dtype="uint8").min()
        ),
        LABELS,
    ),
    "sums so far": (lambda m, x: x.sum(-1) - jnp.cumsum(m[:, None] * x, 0).sum(), X),
    "sums of neighbors": (
        lambda m, x: (
            x.sum(-1)
            - jax.lax.reduce_window(
                m[:, None] * x, 0.0, jax.lax.add, (2, 1), (1, 1), "SAME_LOWER"
            ).sum()
        ),
        X,
    ),
    "tiled": (lambda _, x: jnp.tile(x, 2).sum(-1) - jnp.tile(x, 2).mean(0).sum(), X),
    "unstacked": (lambda _, x: x.sum(-1) - jnp.unstack(x, axis=1)[0].mean(), X),
    "unstacked rows": (lambda _, x: x.sum(-1) - jnp.unstack(x, axis=0)[0].sum(), X),
    "synchronized batch norm": (normalized(AXIS), X),
    "batch norm": (normalized(), X),
    "means of means": (normalized(AXIS, masked=True), X),
    "linen": (
        lambda _, x: (
            linen.BatchNorm(use_running_average=False)
            .init_with_output(jax.random.key(0), x)[0]
            .sum(-1)
        ),
        X,
    ),
    "mean": (lambda _, x: x.sum(-1) - x.mean(), X),
    "gather": (lambda _, x: jax.nn.logsumexp(x @ everywhere(x).T, -1), X),
    "own mask": (lambda m, x: jnp.where(m, (x @ everywhere(x).T).max(-1), 0), X),
    "gather to an axis": (lambda _, x: x.sum(-1) + jax.lax.all_gather(x, AXIS).mean(), X),
    "similarities": (lambda _, x: jax.nn.logsumexp(x @ x.T, -1), X),
    "pairs": (lambda _, x: jnp.abs(x[:, None] - x[None]).sum((1, 2)), X),
    "roll": (lambda _, x: (x * jnp.roll(x, 1, 0)).sum(-1), X),
    "mixup": (lambda _, x: x[jax.random.permutation(jax.random.key(0), ROWS)].sum(-1), X),
    "first rows": (lambda _, x: (x - x[:1]).sum(-1), X),
    "columns of the first row": (lambda _, x: x.sum(-1) - x[0][jnp.arange(ROWS)], X),
    "first row": (lambda _, x: (x - x[0]).sum(-1), X),
    "reversed": (lambda _, x: (x - x[::-1]).sum(-1), X),
    "sorted": (lambda _, x: jnp.sort(x, 0).sum(-1), X),
    "cumulated": (lambda _, x: jnp.cumsum(x, 0).sum(-1), X),
    "groups": (ghost, X),
    "scan": (lambda _, x: jax.lax.scan(lambda c, a: (c + a.sum(), c), 0.0, x)[1], X),
    "load balance": (balance, X),
    "segments": (lambda _, x, y: jax.ops.segment_sum(x, y, 4)[y].sum(-1), X, LABELS),
    "neighbor": (
        lambda _, x: x.sum(-1) * jax.lax.ppermute(x, AXIS, [(0, 1), (1, 0)]).sum(-1),
        X,
    ),
    "max": (lambda _, x: x.max(-1) - jax.lax.pmax(x.max(), AXIS), X),
    "gram": (lambda _, x: x.sum(-1) + jnp.linalg.slogdet(x.T @ x + jnp.eye(8))[1], X),
    "second mean": (second_mean, X),
    "mean with zeros": (lambda m, x: x.sum(-1) - jnp.where(m[:, None], x, 0).mean(), X),
    "variance with zeros": (lambda m, x: x.sum(-1) - (m[:, None] * x).var(0).sum(), X),
    "number of rows": (lambda m, x: x.sum(-1) - ((m[:, None] * x).sum(0) / len(x)).sum(), X),
    **{
        f"mean by the number of rows, {name}": (
            lambda m, x, mean=mean: x.sum(-1) - mean(m, m[:, None] * x),
            X,
        )
        for name, mean in {
            "negative": lambda m, x: -x.sum() / x.size,
            "after sums": lambda m, x: x.sum(0).sum() / x.size,
            "after means": lambda m, x: x.sum(0).mean() / len(x),
            "halved": lambda m, x: 0.5 * x.sum() / x.size,
            "by an array": lambda m, x: x.sum() / jnp.full((), float(x.size)),
            "accuracy": lambda m, x: (m * (x[:, 0] > 0)).sum() / len(x),
            "of two sums": lambda m, x: (x.sum() + (x**2).sum()) / x.size,
            "with a penalty": lambda m, x: (1.0 + x.sum()) / x.size,
            "of all replicas": lambda m, x: -jax.lax.psum(x.sum(), AXIS) / (REPLICAS * x.size),
        }.items()
    },
    "number of all rows": (
        lambda m, x: x.sum(-1) - (summed((m[:, None] * x).sum(0)) / (REPLICAS * ROWS)).sum(),
        X,
    ),
    "number of rows of a group": (
        lambda m, x: x.sum(-1) - (grouped((m[:, None] * x).sum(0)) / (2 * ROWS)).sum(),
        X,
    ),
    "share of rows": (lambda m, x: x.sum(-1) * m.mean(), X),
    "share of one row": (lambda m, x: x.sum(-1) * m.mean(), one(X)),
    "sum at the index of one row": (
        lambda _, x, y: x.sum(-1) * jnp.tanh(x[jnp.arange(1), y].sum(0)),
        *map(one, (X, LABELS)),
    ),
    "rows at computed rows": (lambda _, x, y: x[y].sum(-1), *map(one, (X, LABELS))),
}


def found(fn, *arguments, num_replicas=REPLICAS):
    """Returns whether rows are mixed, and whether padding enters."""
    size = arguments[0].shape[0]
    mask = jax.ShapeDtypeStruct((size,), bool)
    program = trace(lambda *leaves: [fn(*leaves)], [mask, *arguments], num_replicas)
    inputs = [row(size) if x.shape[0] == size else NO_ROWS for x in arguments]
    rows = find_rows(program, [row(size, is_mask=True), *inputs], num_replicas)
    places = [place for each in rows for place in each.mixed | each.padded]
    assert all(__file__.rpartition("/")[2] in place.line for place in places), places
    return any(each.mixed for each in rows), any(each.padded for each in rows)


def test_one_replica_gathers_along_a_new_axis():
    def loss(_, x):
        return x.sum(-1) - jax.lax.all_gather(x, AXIS).mean(1).sum()

    assert found(loss, X, num_replicas=1) == (True, True)


def test_programs_that_look_across_rows_are_found(subtests):
    tables = {(False, False): ONE_BY_ONE, (True, False): EXCLUDED, (True, True): ACROSS}
    for wanted, table in tables.items():
        for name, (fn, *arguments) in table.items():
            with subtests.test(msg=f"{name} {wanted}"):
                assert found(fn, *arguments) == wanted
