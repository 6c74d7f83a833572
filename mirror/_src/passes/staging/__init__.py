"""The pass `staging`: splits a program at its collectives.

The host runs it on devices that XLA cannot connect, and a device with several replicas all of them,
stage by stage.

It follows the other passes: calls that contain collectives are inlined, and small collectives are
packed. A loop or branch that contains collectives becomes one step whose own program is staged in
turn. The level of a value is the number of rounds of communication that it depends on. The
computations of one level form a stage. The collectives of one level run together.
"""
