"""The entries of TensorBoard logs."""

import os
import pathlib
import struct

from tensorboardX.proto.event_pb2 import Event  # sets CRC32C_SW_MODE


def events(directory: str | os.PathLike[str]) -> list[tuple]:
    """Returns the step, the tag and the kind of each value in the log."""
    found = []
    for path in sorted(pathlib.Path(directory).iterdir()):
        data = path.read_bytes()
        while data:  # length, checksum, record, checksum
            size = struct.unpack("<Q", data[:8])[0]
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            for value in event.summary.value:
                text = b"".join(value.tensor.string_val).decode()
                found.append((event.step, value.tag, text or value.simple_value))
    return found
