"""The device configuration: visible devices, logical devices, memory.

Each setter validates its arguments, sets the options that JAX reads when its backend starts
(`jax_options`), and stores the configuration. It therefore applies no matter what starts
the backend. Settings that the user made by other means take precedence, with a warning; visible
devices can be chosen among those that the user's settings select.
"""

import logging
import os
from collections.abc import Iterable, Sequence

import jax
from jax.experimental.compilation_cache import compilation_cache

from mirror._src.base.compile_cache import DIRECTORY, LEAST_SECS, cache_options
from mirror._src.base.errors import InvalidDeviceError, counted, expected, require_bool, require_int
from mirror._src.base.naming import warn_user
from mirror._src.base.types import MOST_REPLICAS
from mirror._src.devices import jax_options
from mirror._src.devices.backend import (
    default_devices,
    devices_of_type,
    lock,
    names,
    started,
    startup_cause,
    type_of,
    watch_startup,
)
from mirror._src.devices.jax_options import (
    CACHE_DIRECTORY,
    CACHE_LEAST_SECS,
    HOST_THREADS,
    MEMORY_FRACTION,
    MIB,
    PLATFORMS,
    PREALLOCATE,
    VISIBLE_GPUS,
    LogicalDeviceConfiguration,
    host_devices_of_user,
    names_gpus,
    require_host_devices,
    require_within_users,
)
from mirror._src.devices.names import PhysicalDevice
from mirror._src.devices.physical import (
    CPU,
    gpu_of,
    list_physical_devices,
    of_type,
    require_physical,
)
from mirror._src.devices.resolve import warn_about_gpus

