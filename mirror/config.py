"""Device discovery and configuration, before JAX's backend starts.

    gpus = mirror.config.list_physical_devices("GPU")
    mirror.config.set_visible_devices(gpus[:1], "GPU")
    mirror.config.set_memory_growth(gpus[0], True)

    mirror.config.set_num_cpu_devices(4)
    mirror.MirroredStrategy()  # four replicas on a machine without GPUs

Settings apply to the whole process, and cannot change once JAX's backend has started. The first
array, `jax.devices()`, `list_logical_devices()` and every strategy start it. Afterwards, setting
the same value again has no effect, and setting another value raises a `RuntimeError` that says what
started the backend.

Settings that you make by other means are never overwritten. `XLA_FLAGS`, `JAX_NUM_CPU_DEVICES`,
`jax_cuda_visible_devices` and `JAX_PLATFORMS` select devices, of which `mirror.config` can choose
fewer. `XLA_PYTHON_CLIENT_PREALLOCATE` and `XLA_CLIENT_MEM_FRACTION` take precedence, with a
warning.
"""

from mirror._src.base.tracebacks import make_public as _make_public
from mirror._src.devices.backend import list_logical_devices as list_logical_devices
from mirror._src.devices.jax_options import LogicalDeviceConfiguration as LogicalDeviceConfiguration
from mirror._src.devices.memory import get_memory_info as get_memory_info
from mirror._src.devices.names import LogicalDevice as LogicalDevice
from mirror._src.devices.names import PhysicalDevice as PhysicalDevice
from mirror._src.devices.physical import get_device_details as get_device_details
from mirror._src.devices.physical import list_physical_devices as list_physical_devices
from mirror._src.devices.settings import (
    get_logical_device_configuration as get_logical_device_configuration,
)
from mirror._src.devices.settings import get_memory_growth as get_memory_growth
from mirror._src.devices.settings import get_num_cpu_threads as get_num_cpu_threads
from mirror._src.devices.settings import get_soft_device_placement as get_soft_device_placement
from mirror._src.devices.settings import get_visible_devices as get_visible_devices
from mirror._src.devices.settings import set_compilation_cache as set_compilation_cache
from mirror._src.devices.settings import (
    set_logical_device_configuration as set_logical_device_configuration,
)
from mirror._src.devices.settings import set_memory_growth as set_memory_growth
from mirror._src.devices.settings import set_num_cpu_devices as set_num_cpu_devices
from mirror._src.devices.settings import set_num_cpu_threads as set_num_cpu_threads
from mirror._src.devices.settings import set_soft_device_placement as set_soft_device_placement
from mirror._src.devices.settings import set_visible_devices as set_visible_devices

_make_public("mirror.config")
