"""Random training programs: a `Trainer` against plain JAX on one device with the whole batch.

A `Case` describes a model, a loss, data and a way to train. `wanted` computes the losses, metrics,
parameters and statistics without mirror, and `got` with it. A case that no padded or divided batch
can compute exactly must be refused; every other one must be equal.
"""

import sys
import time
import warnings
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mirror
from tests.support.inside import strategy_in_slices

INPUTS, WIDTH, OUTPUTS = 4, 5, 3
RATE = 0.1
DTYPES = {
    "bool": (0, 2, np.bool_),
    "uint8": (0, 256, np.uint8),
    "int8": (-128, 128, np.int8),
    "int16": (-(2**15), 2**15, np.int16),
    "int32": (-(2**31), 2**31, np.int32),
    "uint32": (2**31, 2**32, np.uint32),
}
MIXES = ("none", "mean", "masked mean", "gather", "masked gather", "own")
LOSSES = ("plain", "weighted", "integers", "parameters")
SHARDS = ("none", "optimizer", "model")
MAPPINGS = ("pmap", "vmap", "pairs", "staged")


@dataclass(frozen=True)
class Case:
    """A training program.

    Attributes:
        seed: Seed of the data and the parameters.
        replicas: Number of replicas.
        mapping: How they are mapped to devices.
        sizes: Numbers of examples of the batches.
        loss: What the loss divides by.
        mix: How the loss looks across rows.
        norm: Whether the model has synchronized batch normalization.
        keyed: Whether it has dropout with keys of the examples.
        pieces: Number of pieces of a batch.
        at_once: Number of steps per launch.
        sample_weight: Whether the losses have weights of examples.
        penalty: Whether the loss has a penalty.
        precision: Precision of the layers.
        shard: What is stored in slices.
        dtypes: Dtypes of the metrics.
    """

    seed: int
    replicas: int = 2
    mapping: str = "pmap"
    sizes: tuple[int, ...] = (8, 8)
    loss: str = "plain"
    mix: str = "none"
    norm: bool = False
    keyed: bool = False
    pieces: int = 1
    at_once: int = 1
    sample_weight: bool = False
    penalty: bool = False
    precision: str | None = None
    shard: str = "none"
    dtypes: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {k: v for k, v in shown.items() if k == "seed" or v != getattr(Case(0), k)}
        return f"Case({', '.join(f'{k}={v!r}' for k, v in changed.items())})"

    @property
    def looks_across(self) -> bool:
        return self.norm or self.mix != "none"

    @property
    def is_refused(self) -> bool:
        """Whether pieces or padding would change the result."""
        if not self.looks_across:
            return False
        counts_padding = self.norm or not self.mix.startswith("masked")
        is_padded = any(size % (self.replicas * self.pieces) for size in self.sizes)
        return (self.pieces > 1 and self.mix != "none") or (counts_padding and is_padded)

    @property
    def is_warned_of(self) -> bool:
        """Whether pieces change the result by the statistics of a layer only."""
        return self.pieces > 1 and self.looks_across and not self.is_refused


