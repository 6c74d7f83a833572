"""Staging: splits a replica program at its collectives, for devices that XLA cannot connect.

The program is flattened first: calls that contain collectives are inlined, and a loop or branch
that contains collectives becomes one step whose own program is staged in turn. The level of a value
is the number of rounds of communication that it depends on. The computations of one level form a
stage. The collectives of one level run together, with small ones packed into one buffer.
"""
