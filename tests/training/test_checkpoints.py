"""Checkpoint files: round trips, crash safety and errors."""

import contextlib
import json
import math
import os
import pathlib
import random
import resource
import shutil
import tempfile
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from jax.sharding import NamedSharding, PartitionSpec

from mirror import load_checkpoint as load
from tests.support import inside
from tests.support.checkpoints import (
    in_a_process,
    is_interrupted,
    killed,
    path_of,
    same,
    steps_in,
)
from tests.support.kills import kill_me_at
from tests.support.messages import assert_message, raises
from tests.support.tables import mostly_slow, rows

CheckpointStore, KeyData = inside.checkpoint_store(), inside.key_data()
checkpoint_files = inside.checkpoint_files()
ARRAYS = {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.zeros(3, np.float32)}
LOWEST = ("loss", "min")


def put(directory, *steps, arrays=ARRAYS, metrics=None, **options):
    """Saves checkpoints for these steps; returns their closed store."""
    with CheckpointStore(directory, **options) as store:
        for step in steps:
            store.save(step, arrays, {"step": step}, metrics and metrics(step))
    return store


def files(directory) -> list[pathlib.Path]:
    return sorted(p for p in pathlib.Path(directory).rglob("*") if p.is_file())


# Round trips

SMALL = """
float8_e8m0fnu float8_e4m3 float8_e4m3fnuz float8_e5m2fnuz float8_e4m3b11fnuz float8_e3m4
float6_e2m3fn float4_e2m1fn int4 uint4 int2 uint2
"""
DTYPES = f"""
bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64
complex128 float8_e4m3fn float8_e5m2 {SMALL}
"""
SHAPES = [(), (1,), (3, 2), (0,), (2, 0, 3)]


def test_store_round_trips_every_dtype_and_shape(tmp_path):
    arrays = {
        f"{dtype}/{shape}": np.arange(math.prod(shape)).reshape(shape).astype(np.dtype(dtype))
        for dtype in DTYPES.split()
        for shape in SHAPES
    }
    put(tmp_path, 3, arrays=arrays)
    found = load(tmp_path).arrays
    assert list(found) == list(arrays)
    assert [name for name in arrays if not same(arrays[name], found[name])] == []


VALUES = {
    "nan with a payload": np.array([0x7FC01234, 0x80000000], np.uint32).view(np.float32),
    "other byte order": np.arange(3, dtype=">f4"),
    "other order of axes": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(10)[::3],
    "number": 3,
    "real": 2.5,
    "truth": True,
    "scalar of NumPy": np.float32(1.5),
    "scalar of ml_dtypes": ml_dtypes.bfloat16(1.5),
}


def test_store_round_trips_every_kind_of_value(tmp_path):
    values = {**VALUES, "JAX": jnp.arange(4, dtype=jnp.bfloat16)}
    put(tmp_path, 0, arrays=values)
    for name, found in load(tmp_path).arrays.items():
        value = np.asarray(values[name])
        assert same(value.astype(value.dtype.newbyteorder("=")), found), name


@pytest.mark.parametrize("rows", mostly_slow(["threefry2x32", "rbg", "unsafe_rbg"], "rbg"))
def test_store_round_trips_keys(subtests, tmp_path_factory, rows):
    for impl in rows:
        with subtests.test(msg=impl):
            tmp_path = tmp_path_factory.mktemp("row")
            keys = {"one": jax.random.key(3, impl=impl)}
            keys["many"] = jax.random.split(keys["one"], (2, 3))
            keys["none"] = keys["many"][:0]
            put(tmp_path, 0, arrays=keys)
            found = load(tmp_path).arrays
            for name, key in keys.items():
                again = jax.random.wrap_key_data(found[name].data, impl=found[name].impl)
                assert again.dtype == key.dtype
                assert same(jax.random.key_data(again), jax.random.key_data(key))
            put(tmp_path, 1, arrays=found)  # as they were loaded
            assert all(same(found[name], value) for name, value in load(tmp_path).arrays.items())


