"""Staging: a replica program cut at its collectives.

The program is flattened first: calls that contain collectives are inlined, and a loop or branch
that contains collectives becomes one step, whose own program is cut in turn. Each value then has a
level: the number of rounds of communication that it depends on. The operations of one level form a
stage; the collectives of one level run together, small ones of one kind packed into one buffer.
"""