def generate(seed: int) -> Case:
    """Returns a random training program."""
    rng = np.random.RandomState(seed)
    mapping = str(rng.choice(MAPPINGS, p=[0.5, 0.2, 0.1, 0.2]))
    replicas = int(rng.choice([1, 2, 3, 4, 8])) if mapping != "pairs" else 4
    mix = str(rng.choice(MIXES, p=[0.3, 0.15, 0.15, 0.15, 0.15, 0.1]))
    pieces = int(rng.choice([1, 1, 1, 2, 3]))
    is_even = rng.rand() < 0.4
    first = int(rng.randint(5, 17))
    if is_even:
        first = max(1, first // (replicas * pieces)) * replicas * pieces
    sizes = [first] * 2 + ([first if is_even else int(rng.randint(1, first + 1))])
    return Case(
        seed,
        1 if mix == "own" and mapping != "pairs" else replicas,
        mapping,
        tuple(sizes),
        str(rng.choice(LOSSES)),
        "none" if mix == "own" and mapping == "pairs" else mix,
        bool(rng.rand() < 0.2),
        bool(rng.rand() < 0.3),
        pieces,
        int(rng.choice([1, 1, 2, 3])),
        bool(rng.rand() < 0.3),
        bool(rng.rand() < 0.3),
        str(rng.choice(["float32", "bfloat16"])) if rng.rand() < 0.15 else None,
        str(rng.choice(SHARDS, p=[0.6, 0.15, 0.25])) if mapping == "pmap" else "none",
        tuple(str(x) for x in rng.choice([*DTYPES], rng.randint(0, 4), replace=False)),
    )


Arrays = dict[str, np.ndarray]


def parameters(case: Case) -> Arrays:
    rng = np.random.RandomState(case.seed + 1)
    first = rng.randn(INPUTS, WIDTH) / 2
    return {"first": first.astype("f4"), "last": (rng.randn(WIDTH, OUTPUTS) / 2).astype("f4")}


def batches(case: Case) -> list[Arrays]:
    rng = np.random.RandomState(case.seed + 2)
    found = []
    for size in case.sizes:
        batch = {
            "x": rng.randn(size, INPUTS).astype("f4"),
            "y": rng.randn(size, OUTPUTS).astype("f4"),
            "w": rng.exponential(size=size).astype("f4") * (rng.rand(size) < 0.7) + 0.01,
            "n": rng.randint(1, 200_000_000, size).astype("i4"),
            "s": (rng.rand(size) * 3).astype("f4"),
        }
        batch["w"] = batch["w"].astype("f4")
        for name in case.dtypes:
            low, high, dtype = DTYPES[name]
            batch[name] = rng.randint(low, high, size, dtype="i8").astype(dtype)
        found.append(batch)
    return found


# Without mirror


def normalize(h: Any, statistics: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """Batch normalization with the statistics of the batch, or with the running ones."""
    if statistics is None:
        new = {"mean": h.mean(0), "var": ((h - h.mean(0)) ** 2).mean(0)}
        return (h - new["mean"]) / jnp.sqrt(new["var"] + 1e-5), new
    return (h - statistics["mean"]) / jnp.sqrt(statistics["var"] + 1e-5), statistics


def kept_by_keys(keys: Any) -> Any:
    return jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (WIDTH,)))(keys)


def loss_of(case: Case, out: Any, batch: Any) -> tuple[Any, Any]:
    """Returns the values and the weights of the examples."""
    losses = ((out - batch["y"]) ** 2).sum(1)
    if case.loss == "weighted":
        return losses * batch["w"], batch["w"]
    if case.loss == "integers":
        return losses * batch["n"].astype("f4"), batch["n"]
    if case.loss == "parameters":
        return losses, 0.5 + jax.nn.sigmoid(out[:, 0])
    return losses, None


def wanted_batch(case: Case, p: Any, batch: Any, running: Any) -> tuple[Any, Any, Any]:
    """Returns the sum of the values, the sum of the weights, and the batch statistics."""
    h, new = batch["x"] @ p["first"], None
    if case.norm:
        h, new = normalize(h, running)
    h = jnp.tanh(h)
    if case.keyed:
        key = jax.random.key(case.seed)
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(h)))
        h = jnp.where(kept_by_keys(keys), 2 * h, 0)
    out = h @ p["last"]
    if case.mix in ("mean", "masked mean", "own"):
        out = out - 0.5 * out.mean(0)
    if case.mix in ("gather", "masked gather"):
        out = out + jnp.tanh(out @ out.T).mean(1)[:, None]
    values, weights = loss_of(case, out, batch)
    values = values * batch["s"] if case.sample_weight else values
    total = len(values) if weights is None else weights.astype("f4").sum()
    penalty = 0.01 * (p["last"] ** 2).sum() if case.penalty else 0.0
    return values.sum() + penalty * total, total, new


