"""The placement log: its lines, and that it changes no result and costs nothing when off."""

import copy
import functools
import io
import logging
import operator
import pickle
import queue
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.errors import TraceContextError
from jax.sharding import Mesh, PartitionSpec

import mirror
from tests.support import fresh, inside
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

log_module = inside.launch_log()
eager_trace, is_log_installed = log_module.eager_trace, log_module.is_log_installed

LOGGER = logging.getLogger("mirror")
JOB = "/job:localhost/replica:0/task:0"
PAIR = "(/device:CPU:0, /device:CPU:1)"
EXECUTING = "Executing op {} in device {}"  # as TensorFlow logs it
switch = mirror.debugging.set_log_device_placement


def current_trace():
    return log_module._current_trace()


class Lines(logging.Handler):
    """The messages of the logger, in order."""

    def __init__(self):
        super().__init__()
        self._said: list[str] = []

    def emit(self, record):
        self._said.append(record.getMessage())

    def of(self, fn, *args):
        """Returns the lines that are logged while `fn` runs."""
        self._said.clear()
        fn(*args)
        return list(self._said)

    def ops(self, fn, *args):
        """The names of the ops; all ran on the first device."""
        begins, ends = EXECUTING.format("|", f"{JOB}/device:CPU:0").split("|")
        lines = self.of(fn, *args)
        assert all(x.startswith(begins) and x.endswith(ends) for x in lines), lines
        return [x.removeprefix(begins).removesuffix(ends) for x in lines]


def assert_lines(lines, expected):
    """Checks the names, values and nouns of each line, and that there is no other line."""
    for line, wanted in zip(lines, expected, strict=True):
        assert_message(line, **wanted)


def is_said(lines, *parts):
    """Whether one of the lines has all of the parts."""
    return any(all(part in line for part in parts) for line in lines)


@pytest.fixture
def lines():
    """The lines of the log; checks that the log leaves nothing behind."""
    level, handlers = LOGGER.level, list(LOGGER.handlers)
    handler = Lines()
    LOGGER.addHandler(handler)
    yield handler
    switch(False)
    LOGGER.removeHandler(handler)
    assert current_trace() is eager_trace()
    assert (LOGGER.level, LOGGER.handlers) == (level, handlers)


def on_device(k, fn, *args):
    with mirror.device(f"/cpu:{k}"):
        return fn(*args)


@jax.custom_jvp
def own_jvp(x):
    return jnp.sin(x)


own_jvp.defjvp(lambda x, t: (jnp.sin(x[0]), t[0] * jnp.cos(x[0])))


@jax.custom_vjp
def own_vjp(x):
    return jnp.sin(x)


own_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def total(fn):
    return lambda x: fn(x).sum()


MESH = Mesh(np.asarray(jax.devices("cpu")[:2]), ("i",))
X = np.linspace(0.1, 1.5, 4, dtype=np.float32)


def linear():
    return nnx.Linear(4, 3, rngs=nnx.Rngs(0))


def nnx_jit(x):
    model = linear()
    return nnx.jit(lambda model, x: model(x))(model, x[None])


def nnx_training(x):
    model = nnx.Sequential(
        linear(), nnx.BatchNorm(3, rngs=nnx.Rngs(1)), nnx.Linear(3, 1, rngs=nnx.Rngs(2))
    )
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for _ in range(2):
        loss, grads = nnx.value_and_grad(lambda m: (m(x[None] * jnp.ones((4, 1))) ** 2).mean())(
            model
        )
        optimizer.update(model, grads)
    return loss, nnx.state(model), nnx.state(optimizer)


def linen_training(x):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(3)(x))
            return linen.Dropout(0.5, deterministic=False)(x)

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    state = Net().init(keys, jnp.ones((2, 4)))

    def loss(params):
        out, changed = Net().apply(
            {**state, "params": params}, x * jnp.ones((2, 1)), rngs=keys, mutable=["batch_stats"]
        )
        return out.sum(), changed

    return jax.value_and_grad(loss, has_aux=True)(state["params"])


def optax_update(x):
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))
    params = {"w": x, "b": x[:1]}
    updates, state = optimizer.update(params, optimizer.init(params), params)
    return optax.apply_updates(params, updates), state


