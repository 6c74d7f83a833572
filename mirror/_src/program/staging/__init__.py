"""Staging: a replica program cut at its exchanges.

The program is made flat first: calls with exchanges inside are opened, a loop or branch with
exchanges inside becomes one step whose own program is cut in turn. Each value then has a level, the
number of steps in which replicas talk that lie behind it. What is computed at one level is a stage;
the exchanges of one level travel together, small ones of one kind in one buffer.
"""