NAMES = ["model/conv/kernel", "model.layers[0]['w']", "a", "a/0", "a.b", ".", ".."]
NAMES += ["", "a/", "/", "a/../b", " ", "ü 日本", "%2F", "?#", "\\", "'\"", "\n", "x" * 300]


def test_store_round_trips_every_name(tmp_path):
    arrays = {name: np.full(2, place) for place, name in enumerate(NAMES)}
    put(tmp_path, 0, arrays=arrays)
    found = load(tmp_path).arrays
    assert list(found) == NAMES
    assert all(same(arrays[name], found[name]) for name in NAMES)


@rows("memory", {"one at a time": 0, "all at once": None})
def test_values_are_the_ones_at_the_time_of_the_call(tmp_path, monkeypatch, memory):
    """An asynchronous save that cannot copy all arrays is complete when it returns."""
    inside.give_host_memory(memory, monkeypatch)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sliced = jax.device_put(np.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))
    saved = {"x": np.ones(3), "key": jax.random.key(7), "sliced": sliced}
    with CheckpointStore(tmp_path, asynchronous=True) as store:
        store.save(1, saved, {})
        if memory == 0:
            assert store.latest() == 1
        saved["x"][:] = 0
        sliced.delete()
    found = load(tmp_path).arrays
    np.testing.assert_array_equal(found["x"], 1)
    np.testing.assert_array_equal(found["sliced"], np.arange(8.0))
    np.testing.assert_array_equal(found["key"].data, [0, 7])


def test_store_round_trips_position_and_metrics(tmp_path):
    position = {"epoch": 2, "rng": (1, 2), "loss": math.inf, "text": "ü\n", "none": None, 7: {}}
    with CheckpointStore(tmp_path) as store:
        store.save(np.int64(4), {}, position, {"loss": np.float64(0.5), "nan": math.nan})
    found = load(tmp_path)
    assert found.position == json.loads(json.dumps(position))
    assert found.metrics["loss"] == 0.5
    assert math.isnan(found.metrics["nan"])
    assert (found.step, found.arrays) == (4, {})


# The format: other libraries read it


def stored(array) -> np.ndarray:
    """Returns the array as a file has it: bytes, if its dtype is not one of the format's."""
    array = np.asarray(array)
    others = ["complex64", "complex128", *SMALL.split()]
    if array.dtype.name not in others:
        return array
    size = (array.dtype.itemsize,) if array.dtype.itemsize > 1 else ()
    return np.frombuffer(array.tobytes(), np.uint8).reshape(*array.shape, *size)


def test_safetensors_reads_the_file(tmp_path):
    """Its NumPy reader lacks float8."""
    names = [name for name in DTYPES.split() if name not in ("float8_e4m3fn", "float8_e5m2")]
    arrays = {name: np.arange(6).reshape(3, 2).astype(np.dtype(name)) for name in names}
    arrays |= {"number": 3.5, "none": np.zeros((0, 2)), "odd": np.ones(3, bool)}
    put(tmp_path, 5, arrays=arrays)
    with safetensors.safe_open(path_of(tmp_path, 5), "np") as file:
        assert set(file.keys()) == set(arrays)
        assert all(same(stored(value), file.get_tensor(name)) for name, value in arrays.items())
        about = json.loads(file.metadata()["mirror"])
        assert (about["format"], about["position"]) == (1, {"step": 5})
        for name in ("float32", "bfloat16"):
            assert same(arrays[name][1:, :1], file.get_slice(name)[1:, :1])


@pytest.mark.dev("torch")
def test_pytorch_reads_the_file(tmp_path):
    import torch
    from safetensors.torch import load_file

    names = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float32", "int64", "bool"]
    arrays = {name: np.arange(3).astype(np.dtype(name)) for name in names}
    put(tmp_path, 5, arrays=arrays)
    tensors = load_file(path_of(tmp_path, 5))
    for name, tensor in tensors.items():
        assert tensor.dtype is getattr(torch, name)
        assert tensor.view(torch.uint8).numpy().tobytes() == arrays[name].tobytes()
    assert tensors.keys() == arrays.keys()


