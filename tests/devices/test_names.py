"""Device names, and the devices of a strategy."""

import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirror
from mirror._src.devices.names import SPELLINGS as LISTED
from mirror._src.devices.names import DeviceSpec
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import canonicalize_device
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

JOB = "/job:localhost/replica:0/task:0"
ALL = f"({', '.join(f'/device:CPU:{i}' for i in range(8))})"
SPELLINGS = [
    *("/cpu:1", "cpu:1", "CPU:1", "/Cpu:1", "/CPU:01", "/device:CPU:1", "/device:cpu:1"),
    *("device:cpu:1", f"{JOB}/device:CPU:1", f"{JOB}/cpu:1", "/job:localhost/cpu:1"),
    *("/replica:0/cpu:1", "/task:0/device:CPU:1", "/job:localhost/task:0/device:cpu:1"),
]
# What is open is None.
PARSED = [
    ("", None, None),
    (None, None, None),
    (JOB, None, None),
    ("/job:localhost", None, None),
    ("GPU", "GPU", None),
    ("/gpu", "GPU", None),
    ("/gpu:*", "GPU", None),
    ("/device:GPU:*", "GPU", None),
    (f"{JOB}/device:GPU", "GPU", None),
    ("tpu:12", "TPU", 12),
    ("/device:FOO:1", "FOO", 1),
    ("/device:foo", "FOO", None),
    ("cuda:1", "GPU", 1),
    ("/device:ROCM:0", "GPU", 0),
]
NO_NAMES = [
    *("foo", "cpu:", ":1", "cpu:-1", "cpu:1 ", " cpu:1", "/cpu:1/", "cpu:x", "//cpu:1", "cpu:1:2"),
    *("/", ":", "0", "1", "cpu1", "/cpu/1", "device:1", "/device:", "/device:CPU:x", "cpu:1.0"),
    *("cpu:1\n", "cpu:\u0661", "/job:localhostcpu:1", "/job:localhost/", "/task:x/cpu:1"),
    *("/task:0cpu:1", "/job:/cpu:1", "/cpu:1/job:localhost", "/physical_device:CPU:0"),
]
SEVERAL = ["/cpu:0/gpu:1", "cpu:0,cpu:1", "/device:CPU:0/device:CPU:1"]
ELSEWHERE = [
    *("/job:worker/cpu:0", "/job:worker", "/task:1/cpu:0", "/replica:1/cpu:0", "/job:x/task:0"),
    "/job:localhost/replica:0/task:12/device:GPU:0",
]


@rows("name", SPELLINGS)
def test_every_spelling_parses(name):
    assert canonicalize_device(name) is jax.devices("cpu")[1]
    assert str(DeviceSpec.parse(name)) == "/device:CPU:1"
    assert DeviceSpec.parse(name).full_name == f"{JOB}/device:CPU:1"
    assert DeviceSpec.parse(name) == DeviceSpec("CPU", 1)
    assert hash(DeviceSpec.parse(name)) == hash(DeviceSpec("CPU", 1))
    assert mirror.OneDeviceStrategy(name).devices == (jax.devices("cpu")[1],)


@rows("name, kind, index", PARSED)
def test_parts_of_a_name_may_be_omitted(name, kind, index):
    spec = DeviceSpec.parse(name)
    assert (spec.device_type, spec.index) == (kind, index)
    assert DeviceSpec.parse(str(spec)) == DeviceSpec.parse(spec.full_name) == spec


@rows("name", NO_NAMES)
def test_invalid_name_is_rejected_with_the_spellings(name):
    """One message covers all cases; TensorFlow has several, among them the message of `int`."""
    with raises(ValueError, values=repr(name), fix=LISTED):
        canonicalize_device(name)


@rows("name", SEVERAL)
def test_name_of_two_devices_is_rejected(name):
    with raises(ValueError, values=[repr(name), 2], fix=LISTED):
        canonicalize_device(name)