def with_constants(x):
    with jax.ensure_compile_time_eval():
        known = jnp.arange(4.0) + 1
    return jax.jit(lambda x: x * known)(x)


def without_jit(x):
    with jax.disable_jit():
        return jax.jit(jnp.sin)(x), jax.lax.scan(lambda c, x: (c + x, c), 0.0, x), jax.nn.relu(x)


def printed(x):
    stream = io.StringIO()
    jax.debug.callback(lambda x: stream.write(str(x)), x)
    jax.effects_barrier()
    return np.frombuffer(stream.getvalue().encode(), np.uint8)


SNIPPETS = {
    "arithmetic": lambda x: (x + x) * 2 - x / 3 @ jnp.ones((4, 2)).sum(1),
    "numpy": lambda x: jnp.concatenate([jnp.sort(-x), jnp.where(x > 1, x, jnp.mean(x))]),
    "matmul": lambda x: jnp.outer(x, x) @ x,
    "indexing": lambda x: (x[1], x[:2], x[x > 1], x[jnp.array([2, 0])]),
    "at": lambda x: x.at[1].set(5.0).at[0].add(x[2]),
    "iteration": lambda x: [float(v) for v in x],
    "jit": jax.jit(lambda x: jnp.tanh(x).sum()),
    "donation": lambda x: jax.jit(jnp.negative, donate_argnums=0)(x * 1),
    "grad": jax.value_and_grad(total(lambda x: jnp.sin(x) ** 3)),
    "grad of grad of jit": jax.grad(total(jax.grad(total(jax.jit(jnp.tanh))))),
    "jvp": lambda x: jax.jvp(jnp.sin, (x,), (x,)),
    "vjp": lambda x: jax.vjp(jnp.sin, x)[1](x),
    "hessian": jax.hessian(total(lambda x: x**3)),
    "vmap": jax.vmap(lambda a: a * jnp.arange(3) + 2),
    "vmap of grad": jax.vmap(jax.grad(lambda a: jnp.sin(a) * a)),
    "relu": lambda x: (jax.nn.relu(x - 1), jax.grad(total(jax.nn.relu))(x)),
    "gelu": jax.grad(total(jax.nn.gelu)),
    "custom_jvp": lambda x: (own_jvp(x), jax.grad(total(own_jvp))(x)),
    "custom_vjp": lambda x: (own_vjp(x), jax.grad(total(own_vjp))(x)),
    "checkpoint": jax.grad(total(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))))),
    "random": lambda x: (
        jax.random.normal(jax.random.key(3), (4,)),
        jax.random.split(jax.random.key(0)),
    ),
    "scan": lambda x: jax.lax.scan(lambda c, x: (c + x, c * x), 0.0, x),
    "cond": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "while": lambda x: jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x * 2, x),
    "solve": lambda x: jnp.linalg.solve(jnp.eye(4) * 2, x),
    "shard_map": jax.shard_map(
        lambda x: jax.lax.psum(x, "i"),
        mesh=MESH,
        in_specs=PartitionSpec("i"),
        out_specs=PartitionSpec(),
    ),
    "pmap": lambda x: jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(x.reshape(2, 2)),
    "device_put": lambda x: jax.device_put(x, jax.devices("cpu")[3]) + 1,
    "callback": lambda x: jax.pure_callback(lambda x: np.asarray(x) * 2, x, x),
    "debug": printed,
    "copies": lambda x: [pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x)],
    "ensure_compile_time_eval": with_constants,
    "disable_jit": without_jit,
    "ahead of time": lambda x: jax.jit(jnp.cos).lower(x).compile()(x * 1),
    "eval_shape": lambda x: jnp.zeros(jax.eval_shape(jnp.outer, x, x).shape),
    "nnx.Linear": lambda x: linear()(x[None]),
    "nnx.jit": nnx_jit,
    "nnx.grad": lambda x: nnx.grad(lambda m: m(x[None]).sum())(linear()),
    "nnx training": nnx_training,
    "nnx copies": lambda x: nnx.state(nnx.clone(nnx.merge(*nnx.split(copy.deepcopy(linear()))))),
    "linen training": linen_training,
    "optax": optax_update,
    "mirror.device": lambda x: on_device(5, lambda: x + jnp.ones(4)),
    "mirror.add_n": lambda x: mirror.add_n([x, jax.device_put(x, jax.devices("cpu")[2])]),
}


