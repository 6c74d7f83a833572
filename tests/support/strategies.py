"""Strategies over the host devices, by layout and by executor."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax

import mirror
from tests.support.inside import pretended_types

# Number of devices, and replicas on each of them.
LAYOUTS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "8": (8, 1), "2-on-2": (2, 2), "3-on-1": (1, 3)}
STRATEGIES: dict[str, Callable[[], mirror.MirroredStrategy]] = {
    name: lambda layout=layout: cpu_strategy(layout[0], replicas_per_device=layout[1])
    for name, layout in LAYOUTS.items()
}
ON_HOST = mirror.ReductionToOneDevice()


def cpu_strategy(num_devices: int, **kwargs) -> mirror.MirroredStrategy:
    """Returns a strategy over the first host devices."""
    return mirror.MirroredStrategy(jax.devices("cpu")[:num_devices], **kwargs)


def executors(num_replicas: int) -> dict[str, Callable[[], mirror.MirroredStrategy]]:
    """Returns constructors of strategies with this many replicas, one per executor."""
    return {
        "pmap": functools.partial(cpu_strategy, num_replicas),
        "vmap": functools.partial(cpu_strategy, 1, replicas_per_device=num_replicas),
        "staged": functools.partial(cpu_strategy, num_replicas, cross_device_ops=ON_HOST),
    }


EXECUTORS = executors(2)
# For tables that cover more than the executors: one replica, and two on each of two devices.
ONE = {"one": functools.partial(cpu_strategy, 1)}
PAIRS = {"pairs": functools.partial(cpu_strategy, 2, replicas_per_device=2)}


def each_layout() -> Iterator[mirror.MirroredStrategy]:
    """Yields a strategy of each layout of replicas, for `tables.rows`."""
    for num_devices, replicas_per_device in LAYOUTS.values():
        yield cpu_strategy(num_devices, replicas_per_device=replicas_per_device)


def each_executor() -> Iterator[mirror.MirroredStrategy]:
    """Yields two replicas of each executor, for `tables.rows`."""
    for make in EXECUTORS.values():
        yield make()


FOUR_REPLICAS: dict[str, tuple[int, int, type[mirror.CrossDeviceOps]]] = {
    "pmap": (4, 1, mirror.AllReduce),
    "vmap": (1, 4, mirror.AllReduce),
    "vmap on 2": (2, 2, mirror.AllReduce),
    "staged": (4, 1, mirror.ReductionToOneDevice),
    "staged on 2": (2, 2, mirror.ReductionToOneDevice),
    "staged in lanes": (4, 1, mirror.ReductionToOneDevice),
}


@contextlib.contextmanager
def executor(
    name: str, ops: mirror.CrossDeviceOps | None = None
) -> Iterator[mirror.MirroredStrategy]:
    """Yields a strategy of `FOUR_REPLICAS`; "in lanes", its device types alternate."""
    num_devices, replicas_per_device, default_ops = FOUR_REPLICAS[name]
    with pretended_types(["CPU", "GPU"] * 2 if name == "staged in lanes" else []):
        yield mirror.MirroredStrategy(
            jax.devices("cpu")[:num_devices],
            ops or default_ops(),
            replicas_per_device=replicas_per_device,
        )
