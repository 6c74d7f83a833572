"""Executors: who runs a replica program, and the guard at the gate."""