def test_arrays_are_aligned(tmp_path):
    """Which readers that map the file need."""
    arrays = {name: np.ones(3, name) for name in DTYPES.split()}
    put(tmp_path, 5, arrays=arrays)
    content = path_of(tmp_path, 5).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for name, array in arrays.items():
        begin, end = header[name]["data_offsets"]
        assert (start + begin) % min(array.dtype.itemsize, 8) == 0
        assert content[start + begin : start + end] == array.tobytes()


# Replicas

NOISE = np.random.default_rng(0).integers(0, 2**32, 50_000, np.uint32)


def test_store_does_not_record_replicas(tmp_path):
    sizes = []
    for count in (1, 2, 8):
        mesh = jax.make_mesh((count,), ("axis of mine",), devices=jax.devices("cpu")[:count])
        directory = tmp_path / str(count)
        put(directory, 0, arrays={"w": jax.device_put(NOISE, NamedSharding(mesh, PartitionSpec()))})
        sizes.append(sum(path.stat().st_size for path in files(directory)))
        assert same(load(directory).arrays["w"], NOISE)
        assert not any(b"axis of mine" in path.read_bytes() for path in files(directory))
    assert max(sizes) - min(sizes) < 64
    assert sizes[0] < 1.02 * NOISE.nbytes


def test_store_saves_sharded_arrays_whole(tmp_path):
    mesh = jax.make_mesh((8,), ("replica",), devices=jax.devices("cpu"))
    split = jax.device_put(NOISE, NamedSharding(mesh, PartitionSpec("replica")))
    put(tmp_path, 0, arrays={"w": split})
    assert same(load(tmp_path).arrays["w"], NOISE)


def test_save_copies_the_arrays(tmp_path):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    on_host, on_device = np.zeros(100_000), jnp.zeros(100_000)
    with CheckpointStore(tmp_path) as store:
        for number in range(4):
            store.save(number, {"host": on_host, "device": on_device}, {})
            on_host += 1
            on_device = step(on_device)
    for number in range(4):
        found = load(tmp_path, number).arrays
        assert (found["host"] == number).all()
        assert (found["device"] == number).all()


# The directory

PATHS = {
    "relative": lambda top: "some/where",
    "home": lambda top: "~/runs",
    "path": lambda top: top / "runs",
    "odd": lambda top: top / "a b%41#?ü' *] {y}",
    "trailing": lambda top: f"{top}/runs/",
    "dots": lambda top: f"{top}/runs/../other",
    "pattern": lambda top: top / "runs[1]",
    "backslash": lambda top: top / "a\\b",
    "not UTF-8": lambda top: top / os.fsdecode(b"\xff"),
}


def test_store_accepts_path_types(subtests, tmp_path_factory):
    for case, path in PATHS.items():
        with subtests.test(msg=case), pytest.MonkeyPatch.context() as monkeypatch:
            tmp_path = tmp_path_factory.mktemp("row")
            monkeypatch.chdir(tmp_path)
            monkeypatch.setenv("HOME", str(tmp_path / "home"))
            directory = path(tmp_path)
            with CheckpointStore(directory) as store:
                store.save(1, ARRAYS, {})
                with contextlib.chdir("/"):
                    store.save(2, ARRAYS, {})
                    store.wait()
            assert load(directory).step == 2
            assert tmp_path in store.directory.parents
            assert store.steps() == (1, 2)


def steps_of(store) -> tuple:
    assert store.steps() == tuple(steps_in(store.directory))
    return store.steps()


def loss(step) -> dict[str, float]:
    return {"loss": {0: 3.0, 2: 1.0, 4: math.nan, 6: 1.0}.get(step, 2.0)}


