"""GPUs of a description, for which XLA compiles on a machine without them.

JAX's CUDA plugin compiles for devices that do not exist, given the sizes and clock rates of a GPU.
It needs neither a GPU nor a driver, CUDA, cuDNN or NCCL. Programs for them cannot run.
"""

import functools
from dataclasses import dataclass, replace

import jax
from jax.experimental import topologies

from mirror._src.base.optional import version_of

_CUDA = ("12", "13")  # versions of CUDA for which JAX has plugins
_MIB = 2**20


@dataclass(frozen=True)
class GpuModel:
    """Properties of a GPU for XLA, from NVIDIA's data sheets and the properties of CUDA.

    Attributes:
        name: Name that the driver gives it.
        compute_capability: Major and minor version.
        cores: Number of streaming multiprocessors.
        core_width: Number of float32 units of a core.
        core_threads: Most threads on a core.
        core_memory: Bytes of shared memory of a core.
        block_memory: Most bytes of shared memory of a block.
        cache: Bytes of the L2 cache.
        clock: Boost clock in GHz.
        memory: Bytes of memory that CUDA reports.
        bandwidth: Bytes per second of its memory.
        links: Number of NVLink connections.
    """

    name: str
    compute_capability: tuple[int, int]
    cores: int
    core_width: int
    core_threads: int
    core_memory: int
    block_memory: int
    cache: int
    clock: float
    memory: int
    bandwidth: int
    links: int

    @property
    def target_config(self) -> str:
        """The description in XLA's text format `GpuTargetConfigProto` (JAX 0.10.2, 0.12.0.1)."""
        major, minor = self.compute_capability
        features = "feature_extension: ACCELERATED_FEATURES" if major == 9 else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
              shared_memory_per_core: {self.core_memory}
              threads_per_core_limit: {self.core_threads}
              core_count: {self.cores} fpus_per_core: {self.core_width}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              memory_bandwidth: {self.bandwidth} l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock} device_memory_size: {self.memory}
              shared_memory_per_block_optin: {self.block_memory}
              cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              device_vendor: "NVIDIA Corporation" device_address_bits: 64
              pcie_bandwidth: 34359738368 ecc_enabled: true name: "{self.name}"
              driver_version: "13.0.0" runtime_version: "12.8.0"
              compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
              device_interconnect_info {{ active_links: {self.links} }}
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.name}"
        """


_H100 = GpuModel(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    cores=132,
    core_width=128,
    core_threads=2048,
    core_memory=233472,
    block_memory=232448,
    cache=50 * _MIB,
    clock=1.98,
    memory=84_942_979_072,
    bandwidth=3_352_320_000_000,
    links=18,
)
_H200 = replace(
    _H100,
    name="NVIDIA H200",
    cache=60 * _MIB,
    memory=150_109_880_320,
    bandwidth=4_814_000_000_000,
)
_A100 = GpuModel(
    name="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    cores=108,
    core_width=64,
    core_threads=2048,
    core_memory=167936,
    block_memory=166912,
    cache=40 * _MIB,
    clock=1.41,
    memory=85_097_971_712,
    bandwidth=2_039_000_000_000,
    links=12,
)
_L4 = GpuModel(
    name="NVIDIA L4",
    compute_capability=(8, 9),
    cores=58,
    core_width=128,
    core_threads=1536,
    core_memory=102400,
    block_memory=101376,
    cache=48 * _MIB,
    clock=2.04,
    memory=23_580_639_232,
    bandwidth=300_000_000_000,
    links=0,
)
_RTX4090 = replace(
    _L4,
    name="NVIDIA GeForce RTX 4090",
    cores=128,
    cache=72 * _MIB,
    clock=2.52,
    memory=25_393_692_672,
    bandwidth=1_008_000_000_000,
)
GPU_MODELS = {"h100": _H100, "h200": _H200, "a100": _A100, "l4": _L4, "rtx4090": _RTX4090}

# Devices of no process. A strategy accepts only the devices of its process, on which it can place
# arrays; `backend.require_logical` accepts these as well, because JAX can compile for them.
_topologies: dict[jax.Device, tuple[jax.Device, ...]] = {}


class GpuCompilerError(ValueError):
    """Error for a GPU that is not described, or for which this machine cannot compile."""


def described_gpus(name: str, count: int, hosts: int = 1) -> tuple[jax.Device, ...]:
    """Returns GPUs that need not exist, for programs that are compiled only.

    Args:
        name: A key of `GPU_MODELS`, in any case, with or without spaces and hyphens.
        count: Number of GPUs of each host.
        hosts: Number of hosts.

    Raises:
        GpuCompilerError: If the name is unknown, or JAX's CUDA plugin is missing or of another
            version than jaxlib.
    """
    model = GPU_MODELS.get(name.lower().translate({ord(c): None for c in " -_"}))
    if model is None:
        raise GpuCompilerError(f"Unknown GPU {name!r}. Pass one of {', '.join(GPU_MODELS)}.")
    _require_compiler()
    devices = _devices(model, count, hosts)
    _topologies.update(dict.fromkeys(devices, devices))
    return devices


@functools.cache
def _devices(model: GpuModel, count: int, hosts: int) -> tuple[jax.Device, ...]:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=model.target_config, topology=f"1x{hosts}x{count}"
    )
    return tuple(topology.devices)


def memory_of(device: jax.Device) -> int | None:
    """Returns the bytes of memory of one of `described_gpus`; `None` for other devices."""
    names = {model.name: model.memory for model in GPU_MODELS.values()}
    return names.get(device.device_kind) if is_described(device) else None


def is_described(device: jax.Device) -> bool:
    """Whether a device is one of `described_gpus`."""
    return device in _topologies


def topology_of(device: jax.Device) -> tuple[jax.Device, ...]:
    """Returns the devices that were described together with a device; () for other devices."""
    return _topologies.get(device, ())


def _require_compiler() -> None:
    """Rejects an environment without a CUDA plugin of jaxlib's version.

    Raises:
        GpuCompilerError: If the plugin is missing or has another version.
    """
    wanted = version_of("jaxlib")
    packages = {v: (f"jax-cuda{v}-pjrt", f"jax-cuda{v}-plugin") for v in _CUDA}
    installed = {v: [version_of(package) for package in packages[v]] for v in _CUDA}
    if [wanted, wanted] in installed.values():
        return
    cuda = next((v for v in _CUDA if any(installed[v])), _CUDA[0])
    found = " and ".join(
        f"{package} {version}" if version else f"no {package}"
        for package, version in zip(packages[cuda], installed[cuda], strict=True)
    )
    fix = " ".join(f"{package}=={wanted}" for package in packages[cuda])
    raise GpuCompilerError(
        f"XLA's GPU compiler needs {' and '.join(packages[cuda])} of the version of jaxlib, "
        f"{wanted}, but this environment has {found}: pip install --no-deps {fix}"
    )
