"""Device names: every spelling parsed into one small value."""

import re
from dataclasses import dataclass

_SPELLING = re.compile(
    r"(?:/job:localhost(?:/replica:0(?:/task:0)?)?(?=/))?/?(?:device:)?"
    r"(?P<type>[A-Za-z]+):(?P<index>[0-9]+)"
)
SPELLINGS = "'/cpu:0', 'GPU:1', '/device:GPU:1', '/job:localhost/replica:0/task:0/device:GPU:1'"


@dataclass(frozen=True, order=True)
class DeviceSpec:
    """The name of a logical device: its type in capitals, and its index among that type."""

    device_type: str
    index: int

    @classmethod
    def parse(cls, name: str) -> "DeviceSpec":
        """Parses a device name in any of its spellings.

        Raises:
            ValueError: the text is no device name.
        """
        match = _SPELLING.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is not a device name. Device names look like {SPELLINGS}.")
        return cls(match["type"].upper(), int(match["index"]))

    def __str__(self) -> str:
        return f"/device:{self.device_type}:{self.index}"
