"""Eight host devices, demanded before anything starts JAX's backend."""

import os
import threading

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

import mirror  # noqa: E402
from mirror.context import current_frame  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """The suite fails, and does not skip, where it did not get its devices."""
    count = len(jax.devices("cpu"))
    if count != 8:
        pytest.exit(f"the suite needs 8 host devices and got {count}", returncode=3)


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """No test leaves an environment variable, a thread, a scope or a mesh."""
    environment, threads = dict(os.environ), set(threading.enumerate())
    yield
    assert current_frame() is None, "a scope was left open"
    assert jax.sharding.get_abstract_mesh().empty, "a mesh was left set"
    changed = {
        k: os.environ.get(k)
        for k in environment.keys() | os.environ.keys()
        if environment.get(k) != os.environ.get(k) and k != "PYTEST_CURRENT_TEST"
    }
    assert not changed, f"the environment was changed: {changed}"
    left = [t for t in set(threading.enumerate()) - threads if not t.daemon]
    assert not left, f"threads were left running: {left}"


def cpu_strategy(num_replicas: int, **kwargs) -> mirror.MirroredStrategy:
    """A strategy over the first host devices."""
    return mirror.MirroredStrategy(jax.devices("cpu")[:num_replicas], **kwargs)


@pytest.fixture(params=[1, 2, 3, 8], ids=lambda n: f"{n}-replicas")
def strategy(request) -> mirror.MirroredStrategy:
    """One strategy for each replica count of the laws."""
    return cpu_strategy(request.param)


@pytest.fixture
def two() -> mirror.MirroredStrategy:
    """Two replicas."""
    return cpu_strategy(2)


@pytest.fixture
def eight() -> mirror.MirroredStrategy:
    """Eight replicas."""
    return cpu_strategy(8)
