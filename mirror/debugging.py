"""Tools that show where ops run and where arrays are stored.

For example:

    mirror.debugging.set_log_device_placement(True)
    a @ b  # Executing op matmul in device /job:localhost/replica:0/task:0/device:GPU:0

    print(mirror.debugging.visualize_placement(model))
"""

from mirror._src.devices.op_log import set_log_device_placement as set_log_device_placement
from mirror._src.explain.placement_table import visualize_placement as visualize_placement
from mirror._src.utils.tables import Table as Table
