"""The replica program: a step traced for one replica, and the proof that replicas stay in sync."""
