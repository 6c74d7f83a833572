"""A step whose callback never returns on one replica: `stalled_step.py ACTION SECS`."""

import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

import mirror

mirror.config.set_num_cpu_devices(2)
strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])


def block(replica):
    if replica == 1:
        threading.Event().wait()
    return np.float32(0)


def step(x):
    context = mirror.get_replica_context()
    zero = jax.ShapeDtypeStruct((), jnp.float32)
    x += jax.pure_callback(block, zero, context.replica_id_in_sync_group)
    return context.all_reduce("sum", x)


mirror.debugging.watch(secs=float(sys.argv[2]), action=sys.argv[1])
print("runs", flush=True)
strategy.run(step, (mirror.PerReplica([1.0, 2.0]),))