KEPT = {  # of the steps 0 to 9
    "all": ({}, tuple(range(10))),
    "one": ({"keep_last": 1}, (9,)),
    "three": ({"keep_last": 3}, (7, 8, 9)),
    "best": ({"keep_last": 1, "keep_best": LOWEST}, (6, 9)),
    "most": ({"keep_last": 2, "keep_best": ("loss", "max")}, (0, 8, 9)),
    "all and best": ({"keep_best": LOWEST}, tuple(range(10))),
}


@pytest.mark.parametrize("rows", mostly_slow(KEPT, "best"))
def test_store_keeps_the_last_and_the_best(subtests, tmp_path_factory, rows):
    for case in rows:
        with subtests.test(msg=case):
            options, kept = KEPT[case]
            tmp_path = tmp_path_factory.mktemp("row")
            store = put(tmp_path, *range(10), metrics=loss, **options)
            assert steps_of(store) == kept
            assert store.latest() == load(tmp_path).step == 9
            if "keep_best" in options:
                best = 0 if options["keep_best"][1] == "max" else 6
                assert store.best() == load(tmp_path, "best").step == best


def test_store_keeps_the_best_when_saves_have_no_metrics(tmp_path):
    with CheckpointStore(tmp_path, keep_last=1, keep_best=LOWEST) as store:
        assert store.best() is None is store.latest()
        store.save(1, ARRAYS, {}, {"loss": 1.0})
        for step in (2, 3, 4):
            store.save(step, ARRAYS, {})
    assert steps_of(store) == (1, 4)


def test_last_is_the_most_recently_written(tmp_path):
    """A second training counts its steps from 0 again."""
    store = put(tmp_path, 7, 8, 9, keep_last=2)
    put(tmp_path, 3, keep_last=2)
    assert steps_of(store) == (3, 9)
    assert store.latest() == load(tmp_path).step == 3


def test_store_continues_beside_a_damaged_checkpoint(tmp_path):
    store = put(tmp_path, 1, 2, metrics=loss, keep_last=1, keep_best=LOWEST)
    path_of(tmp_path, 2).write_text("{")
    put(tmp_path, 5, metrics=loss, keep_last=1, keep_best=LOWEST)
    assert steps_of(store) == (5,)


def test_save_replaces_the_same_step(subtests, tmp_path_factory):
    for asynchronous in [True, False]:
        with subtests.test(msg=str(asynchronous)):
            tmp_path = tmp_path_factory.mktemp("row")
            with CheckpointStore(tmp_path, asynchronous=asynchronous) as store:
                for number in range(3):
                    store.save(4, {"w": np.full(3, number)}, {"number": number})
            found = load(tmp_path)
            assert (found.arrays["w"] == 2).all()
            assert found.position == {"number": 2}
            assert steps_of(store) == (4,)


def test_saving_the_same_arrays_keeps_their_metrics(tmp_path):
    put(tmp_path, 1, 2, metrics=loss, keep_best=LOWEST)
    put(tmp_path, 2)  # as trainer.save does
    assert load(tmp_path, "best").metrics == loss(2)
    put(tmp_path, 2, arrays={"w": np.zeros(1)})
    assert load(tmp_path, 2).metrics == {}
    assert load(tmp_path, "best").step == 1


def test_best_is_by_the_metric_that_was_named_last(tmp_path):
    """Also if the training that named it has restarted, and made fewer steps."""
    put(tmp_path, 4, 8, metrics=lambda step: {"loss": 1 / step}, keep_best=LOWEST)
    put(tmp_path, 1, 2, metrics=lambda step: {"error": step}, keep_best=("error", "min"))
    assert load(tmp_path, "best").step == 1


# What an interrupted save leaves


