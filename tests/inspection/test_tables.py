"""Tables as text and HTML, and the table of `visualize_placement` for every kind of leaf."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mirror
from tests.support import inside
from tests.support.tables import rows

CPU = [f"/device:CPU:{k}" for k in range(8)]
BOTH = ", ".join(CPU[:2])
visualize = mirror.debugging.visualize_placement

Table = inside.table()


def array(k=0):
    return jax.device_put(jnp.ones((2, 3)), jax.devices("cpu")[k])


def deleted(make):
    value = make()
    value.delete()
    return value


@functools.cache
def strategy():
    return mirror.MirroredStrategy(CPU[:2])


def mirrored(make=lambda: jnp.ones((2, 3))):
    with strategy().scope():
        return make()


def per_replica(value):
    return mirror.PerReplica([value, value])


def sharded():
    mesh = Mesh(np.asarray(jax.devices("cpu")[:4]).reshape(2, 2), ("a", "b"))
    return jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, PartitionSpec("a")))


# The row of the only leaf, and what its devices store.
LEAVES = {
    "array": (array, ("float32[2,3]", "24 bytes", CPU[0]), {CPU[0]: 24}),
    "array elsewhere": (lambda: array(5), ("float32[2,3]", "24 bytes", CPU[5]), {CPU[5]: 24}),
    "empty array": (lambda: jnp.zeros((0, 3)), ("float32[0,3]", "0 bytes", CPU[0]), {CPU[0]: 0}),
    "large": (lambda: jnp.zeros((512, 1024)), ("float32[512,1024]", "2.0 MiB", CPU[0]), None),
    "mirrored": (mirrored, ("float32[2,3]", "2 x 24 bytes", BOTH), dict.fromkeys(CPU[:2], 24)),
    "sharded": (
        sharded,
        ("float32[4,4]", "128 bytes", ", ".join(CPU[:4])),
        dict.fromkeys(CPU[:4], 32),
    ),
    "PerReplica": (
        lambda: strategy().run(
            lambda x: x * mirror.get_replica_context().replica_id_in_sync_group, (mirrored(),)
        ),
        ("2 x float32[2,3]", "48 bytes", BOTH),
        dict.fromkeys(CPU[:2], 24),
    ),
    "PerReplica of the host": (
        lambda: per_replica(np.ones(3)),
        ("2 x float64[3]", "48 bytes", "host"),
        {"host": 48},
    ),
    "key": (lambda: jax.random.key(0), ("key<fry>[]", "8 bytes", CPU[0]), {CPU[0]: 8}),
    "mirrored key": (
        lambda: mirrored(lambda: jax.random.key(0)),
        ("key<fry>[]", "2 x 8 bytes", BOTH),
        dict.fromkeys(CPU[:2], 8),
    ),
    "NumPy": (lambda: np.ones(3), ("float64[3]", "24 bytes", "host"), {"host": 24}),
    "NumPy scalar": (lambda: np.float32(1), ("float32[]", "4 bytes", "host"), {"host": 4}),
    "number": (lambda: 1.5, ("1.5 (float)", "0 bytes", "host"), {"host": 0}),
    "text": (lambda: "<b>", ("'<b>' (str)", "0 bytes", "host"), {"host": 0}),
    "shape": (
        lambda: jax.ShapeDtypeStruct((2,), "float32"),
        ("float32[2]", "0 bytes", "host"),
        {"host": 0},
    ),
    "deleted": (lambda: deleted(array), ("float32[2,3]", "0 bytes", "deleted"), {}),
    "deleted key": (
        lambda: deleted(lambda: jax.random.key(1)),
        ("key<fry>[]", "0 bytes", "deleted"),
        {},
    ),
    "variable": (lambda: nnx.Param(array(3)), ("float32[2,3]", "24 bytes", CPU[3]), {CPU[3]: 24}),
    "variable of a number": (
        lambda: nnx.Variable(3),
        ("3 (int)", "0 bytes", "host"),
        {"host": 0},
    ),
}


@rows("name", list(LEAVES))
def test_table_shows_every_kind_of_leaf(name):
    make, row, held = LEAVES[name]
    table = visualize({"x": make()})
    assert table.headings == ("leaf", "shape", "bytes", "devices")
    assert table.rows[0] == ("['x']", *row)
    assert len(table.rows) == 2
    last = table.rows[-1]
    assert last[:2] == ("total", "")
    if held is not None:
        assert last[2] == f"{sum(held.values())} bytes"
        assert last[3] == ", ".join(f"{device} {count} bytes" for device, count in held.items())
    assert visualize(make()).rows[0] == ("value", *row)


@rows("tree", [None, {}, [], (None, {"a": ()}), nnx.Variable(None)])
def test_table_of_an_empty_tree_has_a_zero_total(tree):
    assert visualize(tree).rows == [("total", "", "0 bytes", "")]


class Mixed(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        self.layers = nnx.List([nnx.Param(array(1))])
        self.held = nnx.Variable({"a": array(2), "b": None})
        self.count = nnx.Variable(3)
        self.host = nnx.data(np.ones(2))
        self.rngs = nnx.Rngs(0)
        self.name = "static"


def paths(tree):
    return [row[0] for row in visualize(tree).rows[:-1]]


def test_table_lists_variables_of_objects():
    leaves = [
        "count",
        "held['a']",
        "host",
        "layers.0",
        "linear.bias",
        "linear.kernel",
        "rngs.default.count",
        "rngs.default.key",
    ]
    assert sorted(paths(Mixed())) == leaves
    assert sorted(paths({"m": [Mixed()]})) == [f"['m'][0].{leaf}" for leaf in leaves]


def test_table_lists_optimizer_state():
    model = mirrored(lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    moments = [f"opt_state.0.{m}.{p}" for m in ("mu", "nu") for p in ("bias", "kernel")]
    assert paths(optimizer) == ["opt_state.0.count", *moments, "step"]
    assert paths(optax.sgd(0.1, momentum=0.9).init({"w": array()})) == ["[0].trace['w']"]
    assert {row[3] for row in visualize(model).rows[:-1]} == {BOTH}


def test_table_counts_shared_arrays_once():
    tied = array()
    rows = visualize({"a": tied, "b": nnx.Param(tied), "c": array()}).rows
    assert [row[2] for row in rows] == ["24 bytes"] * 3 + ["48 bytes"]


TRANSFORMS = {
    "jit": lambda fn: jax.jit(fn)(jnp.ones(2)),
    "grad": lambda fn: jax.grad(lambda x: fn(x).sum())(jnp.ones(2)),
    "vmap": lambda fn: jax.vmap(fn)(jnp.ones((3, 2))),
    "run": lambda fn: strategy().run(fn, (jnp.ones(2),)),
}


@rows("name", list(TRANSFORMS))
def test_table_marks_tracers(name):
    tables = []

    def fn(x):
        tables.append(visualize({"x": x, "model": nnx.Param(x)}))
        return x

    TRANSFORMS[name](fn)
    assert [row[1:] for row in tables[0].rows[:-1]] == [("float32[2]", "0 bytes", "traced")] * 2


def test_table_of_a_traced_key_adds_no_operation():
    def fn(key):
        assert visualize(key).rows[0] == ("value", "key<fry>[]", "0 bytes", "traced")
        return key

    assert not jax.make_jaxpr(fn)(jax.random.key(0)).eqns


def test_table_prints_aligned_text():
    table = Table(("a", "bbb"), [("long", "x"), ("", "yy")])
    assert repr(table) == str(table) == "a     bbb\nlong  x\n      yy"
    assert repr(Table(("a", "b"), [])) == "a  b"


def test_table_renders_escaped_html():
    table = visualize({"<script>": "&"})
    html = table._repr_html_()
    assert "<script>" not in html
    assert ">[&#x27;&lt;script&gt;&#x27;]</td>" in html
    assert ">&#x27;&amp;&#x27; (str)</td>" in html
    style = "text-align: left; white-space: nowrap"
    assert html.startswith(f'<table><thead><tr><th style="{style}">leaf</th>')
    assert html.count("<tr>") == 3
    assert html.endswith("</tbody></table>")
    assert Table(("<",), [])._repr_html_().count("&lt;") == 1


NUMBERS = {
    "integers": (["1", "20"], "right"),
    "floats": (["1.5", "-2e-05", "nan", "inf"], "right"),
    "units": (["1.5 ms", "20%", "3 s", "2.0 MiB", "1 byte", "12 bytes"], "right"),
    "missing": (["1", "unknown", "...", ""], "right"),
    "names": (["/device:CPU:0", "/device:CPU:1"], "left"),
    "some": (["1", "none"], "left"),
    "ranges": (["1 to 2"], "left"),
    "copies": (["2 x 24 bytes"], "left"),
    "empty": (["", ""], "left"),
}


@rows("name", list(NUMBERS))
def test_html_aligns_numbers_to_the_right(name):
    cells, side = NUMBERS[name]
    html = Table(("heading",), [(cell,) for cell in cells])._repr_html_()
    assert html.count(f"text-align: {side}") == len(cells) + 1 == html.count("text-align")


WIDE = Table(
    ("devices", "ms/step", "quartiles", "shape", "what it does"),
    [
        ("1", "12.34", "12.10 to 12.60", "float32[2,3]", "waits for the next batch of 0.125 s"),
        ("20", "3.45", "", "float32[]", "computes"),
    ],
)


@rows("columns", [200, 100, 80, 70, 60, 50, 40, 30])
def test_table_fits_any_width_without_breaking_a_word(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = repr(WIDE)
    assert max(map(len, text.splitlines())) <= columns
    words = {word for row in [WIDE.headings, *WIDE.rows] for cell in row for word in cell.split()}
    assert {word.rstrip(":") for word in text.split()} == words
    if columns == 200:
        monkeypatch.delenv("COLUMNS")
        assert text == repr(WIDE)


def test_narrow_table_wraps_cells_or_prints_blocks(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    assert repr(Table(("a", "b"), [("1", "some words")])) == "a  b\n1  some\n   words"
    monkeypatch.setenv("COLUMNS", "9")
    assert repr(Table(("aa", ""), [("1", "somewords"), ("2", "")])) == "aa: 1\nsomewords\n\naa: 2"


def test_table_does_not_change_its_values():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    before = [id(v.get_raw_value()) for v in jax.tree.leaves(nnx.state(model), is_leaf=is_variable)]
    visualize(model)
    after = [id(v.get_raw_value()) for v in jax.tree.leaves(nnx.state(model), is_leaf=is_variable)]
    assert before == after
    with jax.transfer_guard("disallow"):
        visualize({"model": model, "host": np.ones(2)})


def is_variable(value):
    return isinstance(value, nnx.Variable)