def wanted(case: Case) -> dict[str, Any]:
    """Returns what training and evaluation give, with plain JAX."""
    p: Any = {k: jnp.asarray(v) for k, v in parameters(case).items()}
    running: Any = {"mean": jnp.zeros(WIDTH), "var": jnp.ones(WIDTH)}

    def quotient(p: Any, batch: Any) -> Any:
        value, weight, new = wanted_batch(case, p, batch, None)
        return value / weight, (value, weight, new)

    value = weight = 0.0
    for batch in batches(case):
        (_, (v, w, new)), grads = jax.value_and_grad(quotient, has_aux=True)(p, batch)
        p = jax.tree.map(lambda a, b: a - RATE * b, p, grads)
        value, weight = value + float(v), weight + float(w)
        if case.norm:
            running = {k: 0.9 * running[k] + 0.1 * new[k] for k in running}
    found = {"loss": value / weight, **p, **(running if case.norm else {})}
    sums = [wanted_batch(case, p, batch, running)[:2] for batch in batches(case)]
    found["evaluated"] = sum(float(v) for v, _ in sums) / sum(float(w) for _, w in sums)
    for name in case.dtypes:
        values = [int(x) for batch in batches(case) for x in batch[name]]
        found["metric " + name] = sum(values) / len(values)
    return found


# With mirror


class Net(nnx.Module):
    def __init__(self, case: Case) -> None:
        rngs, self.seed = nnx.Rngs(0), case.seed
        self.first = nnx.Linear(INPUTS, WIDTH, use_bias=False, rngs=rngs)
        self.last = nnx.Linear(WIDTH, OUTPUTS, use_bias=False, rngs=rngs)
        options = {"use_bias": False, "use_scale": False, "momentum": 0.9}
        axis = mirror.REPLICA_AXIS
        norm = nnx.BatchNorm(WIDTH, axis_name=axis, rngs=rngs, **options) if case.norm else None
        self.norm = nnx.data(norm)
        for name, value in parameters(case).items():
            getattr(self, name).kernel[...] = value

    def __call__(self, batch: Any, *, keyed: bool) -> Any:
        h = self.first(batch["x"])
        h = jnp.tanh(h if self.norm is None else self.norm(h))
        if keyed:
            keys = mirror.example_keys(jax.random.key(self.seed), h)
            h = jnp.where(kept_by_keys(keys), 2 * h, 0)
        return self.last(h).astype(jnp.float32)


def mixed(case: Case, out: Any, batch: Any) -> Any:
    """Returns outputs that depend on other rows, of other replicas too."""
    context, mask = mirror.get_replica_context(), mirror.example_mask(batch)
    match case.mix:
        case "own":
            return out - 0.5 * out.mean(0)
        case "mean":
            return out - 0.5 * context.all_reduce("mean", out.mean(0))
        case "masked mean":
            sums = jnp.where(mask[:, None], out, 0).sum(0), mask.sum()
            total, count = context.all_reduce("sum", sums)
            return out - 0.5 * total / count
        case "gather":
            rows = context.all_gather(out)
            return out + jnp.tanh(out @ rows.T).mean(1)[:, None]
        case "masked gather":
            rows, is_example = context.all_gather((out, mask))
            scores = jnp.where(is_example, jnp.tanh(out @ rows.T), 0)
            return out + (scores.sum(1) / is_example.sum())[:, None]
    return out


