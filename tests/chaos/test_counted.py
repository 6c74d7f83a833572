"""Batches that change or hold odd values, and calls from inside other calls."""

import asyncio
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.tables import mostly_slow

BATCH = 4
STEPS = 3  # per epoch; the second batch is the odd one


def batch_of(size: int = BATCH, **leaves: Any) -> dict[str, Any]:
    """Returns a batch; `leaves` replace its leaves, and None removes one."""
    x, y = np.ones((size, 2), np.float32), np.ones((size, 1), np.float32)
    batch = {"x": x, "y": y, **leaves}
    return {name: leaf for name, leaf in batch.items() if leaf is not None}


def x_of(value: float) -> dict[str, Any]:
    return batch_of(x=np.full((BATCH, 2), value, np.float32))


def deleted() -> jax.Array:
    array = jnp.ones((BATCH, 2))
    array.delete()
    return array


def read_only() -> np.ndarray:
    array = np.ones((BATCH, 2), np.float32)
    array.setflags(write=False)
    return array


def loss_fn(model, batch):
    return optax.squared_error(model(batch["x"]), batch["y"])[:, 0]


def new_trainer(strategy, loss=loss_fn) -> mirror.Trainer:
    with strategy.scope():
        return mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.01), loss)


def weights_of(trainer) -> dict[str, np.ndarray]:
    arrays, _ = inside.checkpoint_state(trainer)
    return {name: np.asarray(value) for name, value in arrays.items()}


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


# Batches

SAME = {  # the same numbers in other forms: they train to the same weights
    "float64": lambda: batch_of(x=np.ones((BATCH, 2))),
    "integers": lambda: batch_of(x=np.ones((BATCH, 2), np.int32)),
    "booleans": lambda: batch_of(x=np.ones((BATCH, 2), bool)),
    "float16": lambda: batch_of(x=np.ones((BATCH, 2), np.float16)),
    "array of JAX": lambda: batch_of(x=jnp.ones((BATCH, 2))),
    "read-only": lambda: batch_of(x=read_only()),
    "not contiguous": lambda: batch_of(x=np.ones((2, BATCH), np.float32).T),
    "strided": lambda: batch_of(x=np.ones((2 * BATCH, 4), np.float32)[::2, ::-2]),
    "big-endian": lambda: batch_of(x=np.ones((BATCH, 2), ">f4")),
    "matrix": lambda: batch_of(x=np.asmatrix(np.ones((BATCH, 2), np.float32))),
    "masked array without masked values": lambda: batch_of(
        x=np.ma.masked_array(np.ones((BATCH, 2), np.float32))
    ),
}
NOT_FINITE = {
    "NaN": lambda: x_of(np.nan),
    "one NaN": lambda: batch_of(x=np.array([[np.nan, 1]] + [[1, 1]] * 3, np.float32)),
    "NaN label": lambda: batch_of(y=np.full((BATCH, 1), np.nan, np.float32)),
    "infinity": lambda: x_of(np.inf),
    "overflow": lambda: x_of(3e38),
}
FINITE = {
    "denormal": lambda: x_of(1e-45),
    "one example": lambda: batch_of(1),
    "fewer examples": lambda: batch_of(2),
    "odd number of examples": lambda: batch_of(3),
    "more examples": lambda: batch_of(8),
}
REJECTED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "missing key": (lambda: batch_of(y=None), ValueError, "batch['y'] is missing"),
    "added key": (lambda: batch_of(z=np.ones(BATCH)), ValueError, "batch['z'] is new"),
    "renamed key": (lambda: batch_of(y=None, z=np.ones(BATCH)), ValueError, "batch['z'] is new"),
    "tuple": (lambda: tuple(batch_of().values()), ValueError, "batch[0] is new"),
    "None": (lambda: None, ValueError, "batch is None"),
    "text": (lambda: "batch", TypeError, "batch is 'batch'"),
    "text leaf": (lambda: batch_of(y=np.array(list("abcd"))), TypeError, "batch['y']"),
    "objects": (lambda: batch_of(y=np.array([object()] * BATCH)), TypeError, "batch['y']"),
    "dates": (lambda: batch_of(y=np.zeros((BATCH, 1), "datetime64[s]")), TypeError, "batch['y']"),
    "records": (lambda: batch_of(y=np.zeros(BATCH, [("a", "f4")])), TypeError, "batch['y']"),
    "scalar": (lambda: batch_of(y=np.float32(1)), ValueError, "batch['y'] is the scalar"),
    "unequal lengths": (lambda: batch_of(y=np.ones((3, 1))), ValueError, "batch['y']"),
    "list of lists": (lambda: batch_of(x=[[1.0, 1.0]] * BATCH), ValueError, "batch['x']"),
    "deleted": (lambda: batch_of(x=deleted()), ValueError, "batch['x'] has been deleted"),
    "masked": (
        lambda: batch_of(x=np.ma.masked_equal(np.eye(BATCH, 2, dtype=np.float32), 0)),
        TypeError,
        "batch['x'] is a masked array with 6",
    ),
    "wider": (lambda: batch_of(x=np.ones((BATCH, 3), np.float32)), TypeError, "(3,)"),
    "complex": (lambda: batch_of(x=np.ones((BATCH, 2), np.complex64)), TypeError, "complex64"),
}


def data_with(make: Callable[[], Any]) -> list[Any]:
    return [batch_of(), make(), batch_of()]