def test_store_removes_what_an_interrupted_save_left(subtests, tmp_path_factory):
    """The earlier checkpoint of the step stays, and so do files that only look like it."""
    for size in (0, 100, -1, None):
        with subtests.test(msg=str(size)):
            tmp_path = tmp_path_factory.mktemp("row")
            put(tmp_path, 1, 2)
            content = path_of(tmp_path, 2).read_bytes()
            mine = ["notes.txt", "step-x.safetensors.unfinished", "step-01.safetensors", "step-3"]
            for name in mine:
                (tmp_path / name).write_text("mine")
            for step in (2, 3):
                (tmp_path / f"{path_of('', step)}.unfinished").write_bytes(content[:size])
            for _ in range(2):  # before and after the removal
                assert load(tmp_path).step == 2
                with CheckpointStore(tmp_path) as store:
                    assert store.steps() == (1, 2)
            left = {path.name for path in tmp_path.iterdir()}
            assert left == {*mine, "step-1.safetensors", "step-2.safetensors"}


# Errors


def test_store_requires_the_path_of_a_directory(subtests):
    for directory in ["ftp://bucket/runs", "", b"/tmp/runs", "a\0b"]:
        with subtests.test(msg=repr(directory)):
            with raises(ValueError, names="directory", values=repr(directory)):
                CheckpointStore(directory)
            with raises(ValueError, names="directory", values=repr(directory)):
                load(directory)


BAD_SAVES = {  # step, arrays, position, metrics; error; names and values of its message
    "text": ((1, {"model/name": "cnn"}, {}), TypeError, "model/name", "'cnn' (str)"),
    "objects": ((1, {"w": np.array([None])}, {}), TypeError, "w", "object[1]"),
    "dates": ((1, {"w": np.zeros(1, "M8[s]")}, {}), TypeError, "w", "datetime64[s][1]"),
    "long": ((1, {"w": np.zeros(1, np.longdouble)}, {}), TypeError, "w", "float128[1]"),
    "record": ((1, {"w": np.zeros(1, "i4,f4")}, {}), TypeError, "w", ["'f1'", "[1]"]),
    "name": ((1, {3: np.zeros(1)}, {}), ValueError, "name", "3 (int)"),
    "reserved": ((1, {"__metadata__": np.zeros(1)}, {}), ValueError, "name", "'__metadata__'"),
    "position": ((1, {}, {"a": {1, 2}}), TypeError, "position", ["JSON", "set"]),
}


def test_save_rejects_bad_values(subtests, tmp_path_factory):
    for case, (call, error, name, values) in BAD_SAVES.items():
        with subtests.test(msg=case):
            tmp_path = tmp_path_factory.mktemp("row")
            with CheckpointStore(tmp_path, keep_best=LOWEST) as store:
                with raises(error, names=name, values=values):
                    store.save(*call)
                store.save(2, ARRAYS, {})
            assert steps_of(store) == (2,)


def test_closed_store_rejects_saves(tmp_path):
    store = put(tmp_path, 1)
    with raises(RuntimeError, fix=["save(2)", "close()", "CheckpointStore"]):
        store.save(2, ARRAYS, {})


def empty(top):
    (top / "runs").mkdir()


def foreign(top):
    (path_of(top / "runs", 10) / "thesis").mkdir(parents=True)


def unfinished(top):
    (top / "runs").mkdir()
    (top / "runs" / f"{path_of('', 3)}.unfinished").touch()


BAD_PLACES: dict[str, tuple] = {  # constructor, error, and what the message names beside the path
    "nothing": (lambda top: None, FileNotFoundError, []),
    "file": (lambda top: (top / "runs").touch(), NotADirectoryError, []),
    "empty": (empty, FileNotFoundError, []),
    "foreign": (foreign, FileNotFoundError, ["step-10.safetensors"]),
    "unfinished": (unfinished, FileNotFoundError, ["step-3.safetensors.unfinished"]),
}


def test_load_rejects_bad_directories(subtests, tmp_path_factory):
    for case, (make, error, values) in BAD_PLACES.items():
        with subtests.test(msg=case):
            tmp_path = tmp_path_factory.mktemp("row")
            make(tmp_path)
            with raises(error, values=[tmp_path / "runs", *values]):
                load(tmp_path / "runs")


