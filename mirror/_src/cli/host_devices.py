"""Host devices for a command: forced where there is no GPU, unless the user has said how many."""

import jax

from mirror._src.devices.startup import HOST_DEVICES_FLAG, forced_host_devices


def force_host_devices(count: int) -> str | None:
    """Forces host devices; returns who else has fixed their number, `None` where nobody had.

    With GPUs it changes nothing that matters: they stay the default devices. So there is no need
    to know whether there are any, which only the backend knows, after whose start nothing can be
    forced.
    """
    known = jax.config.values["jax_num_cpu_devices"]
    if known >= 0:  # it wins over XLA_FLAGS
        return f"JAX_NUM_CPU_DEVICES={known}"
    forced = forced_host_devices()
    if forced is not None:
        return f"XLA_FLAGS={HOST_DEVICES_FLAG}={forced}"
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return "JAX's backend, which had started before,"
    return None