# A batch that is read ahead, and three in the thread of `fit`.
FORMS = [
    *((case, 2) for case in SAME),
    *((case, 0) for case in ("float64", "array of JAX", "strided")),
]


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("rows", mostly_slow(FORMS, ("array of JAX", 2), ("strided", 0)))
def test_batch_in_another_form_trains_to_the_same_weights(subtests, two, rows):
    for case, prefetch in rows:
        with subtests.test(msg=f"{case} {prefetch}"):
            plain, other = new_trainer(two), new_trainer(two)
            plain.fit(data_with(batch_of), epochs=1, progress=False)
            data = data_with(SAME[case])
            other.fit(
                two.distribute_dataset(data, remainder="pad", prefetch=prefetch),
                epochs=1,
                progress=False,
            )
            assert_equal(weights_of(plain), weights_of(other))


def test_batch_with_odd_values_keeps_the_copies_equal(subtests, two):
    """A value that is not finite is reported, and spreads as on one device."""
    for case in FINITE | NOT_FINITE:
        with subtests.test(msg=case):
            trainer = new_trainer(two)
            if case in FINITE:
                trainer.fit(data_with(FINITE[case]), epochs=1, progress=False)
                assert all(np.isfinite(value).all() for value in weights_of(trainer).values())
            else:
                with pytest.warns(UserWarning, match="at step 2.*NaNGuard"):
                    history = trainer.fit(data_with(NOT_FINITE[case]), epochs=1, progress=False)
                assert not np.isfinite(history["loss"][-1])
            assert trainer._position.step == STEPS
            two.check_mirrored(trainer.model)


UNUSABLE = [
    *((case, 2) for case in REJECTED),
    *((case, 0) for case in ("None", "objects", "deleted", "wider")),
]


@pytest.mark.parametrize(
    "rows", mostly_slow(UNUSABLE, ("missing key", 2), ("deleted", 0), ("wider", 2))
)
def test_batch_that_cannot_be_used_is_rejected_between_steps(subtests, two, rows):
    """The weights are those after the first step, and training can be resumed."""
    for case, prefetch in rows:
        with subtests.test(msg=f"{case} {prefetch}"):
            make, kind, text = REJECTED[case]
            wanted, trainer = new_trainer(two), new_trainer(two)
            wanted.fit([batch_of()], epochs=1, progress=False)
            data = two.distribute_dataset(data_with(make), remainder="pad", prefetch=prefetch)
            with pytest.raises(kind) as caught:
                trainer.fit(data, epochs=1, progress=False)
            assert text in str(caught.value)
            assert trainer._position.step == 1
            assert_equal(weights_of(wanted), weights_of(trainer))
            two.check_mirrored(trainer.model)
            trainer.fit(data_with(batch_of), epochs=1, progress=False)
            assert trainer._position.step == STEPS


# Calls inside other calls

DATA = [batch_of()] * STEPS
CALLS: dict[str, Callable[[Any, Any], object]] = {
    "evaluate": lambda trainer, _: trainer.evaluate(DATA),
    "save": lambda trainer, directory: trainer.save(directory),
    "restore": lambda trainer, directory: trainer.restore(directory),
    "fit": lambda trainer, _: trainer.fit(DATA, epochs=9, progress=False),
    "another fit": lambda trainer, _: new_trainer(mirror.OneDeviceStrategy("/cpu:1")).fit(
        DATA, epochs=1, progress=False
    ),
    "run": lambda trainer, _: trainer.strategy.run(lambda x: x * 2, (jnp.ones(2),)),
    "check_mirrored": lambda trainer, _: trainer.strategy.check_mirrored(trainer.model),
}
REFUSED = {  # the others work
    "callback": {"restore", "fit"},
    "source": {"evaluate", "save", "restore", "fit"},  # it is read in a thread
    "loss": {"evaluate", "restore", "fit", "another fit", "run", "check_mirrored"},
}


PAIRS = [(call, place) for call in CALLS for place in REFUSED]
QUICK = [("evaluate", "callback"), ("restore", "callback"), ("fit", "source"), ("run", "loss")]


@pytest.mark.parametrize("rows", mostly_slow(PAIRS, *QUICK))
def test_call_inside_fit_works_or_is_refused(subtests, two, tmp_path_factory, rows):
    """In either case `fit` trains to the same weights."""
    for call, place in rows:
        with subtests.test(msg=f"{call} {place}"):
            tmp_path = tmp_path_factory.mktemp("row")
            check_call_inside_fit_works_or_is_refused(two, tmp_path, call, place)


def check_call_inside_fit_works_or_is_refused(two, tmp_path, call, place):
    plain = new_trainer(two)
    plain.save(tmp_path)
    plain.fit(DATA, epochs=2, progress=False)
    results: list[object] = []

    def call_once(where: str) -> None:
        if where == place and not results:
            results.append(None)
            try:
                CALLS[call](trainer, tmp_path)
            except RuntimeError as error:
                results.append(error)

    class Calls(mirror.callbacks.Callback):
        def on_step(self, fit):
            call_once("callback")

    class Source:
        def __iter__(self):
            call_once("source")
            yield from DATA

    def loss(model, batch):
        call_once("loss")
        return loss_fn(model, batch)

    trainer = new_trainer(two, loss)
    trainer.fit(Source(), epochs=2, callbacks=Calls(), progress=False)
    assert len(results) == 1 + (call in REFUSED[place]), results
    assert_equal(weights_of(plain), weights_of(trainer))


def test_fit_works_in_an_event_loop_and_in_its_threads(two):
    plain, trainer = new_trainer(two), new_trainer(two)
    plain.fit(DATA, epochs=2, progress=False)

    async def train() -> None:
        trainer.fit(DATA, epochs=1, progress=False)
        await asyncio.to_thread(trainer.fit, DATA, epochs=1, progress=False)

    asyncio.run(train())
    assert_equal(weights_of(plain), weights_of(trainer))