def test_load_rejects_a_file_and_names_its_directory_and_step(tmp_path):
    put(tmp_path, 7)
    path = path_of(tmp_path, 7)
    with raises(NotADirectoryError, values=path, fix=[repr(str(tmp_path)), "step=7"]):
        load(path)


LAST_OR_BEST = {"names": "step", "fix": ['"last"', '"best"']}
BAD_STEPS = {
    "absent": (3, FileNotFoundError, {"values": [3, "1, 2"]}),
    "word": ("latest", TypeError, {"values": "'latest' (str)", **LAST_OR_BEST}),
    "truth": (True, TypeError, {"values": "True (bool)", **LAST_OR_BEST}),
    "best": ("best", ValueError, {"values": "1, 2", "fix": "Checkpoint(monitor=...)"}),
}


def test_load_rejects_unknown_steps(subtests, tmp_path_factory):
    for case, (step, error, wanted) in BAD_STEPS.items():
        with subtests.test(msg=case):
            tmp_path = tmp_path_factory.mktemp("row")
            put(tmp_path, 1, 2)
            with raises(error, **wanted):
                load(tmp_path, step)


def test_load_rejects_unknown_metrics(tmp_path):
    put(tmp_path, 1, keep_best=LOWEST)
    put(tmp_path, 2, keep_best=LOWEST, metrics=lambda step: {"loss": math.nan})
    with raises(ValueError, names="'loss'", values=[tmp_path, 1, 2], fix="NaN"):
        load(tmp_path, "best")


def test_load_error_lists_some_of_many_steps(tmp_path):
    put(tmp_path, 0)
    for step in range(1, 20):
        shutil.copy(path_of(tmp_path, 0), path_of(tmp_path, step))
    listed = ", ".join(map(str, range(8, 20)))
    with raises(FileNotFoundError, values=[20, listed]) as caught:
        load(tmp_path, 20)
    before, _, after = str(caught.value).partition(listed)
    assert_message(before + after, values=8)  # how many others there are
    assert "7" not in (before + after).replace(str(tmp_path), "")


def test_store_does_not_overwrite_other_files(tmp_path):
    foreign(tmp_path)
    with CheckpointStore(tmp_path / "runs") as store:
        with raises(FileExistsError, values=path_of(tmp_path / "runs", 10)):
            store.save(10, ARRAYS, {})
        store.save(9, ARRAYS, {})
    assert store.steps() == (9,)
    assert (path_of(tmp_path / "runs", 10) / "thesis").is_dir()


def test_load_rejects_other_formats(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "FORMAT", 2)
    put(tmp_path, 1)
    monkeypatch.undo()
    with raises(ValueError, values=[tmp_path, 1, 2], fix="format"):
        load(tmp_path)


# Damage: every byte matters, or does not


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    arrays = {"noise": NOISE[:200], "zeros": np.zeros(50), "key": jax.random.key(0)}
    put(directory, 1, 2, arrays=arrays, metrics=loss, keep_best=LOWEST)
    return directory


def is_noticed(directory, whole) -> bool:
    """Returns whether damage is an error; if not, checks the loaded arrays."""
    try:
        found = load(directory, 2)
    except ValueError as error:
        assert_message(error, values=[path_of(directory, 2), 1])  # and another step
        return True
    right = load(whole, 2)
    assert found.position == right.position
    assert all(same(value, found.arrays[name]) for name, value in right.arrays.items())
    return False


def flip(data: bytes, draw) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


