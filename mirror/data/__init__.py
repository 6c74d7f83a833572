"""Data: global batches cut up for the replicas."""
