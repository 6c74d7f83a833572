"""The pass `order`: the replicas of a device run in turn, and sums have one order.

It follows `staging`, which has split the program at its collectives. Results have the same bits on
any number of devices. `tests/laws/test_bits.py` holds this.
"""
