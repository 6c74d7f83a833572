"""Whole nodes of Ray are removed while a `Trainer` trains: raylets and all of their processes."""

import pytest

from tests.ps.programs import run_program

pytestmark = [pytest.mark.nightly, pytest.mark.dev("ray")]

PROGRAM = """
import ray
from ray.cluster_utils import Cluster
import mirror
from tests.ps.trained import SMALL, create, fit, require_same
from tests.support.waiting import wait_until

REMOVED = {6: "worker", 120: "ps"}  # by step
EPOCHS = 60  # of 4 steps: the processes of a node end before the training does


class RemoveNodes(mirror.callbacks.Callback):
    def on_step(self, fit):
        job = REMOVED.get(fit.position.step)
        if job is not None:
            cluster.remove_node(nodes[job], allow_graceful=False)


def add(job):
    return cluster.add_node(num_cpus=1, resources={job: 1}, object_store_memory=100_000_000)


if __name__ == "__main__":
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = {job: [add(job), add(job)][1] for job in ("ps", "worker")}
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        with mirror.ps.ParameterServerStrategy(
            ps=2,
            workers=2,
            partitioner=SMALL,
            ps_options={"resources": {"ps": 1}},
            worker_options={"resources": {"worker": 1}},
        ) as strategy:
            calm, trainer = create(strategy), create(strategy)
            fit(calm, epochs=EPOCHS)
            add("ps")  # where the server of the removed node is started again
            fit(trainer, epochs=EPOCHS, callbacks=RemoveNodes())
            require_same(trainer, calm, 0)
            report = strategy.report()
            assert (report.lost_workers, report.lost_servers) == (1, 1), report
            add("worker")
            wait_until(lambda: strategy.report().rejoined_workers, 60)
    finally:
        ray.shutdown()
        cluster.shutdown()
"""


def test_nodes_that_are_removed_change_no_bit(tmp_path):
    run_program(tmp_path, PROGRAM)
