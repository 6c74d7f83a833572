"""Tools that show where ops run, where arrays are stored, and why a step does not end.

For example:

    mirror.debugging.set_log_device_placement(True)
    a @ b  # Executing op matmul in device /job:localhost/replica:0/task:0/device:GPU:0

    print(mirror.debugging.visualize_placement(model))

    mirror.debugging.watch(secs=60)  # reports steps that do not end
"""

from mirror._src.base.terminal import Table as Table
from mirror._src.base.tracebacks import make_public as _make_public
from mirror._src.devices.op_log import set_log_device_placement as set_log_device_placement
from mirror._src.inspection.placement_table import visualize_placement as visualize_placement
from mirror._src.inspection.watch import Watch as Watch
from mirror._src.inspection.watch import watch as watch

_make_public("mirror.debugging")


def __dir__() -> list[str]:
    # The classes are types of results: documented, but not what a user looks for.
    return ["set_log_device_placement", "visualize_placement", "watch"]