@rows("name", ELSEWHERE)
def test_other_processes_are_rejected(name):
    """TensorFlow supports clusters: these are names there. A `DeviceSpec` has no job or task."""
    with raises(ValueError, values=[repr(name), JOB], fix=LISTED):
        canonicalize_device(name)


def test_specs_cannot_be_changed():
    for attribute in ("device_type", "index", "job"):
        with pytest.raises(AttributeError):
            setattr(DeviceSpec("CPU", 0), attribute, "GPU")


def test_omitted_index_means_the_first_of_its_type():
    """A missing type is rejected: a default that depends on the context would surprise."""
    first = jax.devices("cpu")[0]
    for name in ("cpu", "/cpu:*", "/device:CPU", f"{JOB}/device:CPU:*"):
        assert canonicalize_device(name) is first
    for name in ("", JOB):
        with raises(ValueError, values="''", fix="'/cpu:0'"):
            canonicalize_device(name)


def test_names_are_canonical():
    for i, device in enumerate(mirror.config.list_logical_devices("CPU")):
        assert device == mirror.config.LogicalDevice(f"/device:CPU:{i}", "CPU")
        assert canonicalize_device(device) is jax.devices("cpu")[i]
        assert mirror.OneDeviceStrategy(device).devices == (jax.devices("cpu")[i],)


NO_DEVICES: dict[str, tuple] = {
    "number": (3, "3 (int)"),
    "none": (None, "None (NoneType)"),
    "list": (["/cpu:0"], "['/cpu:0'] (list)"),
    "spec": (DeviceSpec("CPU", 0), "DeviceSpec(device_type='CPU', index=0) (DeviceSpec)"),
    "physical": (
        mirror.config.list_physical_devices()[0],
        ["/physical_device:CPU:0", "PhysicalDevice", "physical"],
    ),
}


@rows("what", list(NO_DEVICES))
def test_invalid_device_is_rejected(what):
    device, found = NO_DEVICES[what]
    with raises(TypeError, values=found, fix="mirror.config.list_logical_devices()"):
        canonicalize_device(device)


@rows("devices", [3.0, mirror.config.list_physical_devices()[0], jax.devices])
def test_devices_must_be_a_list(devices):
    fix = ["['/gpu:0', '/gpu:1']", "None"]
    with raises(TypeError, names="devices", values=type(devices).__name__, fix=fix):
        mirror.MirroredStrategy(devices)


def test_single_device_is_not_a_list():
    (logical, *_), (device, *_) = mirror.config.list_logical_devices(), jax.devices("cpu")
    for one in (logical, device, "/cpu:0"):
        shown = str(one) if one is device else repr(one)
        fix = f"MirroredStrategy([{shown}])"
        with raises(ValueError, names="devices", values=shown, fix=fix):
            mirror.MirroredStrategy(one)


@pytest.mark.parametrize("devices", [["/cpu:1", jax.devices], ["cpu:0", None]])
def test_list_with_an_invalid_device_is_rejected(devices):
    fix = "mirror.config.list_logical_devices()"
    with raises(TypeError, values=type(devices[1]).__name__, fix=fix):
        mirror.MirroredStrategy(devices)


def test_device_may_be_listed_once_in_any_spelling():
    logical = mirror.config.list_logical_devices("CPU")[1]
    ways = ["/cpu:1", "CPU:1", logical, jax.devices("cpu")[1]]
    for one, other in itertools.combinations(ways, 2):
        with raises(ValueError, names="devices", values="(/device:CPU:1, /device:CPU:1)"):
            mirror.MirroredStrategy([one, other])


def test_device_objects_pass_through():
    device = jax.devices("cpu")[3]
    assert canonicalize_device(device) is device


HOST = "mirror.config.set_num_cpu_devices(9)"
UNKNOWN = {"/cpu:8": HOST, "/tpu:0": "mirror doctor", "/wormhole:0": "mirror doctor"}


