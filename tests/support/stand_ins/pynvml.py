"""Stand-in for NVIDIA's `nvidia-ml-py`, with the number of GPUs in `STAND_IN_GPUS`.

Without that variable there is no driver. `STAND_IN_MIB` is the memory of each, `16384,8192`, or `-`
where the driver does not say. GPU 1 is `GPU-11111111-...`; its one part `MIG-11111111-...`, which
CUDA uses where `STAND_IN_MIG` turns MIG mode on: this memory, or 0 without a part.
"""

import os
from dataclasses import dataclass

_open = 0


class NVMLError(Exception):
    """The error of NVML for a request that it cannot serve."""


@dataclass(frozen=True)
class _Handle:
    index: int
    kind: str = "GPU"


@dataclass(frozen=True)
class _Memory:
    total: int
    free: int
    used: int


def nvmlInit() -> None:
    global _open
    if "STAND_IN_GPUS" not in os.environ:
        raise NVMLError("Driver Not Loaded")
    _open += 1


def nvmlShutdown() -> None:
    global _open
    _require_open()
    _open -= 1


def nvmlSystemGetDriverVersion() -> str:
    _require_open()
    return "570.1"


def nvmlDeviceGetCount() -> int:
    _require_open()
    return int(os.environ["STAND_IN_GPUS"])


def nvmlDeviceGetHandleByIndex(index: int) -> _Handle:
    if not 0 <= index < nvmlDeviceGetCount():
        raise NVMLError("Invalid Argument")
    return _Handle(index)


def nvmlDeviceGetHandleByUUID(uuid: str) -> _Handle:
    handles = [_Handle(i, kind) for i in range(nvmlDeviceGetCount()) for kind in ("GPU", "MIG")]
    for handle in handles:
        if nvmlDeviceGetUUID(handle) == uuid:
            return handle
    raise NVMLError("Not Found")


def nvmlDeviceGetUUID(handle: _Handle) -> str:
    _require_open()
    return f"{handle.kind}-{str(handle.index) * 8}-0000-0000-0000-000000000000"


def nvmlDeviceGetName(handle: _Handle) -> str:
    _require_open()
    return f"Stand-in {handle.kind}"


def nvmlDeviceGetMigMode(handle: _Handle) -> tuple[int, int]:
    _require_open()
    if handle.index % 2:  # some GPUs have no such mode
        raise NVMLError("Not Supported")
    return (1, 1) if "STAND_IN_MIG" in os.environ else (0, 0)


def nvmlDeviceGetMaxMigDeviceCount(handle: _Handle) -> int:
    _require_open()
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle: _Handle, index: int) -> _Handle:
    _require_open()
    if index != 1 or os.environ["STAND_IN_MIG"] == "0":
        raise NVMLError("Not Found")
    return _Handle(handle.index, "MIG")


def nvmlDeviceGetMemoryInfo(handle: _Handle) -> _Memory:
    _require_open()
    if handle.kind == "MIG" and "STAND_IN_MIG" in os.environ:
        num_bytes = int(os.environ["STAND_IN_MIG"]) * 2**20
        return _Memory(num_bytes, num_bytes, 0)
    said = os.environ.get("STAND_IN_MIB", "").split(",")
    text = said[handle.index] if handle.index < len(said) and said[handle.index] else "16384"
    if text == "-":
        raise NVMLError("Not Supported")
    return _Memory(int(text) * 2**20, int(text) * 2**20, 0)


def nvmlDeviceGetCudaComputeCapability(handle: _Handle) -> tuple[int, int]:
    _require_open()
    if handle.kind == "MIG":
        raise NVMLError("Invalid Argument")
    return 9, 0


def _require_open() -> None:
    if not _open:
        raise NVMLError("Uninitialized")
