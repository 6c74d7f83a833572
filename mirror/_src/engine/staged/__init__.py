"""The staged executor: for devices that XLA cannot connect by collectives.

A replica program is split at its collectives. Each stage is one program without collectives, which
runs on a lane: replicas on distinct devices of one type. Every lane launches a stage before the
host waits for a result. The host then reduces the operands of the collectives, each as it arrives,
and broadcasts the results.

Mirrored results are taken from one lane and copied to the other lanes. Programs that are compiled
for different devices round differently, and replicas must not drift apart.
"""
