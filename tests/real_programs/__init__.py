"""Trainings of JAX's ecosystem, written for one replica, each with the same on one device."""
