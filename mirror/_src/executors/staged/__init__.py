"""The staged executor: devices that no collective of their own connects.

A replica program is cut at its collectives. Each stage is one program without collectives over all
devices that can run it together, a lane: of one type, with one set of shapes. It is launched on
every lane before the host waits for anything; then the collectives are reduced on the host, each
replica's operand as it arrives, and broadcast back.

Mirrored results are those of one lane, copied to the others: programs compiled for other shapes or
another device round differently, and replicas must not drift apart.
"""