def bits(tree):
    """Returns the type, bytes and device of each leaf."""

    def of(leaf):
        if isinstance(leaf, jax.Array):
            keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            value = jax.random.key_data(leaf) if keys else leaf
            return (
                str(leaf.dtype),
                leaf.shape,
                leaf.sharding,
                leaf.committed,
                np.asarray(value).tobytes(),
            )
        return type(leaf), np.asarray(leaf).tobytes()

    leaves, treedef = jax.tree.flatten(tree)
    return [of(leaf) for leaf in leaves], treedef


SLOW_SNIPPETS = {
    *("arithmetic", "disable_jit", "gelu", "grad of grad of jit", "grad", "hessian", "indexing"),
    *("linen training", "nnx copies", "nnx training", "nnx.Linear", "nnx.grad", "nnx.jit", "optax"),
    *("random", "relu", "shard_map", "solve"),
}


@pytest.mark.parametrize(
    "names",
    [SNIPPETS.keys() - SLOW_SNIPPETS, pytest.param(SLOW_SNIPPETS, marks=pytest.mark.slow)],
    ids=["quick", "slow"],
)
def test_log_does_not_change_results(lines, names, subtests):
    assert names <= SNIPPETS.keys()
    x = jnp.asarray(X)
    for name in sorted(names):
        with subtests.test(msg=name):
            evaluate = functools.partial(SNIPPETS[name], x)
            before = bits(evaluate())
            compare = functools.partial(lambda f, b: assert_same(b, bits(f())), evaluate, before)
            switch(True)
            assert lines.of(compare)
            switch(False)
            assert not lines.of(compare)


def assert_same(before, after):
    assert before == after


OPS = {
    "add": (lambda x: x + x, ["add"]),
    "matmul": (lambda x: x @ x, ["matmul"]),
    "jit": (jax.jit(lambda x: x * 2 + 1), ["<lambda>"]),
    "jit with a name": (jax.jit(jnp.cumsum), ["cumsum"]),
    "relu": (jax.nn.relu, ["relu"]),
    "custom_jvp": (own_jvp, ["sin"]),
    "custom_vjp": (own_vjp, ["sin"]),
    "grad": (jax.grad(total(jnp.sin)), ["sin", "reduce_sum"]),
    "grad of custom_vjp": (jax.grad(total(own_vjp)), ["sin", "cos"]),
    "vmap": (jax.vmap(lambda x: x * x), ["multiply"]),
    "scan": (lambda x: jax.lax.scan(lambda c, x: (c, c), 0.0, x), ["scan"]),
    "index": (lambda x: x[1], ["squeeze"]),
    "at": (lambda x: x.at[0].set(2.0), ["scatter"]),
    "device_put": (lambda x: jax.device_put(np.ones(3)), ["device_put"]),
    "random": (lambda x: jax.random.normal(jax.random.key(0)), ["random_seed", "normal"]),
    "module": (lambda x: linear(), ["random_seed", "random_fold_in"]),
    "tree": (lambda x: jax.tree.map(jnp.negative, {"a": x, "b": x}), ["negative", "negative"]),
    "optax": (lambda x: optax.sgd(0.1).update(x, optax.sgd(0.1).init(x)), ["multiply"]),
    "no output": (lambda x: jax.debug.callback(lambda x: None, x), ["debug_callback"]),
}


@rows("name", list(OPS))
def test_log_names_every_eager_op_with_its_device(lines, name):
    """TensorFlow logs the placement of ops; JAX has no placer, so the log shows where they ran.

    This includes functions compiled before: the log disables JAX's quick path.
    """
    fn, wanted = OPS[name]
    x = jnp.asarray(X)
    fn(x), fn(x)
    switch(True)
    for _ in range(2):
        found = lines.ops(fn, x)
        rest = iter(found)
        assert all(op in rest for op in wanted), found
    switch(False)
    assert lines.of(fn, x) == []