DAMAGES = {
    "half": lambda data, draw: data[: len(data) // 2],
    "last byte": lambda data, draw: data[:-1],
    "empty": lambda data, draw: b"",
    "zeros": lambda data, draw: bytes(len(data)),
    **{f"bit {seed}": flip for seed in range(6)},
}


def test_load_detects_harmful_damage(subtests, whole, tmp_path):
    """In each part of the file; damage of the header may concern other readers only."""
    directory = tmp_path / "runs"
    shutil.copytree(whole, directory)
    path = path_of(directory, 2)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    parts = {"size": (0, 8), "header": (8, start), "data": (start, len(content))}
    for part, (begin, end) in parts.items():
        for damage, change in DAMAGES.items():
            with subtests.test(msg=f"{part}, {damage}"):
                changed = change(content[begin:end], random.Random(damage))
                path.write_bytes(content[:begin] + changed + content[end:])
                assert is_noticed(directory, whole) or (part == "header" and "bit" in damage)
    path.write_bytes(content)
    assert load(directory).step == 2


@pytest.mark.slow
def test_load_detects_each_flipped_byte(whole, tmp_path):
    directory = tmp_path / "runs"
    shutil.copytree(whole, directory)
    path = path_of(directory, 2)
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        assert is_noticed(directory, whole), place


def test_incomplete_array_is_named(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "runs")
    path = path_of(tmp_path / "runs", 2)
    os.truncate(path, path.stat().st_size - 1)
    with raises(ValueError, names="key", values=[path, 1], fix="cut off"):
        load(tmp_path / "runs")


def test_load_does_not_guess_the_best(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "runs")
    path_of(tmp_path / "runs", 1).write_text("{}")
    with raises(ValueError, values=[path_of(tmp_path / "runs", 1), 2]):
        load(tmp_path / "runs", "best")


def test_load_does_not_mix_checkpoints(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "runs")
    arrays = {"noise": NOISE[200:400], "zeros": np.zeros(50), "key": jax.random.key(0)}
    put(tmp_path / "other", 2, arrays=arrays)
    headers = []
    for directory in (tmp_path / "runs", tmp_path / "other"):
        content = path_of(directory, 2).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        headers.append(content[:start])
    path_of(tmp_path / "runs", 2).write_bytes(headers[0] + content[start:])
    with raises(ValueError, names="noise", values=[tmp_path / "runs", 2, 1], fix="checksum"):
        load(tmp_path / "runs", 2)


# Writing in the background


def break_writes(monkeypatch) -> None:
    def fail(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(checkpoint_files, "write", fail)


LATER = {
    "save": lambda store: store.save(3, ARRAYS, {}),
    "wait": lambda store: store.wait(),
    "close": lambda store: store.close(),
    "exit": lambda store: store.__exit__(None, None, None),
}


def test_asynchronous_error_is_raised_once_later(subtests, tmp_path_factory):
    for case, later in LATER.items():
        with subtests.test(msg=case), pytest.MonkeyPatch.context() as monkeypatch:
            tmp_path = tmp_path_factory.mktemp("row")
            store = CheckpointStore(tmp_path)
            store.save(1, ARRAYS, {})
            store.wait()
            with monkeypatch.context() as patch:
                break_writes(patch)
                store.save(2, ARRAYS, {})
                with raises(OSError, values=[2, tmp_path, "no room", 1]):
                    later(store)
            store.wait()
            assert store.steps() == (1,)
            if later is LATER["save"]:
                later(store)
                store.close()
                assert store.steps() == (1, 3)


def test_synchronous_error_is_raised_immediately(tmp_path, monkeypatch):
    break_writes(monkeypatch)
    with (
        CheckpointStore(tmp_path, asynchronous=False) as store,
        raises(OSError, values=[2, tmp_path, "no room"]),
    ):
        store.save(2, ARRAYS, {})


def test_first_error_is_raised(tmp_path, monkeypatch):
    break_writes(monkeypatch)
    store = CheckpointStore(tmp_path)
    store.save(2, ARRAYS, {})
    with pytest.raises(KeyError, match="mine") as caught, store:
        raise KeyError("mine")
    assert_message(caught.value.__notes__[0], values=[2, tmp_path, "no room"])


def test_save_does_not_wait_for_the_files(tmp_path, monkeypatch):
    write, may_write = checkpoint_files.write, threading.Event()

    def waits(*arguments):
        assert may_write.wait(900), "`save` waits for the files"
        write(*arguments)

    monkeypatch.setattr(checkpoint_files, "write", waits)
    with CheckpointStore(tmp_path) as store:
        store.save(1, ARRAYS, {})
        assert store.steps() == ()  # complete ones only
        may_write.set()
    assert store.steps() == (1,)


# Child processes: they start quickly, because importing this module does not start JAX


def load_without_devices(directory) -> None:
    jax.config.update("jax_platforms", "of mine")  # a backend that starts would fail
    found = load(directory, "best")
    assert found.step == 2
    assert isinstance(found.arrays["key"], KeyData)
    jax.config.update("jax_num_cpu_devices", 5)  # raises once a backend has started


def test_load_does_not_start_the_backend(whole):
    in_a_process(load_without_devices, whole)


def fill_the_disk(directory) -> None:
    jax.config.update("jax_platforms", "cpu")
    some, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {f"w/{number}": NOISE + number for number in range(20)}
    with CheckpointStore(directory, keep_last=1) as store:
        store.save(1, {"w": NOISE}, {})
        store.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, most))
        for step in (1, 2):
            store.save(step, big, {})
            with raises(OSError, values=[step, directory, 1]):
                store.wait()
        assert sorted(os.listdir(directory)) == [".mirror.lock", "step-1.safetensors"]
        assert same(load(directory).arrays["w"], NOISE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (some, most))
        store.save(2, big, {})
    assert same(load(directory, 2).arrays["w/7"], big["w/7"])


