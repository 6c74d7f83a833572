"""Device names: every spelling parsed into one small value, and the two kinds of device named."""

import functools
import re
from dataclasses import dataclass
from dataclasses import replace as _replace

from mirror._src.utils.modules import set_module

SPELLINGS = "'/cpu:0', 'GPU:1', '/device:GPU:1', '/job:localhost/replica:0/task:0/device:GPU:1'"
JOB = "/job:localhost/replica:0/task:0"
_HOST = re.compile(
    r"(?:/job:(?P<job>\w+))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?", re.ASCII
)
_DEVICE = re.compile(
    r"/?(?:device:(?P<type>[A-Za-z]+)|(?P<bare>(?!device)[A-Za-z]+))(?::(?P<index>\d+|\*))?",
    re.ASCII,
)
_TYPES = ("CPU", "GPU", "TPU")
_SAME = {"CUDA": "GPU", "ROCM": "GPU"}  # as JAX writes its own devices: `cuda:0`


@functools.total_ordering
@dataclass(frozen=True)
class DeviceSpec:
    """The name of a logical device, or a part of one.

    Specs are ordered by type, then by index, what is left open first.

    Attributes:
        device_type: in capitals, `"GPU"`; `None` where it is left open.
        index: among the devices of that type; `None` where it is left open.

    >>> DeviceSpec.parse("/job:localhost/replica:0/task:0/device:gpu:1")
    DeviceSpec(device_type='GPU', index=1)
    >>> str(DeviceSpec("CPU", 0)), DeviceSpec("CPU", 0).full_name
    ('/device:CPU:0', '/job:localhost/replica:0/task:0/device:CPU:0')
    """

    device_type: str | None = None
    index: int | None = None

    @classmethod
    def parse(cls, name: str | None) -> "DeviceSpec":
        """Parses a device name in any of its spellings.

        `"GPU"` and `"/gpu:*"` leave the index open; `""` and `None` leave everything open. JAX's
        own `"cuda:0"` and `"rocm:0"` are GPUs.

        Raises:
            ValueError: the text is no device name, or names a device of another process.
        """
        if not name:
            return cls()
        host = _HOST.match(name)
        assert host is not None  # all its parts may be missing
        rest = name[host.end() :]
        device = _DEVICE.fullmatch(rest)
        kind = (device["type"] or device["bare"]).upper() if device is not None else None
        kind = _SAME.get(kind, kind) if kind is not None else None
        index = device["index"] if device is not None else None
        unknown = device is not None and index is None and device["bare"] and kind not in _TYPES
        if unknown or (rest and device is None) or (host[0] and rest and rest[0] != "/"):
            named = re.findall(r"[A-Za-z]+:\d", rest)
            several = f" It names {len(named)} devices." if len(named) > 1 else ""
            raise ValueError(
                f"{name!r} is not a device name.{several} Device names look like {SPELLINGS}."
            )
        if host["job"] not in (None, "localhost") or any(map(_not_zero, host.groups()[1:])):
            raise ValueError(
                f"{name!r} names a device of another process. mirror runs in one process, "
                f"{JOB}: name one of its own devices, like {SPELLINGS}."
            )
        return cls(kind, None if index in (None, "*") else int(index))

    def replace(self, **changes: str | int | None) -> "DeviceSpec":
        """A copy with other parts."""
        return _replace(self, **changes)  # type: ignore[arg-type]

    def make_merged_spec(self, other: "DeviceSpec") -> "DeviceSpec":
        """This spec, but with those parts of `other` that it does not leave open."""
        return DeviceSpec(
            self.device_type if other.device_type is None else other.device_type,
            self.index if other.index is None else other.index,
        )

    @property
    def full_name(self) -> str:
        """The name with job, replica and task, as it stands in log lines."""
        return f"{JOB}{self}"

    def __str__(self) -> str:
        if self.device_type is None:
            return ""
        return f"/device:{self.device_type}:{'*' if self.index is None else self.index}"

    def __lt__(self, other: "DeviceSpec") -> bool:
        if not isinstance(other, DeviceSpec):
            return NotImplemented
        return self._key < other._key

    @property
    def _key(self) -> tuple[str, int]:
        return self.device_type or "", -1 if self.index is None else self.index


def _not_zero(number: str | None) -> bool:
    return number is not None and int(number) > 0


@set_module("mirror.config")
@dataclass(frozen=True)
class PhysicalDevice:
    """A CPU or a GPU of this machine. One CPU is one physical device, with all its cores.

    Attributes:
        name: such as `"/physical_device:GPU:0"`.
        device_type: `"CPU"` or `"GPU"`.

    >>> mirror.config.list_physical_devices("CPU")[0].name
    '/physical_device:CPU:0'
    """

    name: str
    device_type: str


@set_module("mirror.config")
@dataclass(frozen=True)
class LogicalDevice:
    """What computations are placed on: a physical device, or a part of one.

    Attributes:
        name: such as `"/device:GPU:0"`.
        device_type: `"CPU"`, `"GPU"`, or another platform of JAX in capitals.

    >>> mirror.config.list_logical_devices("CPU")[1].name
    '/device:CPU:1'
    """

    name: str
    device_type: str