@rows("name", list(UNKNOWN))
def test_unknown_device_error_lists_existing_devices(name):
    values, fix = [DeviceSpec.parse(name), ALL], UNKNOWN[name]
    with raises(mirror.InvalidDeviceError, values=values, fix=fix):
        mirror.OneDeviceStrategy(name)
    with raises(ValueError, names="devices", values=values, fix=fix):
        mirror.MirroredStrategy(["/cpu:0", name])


def test_replicas_follow_the_order_of_the_devices():
    strategy = mirror.MirroredStrategy(["/cpu:5", jax.devices("cpu")[2], "cpu:7"])
    assert [d.id for d in strategy.devices] == [5, 2, 7]
    (batch,) = strategy.distribute_dataset([np.arange(6)])
    assert [next(iter(v.devices())).id for v in batch.values] == [5, 2, 7]
    np.testing.assert_array_equal(batch, [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(strategy.gather(batch), np.arange(6))


def test_replica_order_is_kept_across_strategies():
    """Row r is replica r's value, on whatever device it was."""
    there = mirror.MirroredStrategy(["/cpu:1", "/cpu:0"])
    (batch,) = there.distribute_dataset([np.arange(4)])
    back = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    for _ in range(3):
        np.testing.assert_array_equal(back.gather(batch), np.arange(4))
        np.testing.assert_array_equal(there.gather(batch), np.arange(4))


def test_all_devices_are_used_by_default():
    assert mirror.MirroredStrategy().devices == tuple(jax.devices())
    assert mirror.MirroredStrategy(None).num_replicas_in_sync == 8


def test_devices_accept_any_iterable():
    assert mirror.MirroredStrategy(iter(["/cpu:0", "/cpu:1"])).num_replicas_in_sync == 2


def test_repr_of_a_strategy_shows_its_devices(caplog):
    with caplog.at_level(logging.INFO, "mirror"):
        strategy = cpu_strategy(2)
    pair = "(/device:CPU:0, /device:CPU:1)"
    assert_message(caplog.text, names="MirroredStrategy", values=pair)
    assert str(strategy) == "MirroredStrategy(/device:CPU:0, /device:CPU:1)"
    lines = repr(strategy).splitlines()
    assert lines[0] == "MirroredStrategy, 2 replicas in sync"
    assert lines[1].split() == ["replica", "logical", "device", "physical", "device", "memory"]
    assert lines[3].split() == ["1", "/device:CPU:1", "/physical_device:CPU:0", "host", "memory"]
    assert strategy._repr_html_().count("<tr>") == 3


def test_repr_of_a_large_strategy_is_bounded():
    strategy = cpu_strategy(8, replicas_per_device=8)
    first, *lines = repr(strategy).splitlines()
    assert first == "MirroredStrategy, 64 replicas in sync"
    numbers = [line.split()[0] for line in lines]
    assert numbers == ["replica", *map(str, range(8)), "...", *map(str, range(60, 64))]
    assert strategy._repr_html_().count("<tr>") == 14
    assert str(strategy) == (
        "MirroredStrategy(/device:CPU:0, /device:CPU:0, /device:CPU:0, ..., /device:CPU:7, 64 "
        "replicas)"
    )


def test_properties_are_read_only(two):
    for name in ("devices", "num_replicas_in_sync", "cross_device_ops"):
        with pytest.raises(AttributeError):
            setattr(two, name, None)


@pytest.mark.parametrize("make", [jnp.arange, np.arange], ids=["jax", "numpy"])
def test_mirrored_copy_does_not_share_its_source_buffer(make):
    devices = ReplicaDevices(tuple(jax.devices("cpu")[:2]))
    source = make(4)
    copy = devices.mirror(source)
    assert devices.is_mirrored(copy)
    jax.jit(lambda x: x + 1, donate_argnums=0)(copy).block_until_ready()
    np.testing.assert_array_equal(source, range(4))


def test_stacked_host_array_is_copied_before_the_transfer():
    devices = ReplicaDevices(tuple(jax.devices("cpu")[:2]))
    source = np.zeros((2, 1 << 16), np.float32)
    stacked = devices.stack(source)
    source[:] = 1
    assert not np.asarray(stacked).any()
