"""Devices: what they may be named by, and what a strategy says about those it has."""

import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirror
from mirror.devices import backend
from mirror.devices.canonical import canonicalize_device
from mirror.devices.replicas import ReplicaDevices
from mirror.devices.spec import DeviceSpec
from tests.conftest import cpu_strategy

JOB = "/job:localhost/replica:0/task:0"
SPELLINGS = ["/cpu:1", "cpu:1", "CPU:1", "/device:CPU:1", "device:cpu:1", f"{JOB}/device:CPU:1"]
NO_NAMES = ["", "cpu", "cpu:", ":1", "cpu:-1", "cpu:1 ", "/cpu:1/", "cpu:x", "//cpu:1", "cpu:1:2"]


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_names_the_device(name):
    assert canonicalize_device(name) is jax.devices("cpu")[1]
    assert str(DeviceSpec.parse(name)) == "/device:CPU:1"
    assert mirror.OneDeviceStrategy(name).devices == (jax.devices("cpu")[1],)


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_name_is_refused_with_the_spellings(name):
    with pytest.raises(ValueError, match=r"is not a device name.*'/cpu:0', 'GPU:1'"):
        canonicalize_device(name)


def test_a_device_stays_the_device():
    device = jax.devices("cpu")[3]
    assert canonicalize_device(device) is device


@pytest.mark.parametrize("name", ["/cpu:8", "/tpu:0", "/wormhole:0"])
def test_an_unknown_device_lists_those_that_there_are(name):
    listed = r"There is no device /device:.*\(/device:CPU:0, .*/device:CPU:7\).*jax_num_cpu_devices"
    with pytest.raises(mirror.InvalidDeviceError, match=listed):
        mirror.OneDeviceStrategy(name)
    with pytest.raises(ValueError, match=listed):
        mirror.MirroredStrategy(["/cpu:0", name])


def test_the_order_of_the_devices_is_the_order_of_the_replicas():
    strategy = mirror.MirroredStrategy(["/cpu:5", jax.devices("cpu")[2], "cpu:7"])
    assert [d.id for d in strategy.devices] == [5, 2, 7]
    (batch,) = strategy.distribute_dataset([np.arange(6)])
    assert [next(iter(v.devices())).id for v in batch.values] == [5, 2, 7]
    np.testing.assert_array_equal(batch, [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(strategy.gather(batch), np.arange(6))


def test_replica_order_is_kept_between_strategies_of_other_orders():
    """Row r is replica r's value, on whatever device it was."""
    there = mirror.MirroredStrategy(["/cpu:1", "/cpu:0"])
    (batch,) = there.distribute_dataset([np.arange(4)])
    back = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    for _ in range(3):
        np.testing.assert_array_equal(back.gather(batch), np.arange(4))
        np.testing.assert_array_equal(there.gather(batch), np.arange(4))


def test_no_devices_named_means_all():
    assert mirror.MirroredStrategy().devices == tuple(jax.devices())
    assert mirror.MirroredStrategy(None).num_replicas_in_sync == 8


def test_devices_may_come_from_any_iterable():
    assert mirror.MirroredStrategy(iter(["/cpu:0", "/cpu:1"])).num_replicas_in_sync == 2


def test_a_strategy_says_what_it_has(caplog):
    with caplog.at_level(logging.INFO, "mirror"):
        strategy = cpu_strategy(2)
    assert "Using MirroredStrategy with devices (/device:CPU:0, /device:CPU:1)" in caplog.text
    assert str(strategy) == "MirroredStrategy(/device:CPU:0, /device:CPU:1)"
    lines = repr(strategy).splitlines()
    assert lines[0] == "MirroredStrategy, 2 replicas in sync"
    assert lines[1].split() == ["replica", "logical", "device", "physical", "device", "memory"]
    assert lines[3].split() == ["1", "/device:CPU:1", "/physical_device:CPU:0", "host", "memory"]
    assert strategy._repr_html_().count("<tr>") == 3


def test_properties_are_read_only(two):
    for name in ("devices", "num_replicas_in_sync", "cross_device_ops"):
        with pytest.raises(AttributeError):
            setattr(two, name, None)


@pytest.mark.parametrize("make", [jnp.arange, np.arange], ids=["jax", "numpy"])
def test_a_mirrored_copy_shares_no_buffer_with_its_source(make):
    devices = ReplicaDevices(tuple(jax.devices("cpu")[:2]))
    source = make(4)
    copy = devices.mirror(source)
    assert devices.is_mirrored(copy)
    jax.jit(lambda x: x + 1, donate_argnums=0)(copy).block_until_ready()
    np.testing.assert_array_equal(source, range(4))


def test_a_stacked_host_array_is_copied_before_it_travels():
    devices = ReplicaDevices(tuple(jax.devices("cpu")[:2]))
    source = np.zeros((2, 1 << 16), np.float32)
    stacked = devices.stack(source)
    source[:] = 1
    assert not np.asarray(stacked).any()


def test_the_pool_variable_is_taken_back(monkeypatch):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    with backend._wide_host_pool():
        assert int(os.environ["PJRT_NPROC"]) >= 8 * 4
    assert "PJRT_NPROC" not in os.environ


def test_the_users_pool_is_left_alone(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "3")
    with backend._wide_host_pool():
        assert os.environ["PJRT_NPROC"] == "3"
    assert os.environ["PJRT_NPROC"] == "3"
