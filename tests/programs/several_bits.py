"""Trains a model with eight replicas in one process of several; prints the hash of its weights."""

import mirror

mirror.config.set_num_cpu_threads(8)
mirror.distributed.initialize()  # before the imports, which create arrays

from tests.programs import same_bits  # noqa: E402


def strategy_of(replicas):
    return mirror.MultiWorkerMirroredStrategy(replicas=replicas)


found = same_bits.digest(same_bits.model("nnx-MLP", strategy_of, 3))
print("bits:", found, flush=True)