@pytest.mark.slow
def test_log_works_before_the_start_and_without_configured_logging():
    """As in TensorFlow 2.21: before the start and after it."""
    said = fresh.run_program("log_before_start")
    first, said = said.split("== towers\n")
    towers, said = said.split("== configured\n")
    configured, off = said.split("== off\n")
    line = EXECUTING.format("matmul", f"{JOB}/device:CPU:")
    assert first.count(f"{line}0\n") == 1
    assert first.endswith("[[22. 28.]\n [49. 64.]]\n")
    assert [towers.count(f"{line}{k}\n") for k in range(2)] == [1, 1]
    assert EXECUTING.format("add", f"{JOB}/device:CPU:0\n") in towers
    assert towers.endswith("[[ 44.  56.]\n [ 98. 128.]]\n")
    assert configured == f"root: {line}0\n"
    assert off == ""


def test_log_lines_are_printed_once(monkeypatch, lines):
    """Nothing is printed on the standard error if a handler, here the test's, gets the lines."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    x = jnp.ones(3)
    switch(True)
    x + 1
    assert stream.getvalue() == ""
    with alone():
        x + 1
        stderr = EXECUTING.format("add", f"{JOB}/device:CPU:0\n")
        assert stream.getvalue() == stderr
        other = io.StringIO()  # each cell of a notebook has another one
        monkeypatch.setattr(sys, "stderr", other)
        x + 1
    assert other.getvalue() == stderr


class alone:
    """The logger without any handlers but the log's own."""

    def __enter__(self):
        self._handlers = [h for h in LOGGER.handlers if isinstance(h, Lines)]
        self._propagate, LOGGER.propagate = LOGGER.propagate, False
        for handler in self._handlers:
            LOGGER.removeHandler(handler)

    def __exit__(self, *error):
        LOGGER.propagate = self._propagate
        for handler in self._handlers:
            LOGGER.addHandler(handler)


def test_closed_standard_error_does_not_stop_ops(monkeypatch, lines):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    switch(True)
    with alone():
        assert float(jnp.float32(1) + 1) == 2


@rows("level", [logging.NOTSET, logging.DEBUG, logging.ERROR])
def test_log_restores_the_users_level(lines, level):
    before = LOGGER.level
    LOGGER.setLevel(level)
    try:
        switch(True)
        assert lines.ops(lambda: jnp.float32(1) + 1)[-1] == "add"
        switch(False)
        assert LOGGER.level == level
    finally:
        LOGGER.setLevel(before)


def test_switching_on_twice_logs_once(lines):
    x = jnp.ones(3)
    switch(True)
    switch(True)
    assert lines.ops(lambda: x + 1) == ["add"]
    switch(False)
    switch(False)
    assert lines.of(lambda: x + 1) == []