def test_save_reports_a_full_disk(tmp_path):
    in_a_process(fill_the_disk, tmp_path)


def write_where_it_is_forbidden(directory) -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)  # root can write anywhere
    for place in (directory, directory / "runs", directory / "file", directory / "file" / "runs"):
        with raises(OSError, values=place):
            CheckpointStore(place)


def test_save_reports_an_unwritable_directory():
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        (directory / "file").touch()
        directory.chmod(0o555)
        in_a_process(write_where_it_is_forbidden, directory)


# kill -9


def of_step(step: int) -> dict:
    """Returns arrays that encode their step."""
    arrays = {f"w/{number}": np.full((20, number + 1), step) for number in range(8)}
    return {**arrays, "none": np.zeros((0, 3)), "key": KeyData("rbg", np.full(4, step, np.uint32))}


def save_until_killed(directory, number, said) -> None:
    jax.config.update("jax_platforms", "cpu")
    with CheckpointStore(directory, keep_last=2, keep_best=LOWEST) as store:
        for turn in range(2 * (max(store.steps(), default=-1) + 1), 10**9):
            step = turn // 2  # each twice: the second replaces the first
            store.save(step, of_step(step), {"step": step}, {"loss": step % 5})
            store.wait()
            said.send(step)
            if number is not None:
                kill_me_at(directory, number)
                number = None


def all_of_one_step(found) -> bool:
    expected = of_step(found.step)
    return (
        found.position == {"step": found.step}
        and found.metrics == {"loss": found.step % 5}
        and all(same(value, found.arrays[name]) for name, value in expected.items())
    )


@pytest.mark.nightly
def test_killed_process_leaves_complete_checkpoints(tmp_path):
    draw, interrupted = random.Random(0), 0
    for _ in range(20):
        told = killed(save_until_killed, tmp_path, draw.randrange(60))
        interrupted += is_interrupted(tmp_path)
        found = load(tmp_path)
        assert found.step >= told
        assert all_of_one_step(found)
        with CheckpointStore(tmp_path, keep_last=2, keep_best=LOWEST) as store:
            assert store.best() == load(tmp_path, "best").step
        assert all(all_of_one_step(load(tmp_path, step)) for step in steps_of(store))
        assert len(store.steps()) <= 4
    assert interrupted >= 5  # otherwise the kill comes when nothing happens
    assert found.step >= 19