def strategy_of(case: Case) -> mirror.MirroredStrategy:
    devices, n = jax.devices("cpu"), case.replicas
    match case.mapping:
        case "vmap":
            return mirror.MirroredStrategy(devices[:1], replicas_per_device=n)
        case "pairs":
            return mirror.MirroredStrategy(devices[: n // 2], replicas_per_device=2)
        case "staged":
            return mirror.MirroredStrategy(devices[:n], mirror.ReductionToOneDevice())
    return strategy_in_slices(devices[:n], shard=case.shard)


def trainer_of(case: Case, *, require_equal: bool | None = None) -> mirror.Trainer[Net]:
    def loss_fn(model: Net, batch: Any) -> Any:
        out = mixed(case, model(batch, keyed=case.keyed), batch)
        values, weights = loss_of(case, out, batch)
        metrics = {"metric " + name: batch[name] for name in case.dtypes}
        return (values if weights is None else mirror.Weighted(values, weights)), metrics

    return mirror.Trainer(
        Net(case),
        optax.sgd(RATE),
        loss_fn,
        strategy=strategy_of(case),
        accumulate_steps=case.pieces,
        steps_per_execution=case.at_once,
        sample_weight="s" if case.sample_weight else None,
        penalty=(lambda m: 0.01 * (m.last.kernel[...] ** 2).sum()) if case.penalty else None,
        precision=case.precision,
        require_equal=require_equal,
    )


def got(case: Case) -> dict[str, Any]:
    """Returns what training and evaluation give, with mirror."""
    trainer, data = trainer_of(case), batches(case)
    if case.seed % 4 == 0:
        verified(case, trainer, data)
    history = trainer.fit(data, progress=False)
    model = trainer.model
    found: dict[str, Any] = {name: history[name][0] for name in history}
    found |= {"first": model.first.kernel[...], "last": model.last.kernel[...]}
    if case.norm:
        found |= {"mean": model.norm.mean[...], "var": model.norm.var[...]}
    found["evaluated"] = trainer.evaluate(data)["loss"]
    return found


def verified(case: Case, trainer: mirror.Trainer[Net], data: list[Arrays]) -> None:
    """Checks that `verify` compares the first batch with one device."""
    depends = case.is_refused or case.is_warned_of
    differs = depends and (case.pieces > 1 or bool(case.sizes[0] % case.replicas))
    try:
        trainer.verify(data, rtol=0.1 if case.precision == "bfloat16" else 1e-3)
    except mirror.VerifyError:
        if not differs:
            raise
    else:
        assert case.precision or not differs, "verify agrees with padding or pieces"


def broken(case: Case) -> str:
    """Returns how a case differs from one device, or an empty string."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = got(case)
        except (AssertionError, mirror.VerifyError) as error:
            return f"verify: {error}"
        except ValueError as error:
            is_ours = "looks across the examples" in str(error) or "computes means" in str(error)
            return "" if is_ours and case.is_refused else f"{type(error).__name__}: {error}"
    if case.is_refused:
        return "not refused"
    if case.is_warned_of:
        texts = [str(warning.message) for warning in warned]
        return "" if any("accumulate_steps" in text for text in texts) else "not warned of"
    if any("one device with the whole batch" in str(warning.message) for warning in warned):
        return "warned of"
    rtol = 0.08 if case.precision == "bfloat16" else 2e-4
    differences = []
    for name, value in wanted(case).items():
        if name.startswith("metric"):
            is_equal = found[name] == value
        else:
            scale = float(np.abs(np.asarray(value)).max())
            distance = float(np.abs(np.asarray(found[name]) - np.asarray(value)).max())
            is_equal = distance <= rtol * max(scale, 1e-2)
        if not is_equal:
            differences.append(f"{name}: got {found[name]}, wanted {value}")
    return "\n".join(differences)


class Found(NamedTuple):
    """What a search found: how many programs it ran, were refused, and differed by what."""

    count: int
    refused: int
    broken: dict[str, str]


def search(start: int, secs: float, *, shows_all: bool = False) -> Found:
    """Checks the programs of the seeds from `start`; at least one."""
    count, refused, found = 0, 0, dict[str, str]()
    end = time.monotonic() + secs
    while not count or time.monotonic() < end:
        case = generate(start + count)
        words = broken(case)
        if words:
            found[str(case)] = words
        if words or shows_all:
            print(f"{case}\n{words or 'equal, or refused as it must be'}", flush=True)
        count, refused = count + 1, refused + case.is_refused
    return Found(count, refused, found)


if __name__ == "__main__":
    mirror.config.set_num_cpu_devices(8)
    secs = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    found = search(int(sys.argv[1]), secs, shows_all=not secs)
    print(f"{found.count} programs, {found.refused} refused, {len(found.broken)} broken")
    sys.exit(bool(found.broken))
