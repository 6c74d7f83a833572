"""Device names: `DeviceSpec`, and the named physical and logical devices."""

import re
from dataclasses import dataclass

from mirror._src.base.public_names import set_module

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
_JAX_TYPES = {"CUDA": "GPU", "ROCM": "GPU"}  # JAX prints its devices as `cuda:0`


@dataclass(frozen=True)
class DeviceSpec:
    """Complete or partial name of a logical device.

    Attributes:
        device_type: Type in capitals, such as `"GPU"`, or None if unspecified.
        index: Index among the devices of this type, or None if unspecified.

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

        `"GPU"` and `"/gpu:*"` do not specify an index; `""` and None specify nothing. JAX's names
        `"cuda:0"` and `"rocm:0"` are GPUs.

        Raises:
            ValueError: If the text is not a device name, or names a device of another process.
        """
        if not name:
            return cls()
        host = _HOST.match(name)
        assert host is not None  # every group is optional
        rest = name[host.end() :]
        device = _DEVICE.fullmatch(rest)
        kind = (device["type"] or device["bare"]).upper() if device is not None else None
        kind = _JAX_TYPES.get(kind, kind) if kind is not None else None
        index = device["index"] if device is not None else None
        unknown = device is not None and index is None and device["bare"] and kind not in _TYPES
        if unknown or (rest and device is None) or (host[0] and rest and rest[0] != "/"):
            matches = re.findall(r"[A-Za-z]+:\d", rest)
            several = f" It contains {len(matches)} devices." if len(matches) > 1 else ""
            raise ValueError(
                f"{name!r} is not a device name.{several} Device names look like {SPELLINGS}."
            )
        job, *numbers = host.groups()
        if job not in (None, "localhost") or any(int(number or 0) for number in numbers):
            fix = f"Name a device of this process, {JOB}, such as {SPELLINGS}."
            if job == "ps":
                fix = (
                    "A variable that several processes share belongs to a strategy: "
                    "mirror.ps.ParameterServerStrategy().Variable(3.0)."
                )
            raise ValueError(f"{name!r} is a device of another process. {fix}")
        return cls(kind, None if index in (None, "*") else int(index))

    @property
    def full_name(self) -> str:
        """The name with job, replica and task, as used in log lines."""
        return f"{JOB}{self}"

    def __str__(self) -> str:
        if self.device_type is None:
            return ""
        return f"/device:{self.device_type}:{'*' if self.index is None else self.index}"


@set_module("mirror.config")
@dataclass(frozen=True)
class PhysicalDevice:
    """A CPU or GPU of this machine. All CPU cores together are one physical device.

    Attributes:
        name: Name, such as `"/physical_device:GPU:0"`.
        device_type: `"CPU"` or `"GPU"`.

    >>> mirror.config.list_physical_devices("CPU")[0].name
    '/physical_device:CPU:0'
    """

    name: str
    device_type: str


@set_module("mirror.config")
@dataclass(frozen=True)
class LogicalDevice:
    """A device that computations run on: a physical device, or a partition of one.

    Attributes:
        name: Name, such as `"/device:GPU:0"`.
        device_type: `"CPU"`, `"GPU"`, or another JAX platform in capitals.

    >>> mirror.config.list_logical_devices("CPU")[1].name
    '/device:CPU:1'
    """

    name: str
    device_type: str