def python_calls(fn, *args):
    """Returns the number of Python functions called; JAX's quick path calls none."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        fn(*args)
    finally:
        sys.setprofile(before)
    return count


def test_log_costs_nothing_when_off(lines):
    """Also for functions compiled while it was on: the quick path is JAX's own.

    A function called while it was on may cost one comparison of keys.
    """
    x = jnp.ones(3)
    before, during = jax.jit(lambda x: x * 2), jax.jit(lambda x: x * 3)
    before(x), before(x)
    quick = python_calls(before, x)
    switch(True)
    assert python_calls(before, x) > quick
    during(x), during(x)
    switch(False)
    after = jax.jit(lambda x: x * 4)
    for fn, calls in ((before, quick + 1), (during, quick + 1), (after, quick)):
        fn(x), fn(x)
        assert python_calls(fn, x) <= calls
    switch(True)
    assert lines.ops(lambda: (before(x), during(x), after(x))) == ["<lambda>"] * 3


def test_log_does_not_recompile(lines):
    compiled = []

    @jax.jit
    def fn(x):
        compiled.append("traced")
        return x * 2

    x = jnp.ones(3)
    for on in (False, True, False, True):
        switch(on)
        fn(x)
    assert compiled == ["traced"]


def test_log_allows_variable_updates(lines):
    """Flax lets a variable be changed only under the trace it was made under."""
    before = linear()
    switch(True)
    during = linear()
    for model in (before, during):
        model.kernel[...] = model.kernel[...] * 2
        model.bias.set_value(jnp.ones(3))
    switch(False)
    after = linear()
    for model in (before, during, after):
        model.kernel[...] = model.kernel[...] * 2
    switch(True)
    for model in (before, during, after):
        model.kernel[...] = model.kernel[...] * 2
    with pytest.raises(TraceContextError):
        jax.jit(lambda x: during.bias.set_value(x))(jnp.ones(3))
    np.testing.assert_array_equal(before.kernel[...], 2 * after.kernel[...])
    np.testing.assert_array_equal(before.kernel[...], during.kernel[...])


def test_log_keeps_the_trace_guard_of_variables(lines):
    switch(True)
    made = []

    def fn(x):
        made.append(nnx.Param(x))
        return x

    jax.grad(fn)(1.0)
    with pytest.raises(TraceContextError):
        made[0].set_value(jnp.float32(1))


class Worker:
    """A thread that runs the functions passed to it."""

    def __init__(self):
        self._jobs, self._results = queue.Queue(), queue.Queue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self):
        while (job := self._jobs.get()) is not None:
            self._results.put(job())

    def does(self, job):
        self._jobs.put(job)
        return self._results.get(timeout=900)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._jobs.put(None)
        self._thread.join()


@rows("is_new", [True, False])
@rows("enter", [lambda: mirror.device("/cpu:0"), lambda: cpu_strategy(1).scope()])
def test_log_includes_other_threads_from_their_next_context(lines, enter, is_new):
    x = jnp.ones(3)

    def entering():
        with enter():
            pass

    if is_new:
        switch(True)
    with Worker() as worker:
        worker.does(lambda: x + 1)
        switch(True)
        assert lines.of(worker.does, lambda: x + 1) == []
        worker.does(entering)
        assert lines.ops(worker.does, lambda: x + 1) == ["add"]
        switch(False)
        assert lines.of(worker.does, lambda: x + 1) == []
        worker.does(entering)
        assert worker.does(current_trace) is eager_trace()


def test_log_can_be_switched_off_by_another_thread(lines, two):
    """The old thread then runs, enters a scope and loses the trace."""
    with Worker() as worker:
        worker.does(lambda: switch(True))
        assert lines.ops(worker.does, lambda: jnp.float32(1) + 1)[-1] == "add"
        switch(False)
        assert lines.of(worker.does, lambda: jnp.float32(1) + 1) == []
        for _ in range(2):
            result = worker.does(lambda: two.run(operator.neg, (jnp.ones(2),)))
            np.testing.assert_array_equal(result, [-1, -1])
        assert worker.does(lambda: (current_trace(), is_log_installed())) == (eager_trace(), False)


def test_threads_switch_the_log_concurrently(lines):
    x, errors = jnp.ones(3), []

    def work(seed):
        try:
            for on in np.random.default_rng(seed).integers(0, 2, 40):
                switch(bool(on))
                with mirror.device("/cpu:1"):
                    assert float((x + 1)[0]) == 2
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    switch(True)
    assert lines.ops(lambda: x + 1) == ["add"]
    switch(False)
    assert lines.of(lambda: x + 1) == []


def test_switching_inside_an_op_applies_from_the_next_context(lines):
    """JAX puts the trace back when the op ends; nothing is stuck."""
    x = jnp.ones(3)

    def op(on):
        @jax.custom_jvp
        def fn(x):
            switch(on)
            return x

        fn.defjvp(lambda x, t: (x[0], t[0]))
        return fn

    switch(True)
    op(False)(x)
    assert lines.of(lambda: x + 1) == []
    with mirror.device("/cpu:0"):
        assert current_trace() is eager_trace()
    op(True)(x)
    with mirror.device("/cpu:0"):
        assert lines.ops(lambda: x + 1) == ["add"]
    assert lines.ops(lambda: x + 1) == ["add"]


def test_failing_op_leaves_the_log_unchanged(lines):
    x = jnp.ones(3)
    switch(True)
    for fails in (lambda: x + jnp.ones(2), lambda: jax.jit(lambda x: 1 / 0)(x)):
        with pytest.raises((TypeError, ZeroDivisionError)):
            fails()
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jnp.log(-x)
    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        functools.reduce(operator.add, [jax.random.normal(k) for k in [jax.random.key(0)] * 2])
    with (
        jax.transfer_guard("disallow"),
        pytest.raises(jax.errors.JaxRuntimeError, match="transfer"),
    ):
        x + 1
    with jax.checking_leaks():
        assert lines.ops(lambda: jax.grad(total(jax.jit(jnp.sin)))(x))
    assert lines.ops(lambda: x + 1) == ["add"]


def test_interrupt_leaves_the_log_unchanged(lines):
    switch(True)

    @jax.custom_vjp
    def interrupted(x):
        raise KeyboardInterrupt

    interrupted.defvjp(lambda x: (interrupted(x), x), lambda x, g: (g,))
    for fn in (interrupted, jax.jit(interrupted), jax.grad(interrupted)):
        with pytest.raises(KeyboardInterrupt):
            fn(1.0)
    x = jnp.ones(3)
    assert lines.ops(lambda: x + 1) == ["add"]


@rows("transform", [jax.jit, jax.grad, lambda fn: lambda x: jax.vmap(fn)(x[None])])
@rows("on", [True, False])
def test_switching_inside_a_transformation_is_rejected(lines, transform, on):
    names = [f"set_log_device_placement({on})", "test_op_log.py"]
    with raises(RuntimeError, names=names, fix="jax.jit"):
        transform(lambda x: (switch(on), x)[1])(jnp.float32(1))
    switch(True)
    with raises(RuntimeError, names=names, fix="jax.jit"):
        transform(lambda x: (switch(on), x)[1])(jnp.float32(1))
    assert lines.ops(lambda: jnp.float32(1) + 1)[-1] == "add"


def test_switching_inside_a_step_is_rejected(lines, two):
    for on in (True, False):
        with raises(RuntimeError, names=f"set_log_device_placement({on})", fix="jax.jit"):
            two.run(switch, (on,))


@rows(
    "enabled, shown",
    [(1, "1 (int)"), (None, "None (NoneType)"), ("on", "'on' (str)"), (np.bool_(True), "bool[]")],
)
def test_switch_requires_a_bool(enabled, shown):
    with raises(TypeError, names="enabled", values=[shown, True, False]):
        switch(enabled)


def test_log_rejects_jax_set_mesh(lines):
    """A documented limit: JAX treats the log as tracing. Scopes do not need `set_mesh`."""
    switch(True)
    with pytest.raises(ValueError, match="set_mesh"):
        jax.set_mesh(MESH)
    switch(False)
    with jax.set_mesh(MESH):
        switch(True)
        assert lines.of(lambda: jnp.ones(2))[-1].endswith(f" {PAIR}")


def training_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: (m(batch) ** 2).mean())(model)
    grads, loss = mirror.all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss


def trained(strategy, on):
    switch(on)
    with strategy.scope():
        model = linear()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    data = strategy.distribute_dataset([np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)] * 3)
    losses = [strategy.run(training_step, (model, optimizer, batch)) for batch in data]
    strategy.check_mirrored(model)
    return losses, nnx.state((model, optimizer))


def test_log_does_not_change_training(lines):
    off, on = (bits(trained(cpu_strategy(2), on)) for on in (False, True))
    assert [leaf[-1] for leaf in off[0]] == [leaf[-1] for leaf in on[0]]


@pytest.mark.filterwarnings("ignore:.*training_step.*distribute_dataset")
def test_log_shows_what_a_step_mirrors_runs_and_reduces(lines, two):
    model = linear()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    batch = np.ones((4, 4), np.float32)
    switch(True)
    step = [
        {"names": "training_step", "values": PAIR},
        {"values": [PAIR, "3 arrays", "64 bytes"], "fix": "all-reduce"},
    ]
    said = lines.of(two.run, training_step, (model, optimizer, batch))
    mirrored = [
        {"names": "model.bias", "values": ["float32[3]", PAIR]},
        {"names": "model.kernel", "values": ["float32[4,3]", PAIR]},
        {"names": "optimizer.step", "values": ["uint32[]", PAIR]},
        {"names": "batch", "values": ["float32[4,4]", PAIR]},
    ]
    assert_lines(said, [*mirrored, *step])
    (shard,) = two.distribute_dataset([batch])
    assert_lines(lines.of(two.run, training_step, (model, optimizer, shard)), step)
    reduced, gathered = (
        [
            {"names": name, "values": PAIR},
            {"values": [PAIR, "1 array", "32 bytes"], "fix": f"all-{name}"},
        ]
        for name in ("reduce", "gather")
    )
    assert_lines(lines.of(two.reduce, "mean", shard), reduced)
    assert_lines(lines.of(two.gather, shard), gathered)
    checked = lines.of(two.check_mirrored, model)
    assert is_said(checked, "all-reduce", PAIR, "2 arrays", "32 bytes")
    verified = lines.of(two.verify, lambda x: x * 2, (batch,))
    assert_lines(
        list(dict.fromkeys(verified))[:2],
        [
            {"names": "x", "values": ["float32[4,4]", PAIR]},
            {"names": "<lambda>", "values": PAIR},
        ],
    )
    switch(False)
    assert lines.of(two.run, training_step, (model, optimizer, shard)) == []


def test_log_shows_collectives_of_batch_statistics(lines, two):
    with two.scope():
        norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    (batch,) = two.distribute_dataset([np.ones((4, 4), np.float32)])
    switch(True)
    step = mirror.per_replica_on_purpose(lambda norm, x: (norm(x), None)[1])
    said = lines.of(two.run, step, (norm, batch))
    assert is_said(said, "all-reduce", PAIR, "2 arrays")


def test_log_shows_what_a_sharded_update_sends(lines):
    """Not the all-reduce of the step, which it replaces."""
    strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"], shard="optimizer")
    with strategy.scope():
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    (batch,) = strategy.distribute_dataset([np.ones((4, 4), np.float32)])

    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: model(x).mean())(model)
        optimizer.update(model, mirror.all_reduce("mean", grads))

    switch(True)
    said = lines.of(strategy.run, step, (model, optimizer, batch))
    assert is_said(said, "reduce-scatter", PAIR, "2 arrays", "80 bytes")
    assert is_said(said, "all-gather", PAIR)
    assert not is_said(said, "all-reduce", PAIR)


def test_log_names_a_single_device_in_full(lines):
    strategy = mirror.OneDeviceStrategy("/cpu:3")
    switch(True)
    said = lines.of(strategy.run, lambda x: x * 2, (1.0,))
    assert_lines(
        said,
        [
            {"names": "x", "values": ["1.0 (float)", "(/device:CPU:3)"]},
            {"names": "<lambda>", "values": f"{JOB}/device:CPU:3"},
        ],
    )


def test_log_names_all_devices_in_a_scope(lines, two):
    with two.scope():
        switch(True)
        said = lines.of(lambda: jnp.zeros(3) + 1)
        assert_message(said[-1], names="add", values=PAIR)
    assert lines.of(lambda: jnp.zeros(3))[-1].endswith(f"{JOB}/device:CPU:0")
    scope = two.scope()
    scope.__enter__()
    switch(False)
    assert two.devices == tuple(sorted(jnp.zeros(3).devices(), key=lambda d: d.id))
    scope.__exit__(None, None, None)
    assert len(jnp.zeros(3).devices()) == 1


def test_log_names_the_device_of_each_op(lines):
    bound = jax.device_put(jnp.ones(2), jax.devices("cpu")[6])
    switch(True)
    there = f"{JOB}/device:CPU:6"
    assert_lines(lines.of(lambda: bound + 1), [{"names": "add", "values": there}])
    assert lines.of(on_device, 4, lambda: jnp.zeros(2))[-1].endswith(f"{JOB}/device:CPU:4")
    with mirror.device("/cpu:2"):
        grads = lines.of(lambda: jax.grad(lambda x: x * x)(2.0))
    assert {line.split()[-1] for line in grads} == {f"{JOB}/device:CPU:2"}
    shards = jax.shard_map(
        lambda x: x * 2, mesh=MESH, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i")
    )
    x = jnp.ones(2)
    assert_lines(lines.of(shards, x), [{"names": "shard_map", "values": PAIR}])


def test_visualize_placement_is_not_logged(lines):
    model = linear()
    key = jax.random.key(0)
    switch(True)
    assert lines.of(mirror.debugging.visualize_placement, {"model": model, "key": key}) == []
    assert lines.of(on_device, 1, lambda: None) == []