_logger = logging.getLogger("mirror")
_soft = False


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Returns the physical devices that have, or will have, logical devices.

    Args:
        device_type: `"CPU"` or `"GPU"`. None returns both.

    >>> get_visible_devices("CPU")
    [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
    """
    return of_type((CPU, *jax_options.visible_gpus()), device_type)


def set_visible_devices(
    devices: PhysicalDevice | Iterable[PhysicalDevice], device_type: str | None = None
) -> None:
    """Sets the physical devices that get logical devices.

    Logical devices are numbered in the order of the physical devices, whatever order is passed.

    Args:
        devices: A device returned by `list_physical_devices`, or a list of them.
        device_type: Replaces only the visible devices of this type. None replaces all visible
            devices.

    Raises:
        TypeError: If `devices` is not a list.
        ValueError: If a device is not a physical device of this machine, or not of this type.
        InvalidDeviceError: If the CPU would be hidden; JAX always uses it.
        RuntimeError: If the backend has started, or the user's own settings exclude a device.

    >>> set_visible_devices(get_visible_devices("GPU"), "GPU")  # no change: always allowed
    """
    if isinstance(devices, PhysicalDevice | str):
        devices = [devices]
    if not isinstance(devices, Iterable):
        fix = "Pass devices from mirror.config.list_physical_devices(), or [] for none."
        raise TypeError(expected("devices", devices, "a list of physical devices", fix))
    devices = list(devices)
    if device_type not in (None, "CPU", "GPU"):
        raise ValueError(expected("device_type", device_type, "'CPU', 'GPU' or None"))
    chosen = [require_physical(device, device_type) for device in devices]
    if device_type != "GPU" and CPU not in chosen:
        raise InvalidDeviceError(
            f"set_visible_devices({devices!r}, {device_type!r}) would hide the CPU, which JAX "
            "always uses. To change only the GPUs, pass their type: "
            "set_visible_devices(gpus[:1], 'GPU')."
        )
    if device_type == "CPU":
        return
    gpus = list_physical_devices("GPU")
    visible = tuple(gpu for gpu in gpus if gpu in chosen)
    with lock:
        if visible == jax_options.visible_gpus() and (visible or jax_options.has_no_gpu_to_hide()):
            return
        _require_not_started("Visible devices")
        require_within_users(gpus, visible)
        jax_options.change(visible_gpus=visible)


def get_logical_device_configuration(
    device: PhysicalDevice,
) -> list[LogicalDeviceConfiguration] | None:
    """Returns the configured logical devices of a physical device, or None if not configured.

    Raises:
        ValueError: If `device` is not a physical device of this machine.

    >>> (cpu,) = list_physical_devices("CPU")
    >>> configurations = get_logical_device_configuration(cpu)
    """
    configured = jax_options.current().logical.get(require_physical(device))
    return None if configured is None else list(configured)


def set_logical_device_configuration(
    device: PhysicalDevice, logical_devices: Sequence[LogicalDeviceConfiguration]
) -> None:
    """Splits a physical device into logical devices, one for each configuration.

    The CPU is split into host devices. XLA cannot split a GPU: its logical devices are several
    replicas on the whole GPU, and the memory of the process is limited to the sum of their limits.
    XLA applies one limit to all GPUs, as a fraction of each GPU's memory.

    Args:
        device: A device returned by `list_physical_devices`.
        logical_devices: One or more configurations. A single one sets a limit without splitting.

    Raises:
        ValueError: If `device` is not a physical device of this machine, `logical_devices` is
            empty, a limit is set for the CPU, for only some configurations or beyond the GPU's
            memory, or memory growth is set for the GPU.
        TypeError: If an element is not a `LogicalDeviceConfiguration`.
        RuntimeError: If the backend has started, or the user's own settings allow fewer host
            devices.

    >>> (cpu,) = list_physical_devices("CPU")
    >>> set_logical_device_configuration(cpu, [LogicalDeviceConfiguration()] * 3)  # too late
    Traceback (most recent call last):
        ...
    RuntimeError: Virtual devices cannot be modified after being initialized. ...
    """
    device = require_physical(device)
    new = tuple(logical_devices) if isinstance(logical_devices, Iterable) else (None,)
    if not all(isinstance(each, LogicalDeviceConfiguration) for each in new):
        fix = "Pass a list with one mirror.config.LogicalDeviceConfiguration() per logical device."
        raise TypeError(
            expected("logical_devices", logical_devices, "a list of configurations", fix)
        )
    if not new:
        raise ValueError(
            f"`logical_devices` must not be empty, got [] for {device.name}. Pass one "
            "mirror.config.LogicalDeviceConfiguration() per logical device."
        )
    limits = [each.memory_limit for each in new]
    is_cpu = device.device_type == "CPU"
    with lock:
        logical = jax_options.current().logical
        if logical.get(device) == new:
            return
        (_require_no_limits if is_cpu else _require_limits)(device, limits)
        _require_not_started("Virtual devices")
        if is_cpu:
            require_host_devices(len(new))
        elif any(limits) and MEMORY_FRACTION.of_user is not None:
            _logger.warning("Ignoring memory_limit: %s takes precedence.", MEMORY_FRACTION)
        jax_options.change(logical={**logical, device: new})


def set_num_cpu_devices(n: int) -> None:
    """Provides `n` host devices, to run several replicas on a machine without enough GPUs.

    Call it at the top of a script or notebook, before anything starts JAX. It splits the CPU as
    `set_logical_device_configuration` does; GPUs, if there are any, remain the default devices.
    Once JAX has started it changes nothing, and checks that there are at least `n` host devices,
    so that a notebook cell can run again.

    Args:
        n: Number of host devices.

    Raises:
        TypeError: If `n` is not an integer.
        ValueError: If `n` is less than 1, or more than 4096.
        RuntimeError: If the backend has started with fewer host devices, or the user's own settings
            allow fewer.

    >>> set_num_cpu_devices(4)
    >>> mirror.MirroredStrategy([f"/cpu:{i}" for i in range(4)]).num_replicas_in_sync
    4
    """
    require_int("n", n, most=MOST_REPLICAS)
    with lock:
        if not started():
            set_logical_device_configuration(CPU, [LogicalDeviceConfiguration()] * int(n))
            return
        count = len(devices_of_type("CPU"))
        if count < n:
            raise RuntimeError(
                f"set_num_cpu_devices({n}): JAX has started with {counted(count, 'host device')}, "
                f"and their number cannot change. {startup_cause()} Call it before that, right "
                "after the imports; in a notebook, restart the kernel first."
            )


def get_num_cpu_threads() -> int:
    """Returns the number of threads that host devices compute with, together.

    Before JAX has started, the number that they will have with the settings of now.

    >>> get_num_cpu_threads() >= 1
    True
    """
    with lock:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        count = HOST_THREADS.value or os.environ.get("NPROC")  # which XLA reads, too
        if started():
            devices = len(devices_of_type("CPU"))
        else:
            partitions, fixed = jax_options.num_partitions(CPU), host_devices_of_user()
            devices = partitions or (fixed[0] if fixed else 1)
    return max(int(count) if count and count.isdigit() else cores or 1, devices)


def set_num_cpu_threads(n: int) -> None:
    """Sets how many threads host devices compute with, together. Call it before JAX starts.

    XLA cuts large operations into as many parts, which decides how sums are rounded. To get the
    same bits on machines with different numbers of cores, set the same number on all of them; see
    `MirroredStrategy(replicas=)`. Each host device adds a thread: the number is at least theirs.
    Without this setting it is the number of cores, or `replicas` if that is larger and the strategy
    is what starts JAX.

    Args:
        n: Number of threads. The environment variable `PJRT_NPROC` takes precedence.

    Raises:
        TypeError: If `n` is not an integer.
        ValueError: If `n` is less than 1.
        RuntimeError: If the backend has started with another number.

    >>> set_num_cpu_threads(get_num_cpu_threads())  # no change: always allowed
    """
    require_int("n", n)
    with lock:
        if n == get_num_cpu_threads() and (started() or HOST_THREADS.value):
            return
        _require_not_started("The number of threads")
        if HOST_THREADS.of_user not in (None, str(n)):
            _logger.warning("Ignoring %s threads: %s takes precedence.", n, HOST_THREADS)
        HOST_THREADS.set(str(int(n)))


def raise_num_cpu_threads(least: int) -> None:
    """Lets host devices have at least this many threads, if nothing else sets their number."""
    with lock:
        if not started() and HOST_THREADS.value is None:
            HOST_THREADS.set(str(max(least, get_num_cpu_threads())))


def warn_about_threads(replicas: int) -> None:
    """Warns if another number of host devices would change the number of threads."""
    threads = get_num_cpu_threads()
    if threads >= replicas:
        return
    cause = f"{HOST_THREADS} is too small." if HOST_THREADS.of_user else startup_cause()
    warn_user(
        f"Host devices compute with {counted(threads, 'thread')}. {replicas} devices would have "
        f"{replicas}, with other bits than these. {cause} Call "
        f"mirror.config.set_num_cpu_threads({replicas}) before that, right after the imports."
    )


def first_devices(count: int) -> tuple[jax.Device, ...]:
    """Returns the first devices of JAX's default platform: GPUs if there are any, else the CPU's.

    As `mirror launch --devices` does, creates host devices on a machine without GPUs, if JAX has
    not started and nothing else sets their number.

    Raises:
        ValueError: If `count` is less than 1, or more than 4096.
        TypeError: If `count` is not an integer.
        InvalidDeviceError: If there are fewer devices.
    """
    fix = "For all devices: mirror.MirroredStrategy()."
    require_int("devices", count, fix=fix, most=MOST_REPLICAS)
    with lock:
        was_started = started()
        if not was_started and _uses_host_devices():
            partitions = jax_options.num_partitions(CPU)
            fixed = host_devices_of_user() if partitions is None else (partitions, "mirror.config")
            if fixed is None:
                set_num_cpu_devices(count)
            elif fixed[0] < count:
                raise InvalidDeviceError(
                    f"MirroredStrategy({count}) requires {counted(count, 'host device')}, but "
                    f"{fixed[1]} sets {fixed[0]}. Set {count} there, or {_fewer(count, fixed[0])}"
                )
        devices = default_devices()
    warn_about_gpus()
    if count <= len(devices):
        return devices[:count]
    kind = type_of(devices[0])
    kind = "host device" if kind == "CPU" else kind
    text = (
        f"MirroredStrategy({count}) requires {counted(count, kind)}, but JAX has "
        f"{len(devices)}: {names(devices)}."
    )
    fewer = _fewer(count, len(devices))
    if kind != "host device":
        raise InvalidDeviceError(f"{text} {fewer[0].upper()}{fewer[1:]}")
    cause = f" {startup_cause()}" if was_started else ""
    raise InvalidDeviceError(
        f"{text}{cause} Call mirror.config.set_num_cpu_devices({count}) before that, right after "
        f"the imports (in a notebook, restart the kernel first), or {fewer}"
    )


def _fewer(wanted: int, available: int) -> str:
    """Returns how to make a strategy of `wanted` replicas, or fewer, on the available devices."""
    replicas = f"MirroredStrategy(replicas_per_device={-(-wanted // available)})"
    return f"pass at most {available}. For several replicas on each device: {replicas}."


def _uses_host_devices() -> bool:
    """Whether the CPU will be JAX's default platform, as far as can be known before its start."""
    platforms = PLATFORMS.value
    if platforms is not None and not names_gpus(platforms):
        return "cpu" in platforms.split(",")
    return jax_options.has_no_gpu_to_hide()


def get_memory_growth(device: PhysicalDevice) -> bool | None:
    """Whether a GPU's memory is allocated as needed, or None if not configured.

    Raises:
        ValueError: If `device` is the CPU, or not a physical device of this machine.

    >>> growing = [get_memory_growth(gpu) for gpu in list_physical_devices("GPU")]
    """
    device = _require_gpu(require_physical(device))
    of_user = PREALLOCATE.of_user
    if of_user is not None:
        return _grows(of_user)
    return jax_options.current().growth.get(device)


def set_memory_growth(device: PhysicalDevice, enable: bool) -> None:
    """Allocates a GPU's memory as needed, instead of most of it when the backend starts.

    XLA has one setting for all GPUs: set the same value on all visible GPUs. Otherwise
    `list_logical_devices` and strategies raise a ValueError.

    Args:
        device: A GPU returned by `list_physical_devices`.
        enable: Whether memory grows.

    Raises:
        ValueError: If `device` is the CPU, has logical devices configured, or is not a physical
            device of this machine.
        TypeError: If `enable` is not a bool.
        RuntimeError: If the backend has started.

    >>> for device in list_physical_devices("CPU"):
    ...     set_memory_growth(device, True)
    Traceback (most recent call last):
        ...
    ValueError: Memory growth is available for GPUs only, not for /physical_device:CPU:0. ...
    """
    device = _require_gpu(require_physical(device))
    require_bool("enable", enable)
    with lock:
        configured = jax_options.current()
        if device in configured.logical:
            raise ValueError(
                f"Memory growth cannot be set on {device.name}, which has logical devices "
                "configured. Configure either memory growth or logical devices."
            )
        of_user = PREALLOCATE.of_user
        if of_user is not None and _grows(of_user) != enable:
            _logger.warning(
                "Ignoring set_memory_growth(%s): %s takes precedence.", enable, PREALLOCATE
            )
        if of_user is not None or configured.growth.get(device) == enable:
            return
        _require_not_started("Physical devices")
        jax_options.change(growth={**configured.growth, device: enable})


def get_soft_device_placement() -> bool:
    """Whether `mirror.device` falls back to an existing device. Off by default.

    >>> get_soft_device_placement()
    False
    """
    return _soft


def set_soft_device_placement(enabled: bool) -> None:
    """Lets `mirror.device` use an existing device instead of an unknown one, with a warning.

    Can be set at any time and applies to all threads. Strategies never fall back: an unknown device
    in a strategy is always an error.

    Raises:
        TypeError: If `enabled` is not a bool.

    >>> set_soft_device_placement(True)
    >>> with mirror.device("/cpu:99"):
    ...     print(jnp.ones(2).devices())
    {CpuDevice(id=0)}
    >>> set_soft_device_placement(False)
    """
    global _soft
    require_bool("enabled", enabled)
    _soft = enabled


def set_compilation_cache(directory: str | os.PathLike[str] | None = None) -> None:
    """Keeps compiled programs in a folder, from which later processes load them.

    Turns on [JAX's persistent compilation cache](https://docs.jax.dev/en/latest/persistent_compilation_cache.html)
    for all programs, also those that compile in less than a second. Call it before the first step;
    `mirror launch --cache` does the same without a change of the script.

    A folder that cannot be created or written to is a warning, and so is an entry that cannot be
    read: JAX then compiles. Several processes can use one folder at once. Do not share it with
    users that you do not trust, because programs are loaded from it.

    Args:
        directory: The folder, which is created, or a URL that etils opens, such as
            `gs://bucket/programs`. Defaults to `mirror/programs` in the user's cache folder.
            `jax_compilation_cache_dir` or its environment variable takes precedence.

    Raises:
        TypeError: If `directory` is not a path.
        ModuleNotFoundError: If there is no `directory` and platformdirs is not installed.

    >>> set_compilation_cache()
    """
    if not isinstance(directory, str | os.PathLike | None):
        fix = "Omit it for the default folder."
        raise TypeError(expected("directory", directory, "a path", fix))
    of_user = CACHE_DIRECTORY.of_user
    is_other = directory is not None and os.path.abspath(directory) != os.path.abspath(
        of_user or ""
    )
    if of_user is not None and is_other:
        _logger.warning("Ignoring %r: %s takes precedence.", str(directory), CACHE_DIRECTORY)
    options, warning = cache_options(of_user or directory)
    if warning:
        _logger.warning("%s", warning)
    if options:
        CACHE_DIRECTORY.set(options[DIRECTORY])
        CACHE_LEAST_SECS.set(options[LEAST_SECS])
        compilation_cache.reset_cache()  # else JAX keeps the folder of its first program


def in_words() -> list[tuple[str, str, str]]:
    """Returns the configuration as rows of setting, value and origin."""
    partitions, fixed = jax_options.num_partitions(CPU), host_devices_of_user()
    if partitions is not None and (fixed is None or partitions <= fixed[0]):
        hosts = (str(partitions), "set by mirror.config")
    elif fixed is not None:
        hosts = (str(fixed[0]), f"{fixed[1]}, set by you")
    else:
        hosts = ("1", "default")
    is_configured = jax_options.current().visible_gpus is not None
    growth = "default" if PREALLOCATE.value is None else str(_grows(PREALLOCATE.value))
    return [
        ("host devices", *hosts),
        ("platforms", str(PLATFORMS.value or "all"), PLATFORMS.source),
        (
            "visible GPUs",
            jax_options.ids(jax_options.visible_gpus()) or "none",
            "set by mirror.config" if is_configured else VISIBLE_GPUS.source,
        ),
        ("memory growth", growth, PREALLOCATE.source),
        ("memory fraction", str(MEMORY_FRACTION.value or "default"), MEMORY_FRACTION.source),
        ("soft placement", str(_soft), "set by mirror.config" if _soft else "default"),
    ]


def _require_no_limits(device: PhysicalDevice, limits: Sequence[float | None]) -> None:
    if any(limit is not None for limit in limits):
        raise ValueError(
            f"memory_limit={limits} on {device.name}: XLA cannot limit the memory of the CPU. "
            "Omit memory_limit."
        )


def _require_limits(gpu: PhysicalDevice, limits: Sequence[float | None]) -> None:
    given = [limit for limit in limits if limit is not None]
    if given and len(given) < len(limits):
        raise ValueError(
            f"memory_limit={limits} on {gpu.name}: XLA limits the sum. Set a limit for every "
            "logical device, or for none."
        )
    total = gpu_of(gpu).memory_bytes
    if given and not total:
        raise ValueError(
            f"memory_limit={given} MiB on {gpu.name}: XLA limits a fraction of the memory, and the "
            "driver does not report the total. Set a fraction, e.g. XLA_CLIENT_MEM_FRACTION=0.5."
        )
    if sum(given) * MIB > total:
        raise ValueError(
            f"memory_limit={given} MiB on {gpu.name} adds up to {sum(given):g} MiB, but the GPU "
            f"has {total / MIB:.0f} MiB. Reduce the limits."
        )
    if jax_options.current().growth.get(gpu):
        raise ValueError(
            f"{gpu.name} cannot be split or limited, because memory growth is enabled. Disable it "
            "first: set_memory_growth(gpu, False)."
        )


def _require_not_started(what: str) -> None:
    if started():
        raise RuntimeError(
            f"{what} cannot be modified after being initialized. {startup_cause()} Call "
            "mirror.config before that, right after the imports; in a notebook, restart the kernel "
            "first."
        )
    watch_startup()


def _require_gpu(device: PhysicalDevice) -> PhysicalDevice:
    if device.device_type != "GPU":
        raise ValueError(
            f"Memory growth is available for GPUs only, not for {device.name}. Iterate over "
            "mirror.config.list_physical_devices('GPU')."
        )
    return device


def _grows(preallocate: str) -> bool:
    """Whether a value of `XLA_PYTHON_CLIENT_PREALLOCATE` disables preallocation in jaxlib."""
    return preallocate in ("false", "False", "0")
