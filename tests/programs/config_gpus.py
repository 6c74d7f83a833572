"""Configures four stand-in GPUs, as far as that is possible without one.

`tests/devices/test_config.py` runs it.
"""

import sys
import threading

import mirror
from mirror import config
from tests.support.inside import has_started
from tests.support.observe import (
    L,
    begin,
    error_of,
    facts,
    log_lines,
    memory,
    names,
    options,
    print_facts,
    unchanged,
)

CPU, *GPUS = begin()

facts["listed"] = names(GPUS)
facts["details"] = [config.get_device_details(device) for device in (CPU, GPUS[0])]
facts["growth at first"] = config.get_memory_growth(GPUS[0])

sys.setswitchinterval(1e-6)


def grow(gpu):
    for i in range(61):
        config.set_memory_growth(gpu, i % 2 == 0)


def split():
    for i in range(61):
        config.set_logical_device_configuration(CPU, [L()] * (i % 2 + 1))


threads = [threading.Thread(target=grow, args=[gpu]) for gpu in GPUS[:2]]
threads.append(threading.Thread(target=split))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
facts["threads"] = [*map(config.get_memory_growth, GPUS), memory()[0], options()[0]]
for gpu in GPUS[:2]:
    config.set_memory_growth(gpu, False)


def show(devices, *type):
    config.set_visible_devices(devices, *type)
    return [names(config.get_visible_devices())[1:], *options()[1:]]


facts["one"] = show(GPUS[1], "GPU")
facts["exactly"] = show([GPUS[2], CPU])
facts["by name"] = show(["/physical_device:GPU:2", "/physical_device:GPU:0"], "GPU")
facts["cpu again"] = show([CPU], "CPU")
facts["unknown"] = error_of(config.set_visible_devices, [*GPUS, config.PhysicalDevice("x", "GPU")])
facts["none"] = show([], "GPU")
facts["only the cpu"] = show([CPU])
facts["all"] = show(GPUS, "GPU")

config.set_memory_growth(GPUS[0], True)
facts["growth"] = [*map(config.get_memory_growth, GPUS), *memory()]
facts["growth first"] = error_of(config.set_logical_device_configuration, GPUS[0], [L()] * 2)
facts["growth differs"] = error_of(config.list_logical_devices)
config.set_memory_growth(GPUS[0], False)
facts["growth taken back"] = memory()

config.set_logical_device_configuration(GPUS[1], [L(1024), L(1024)])
facts["limit"] = [
    memory(),
    [part.memory_limit for part in config.get_logical_device_configuration(GPUS[1])],
]
facts["limit first"] = error_of(config.set_memory_growth, GPUS[1], False)
facts["limits differ"] = error_of(mirror.MirroredStrategy)
config.set_visible_devices(GPUS[:1], "GPU")
facts["limit of a hidden one"] = memory()
config.set_memory_growth(GPUS[3], True)
facts["growth of a hidden one"] = memory()
config.set_visible_devices(GPUS[:3], "GPU")
config.set_logical_device_configuration(GPUS[0], [L(2048)])
config.set_logical_device_configuration(GPUS[2], [L(1024)])
facts["limits still differ"] = error_of(config.list_logical_devices)
config.set_logical_device_configuration(GPUS[2], [L(2048)])
facts["limits"] = memory()

facts["started"] = has_started()
facts["logical"] = names(config.list_logical_devices())
facts["same"] = [
    unchanged(config.set_visible_devices, GPUS[:3], "GPU"),
    unchanged(config.set_visible_devices, [CPU, *GPUS[2::-1]]),
    unchanged(config.set_logical_device_configuration, GPUS[1], [L(1024), L(1024)]),
    unchanged(config.set_memory_growth, GPUS[3], True),
]
facts["other"] = [
    error_of(config.set_visible_devices, GPUS[:2], "GPU"),
    error_of(config.set_visible_devices, [], "GPU"),
    error_of(config.set_logical_device_configuration, GPUS[1], [L(1024)]),
    error_of(config.set_memory_growth, GPUS[3], False),
]
facts["on the gpu"] = error_of(config.get_memory_info, "GPU:0")
facts["said"] = log_lines()
print_facts()
