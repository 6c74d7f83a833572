"""Replacements for the methods of other strategies in a `ParameterServerStrategy`, by name."""

_SCHEDULE = (
    "Steps run on the workers: mirror.ps.ClusterCoordinator(strategy).schedule(step, (model, "
    "optimizer, batch)), or mirror.Trainer(...).fit(data)."
)
_BATCHES = (
    "Pass batches to Trainer.fit or coordinator.schedule, or create a dataset on each worker: "
    "coordinator.create_per_worker_dataset(dataset_fn)."
)
_RESULTS = "Results of scheduled functions are arrays: coordinator.fetch(values)."
_ON_WORKERS = (
    "The devices belong to the workers: strategy.num_workers, strategy.devices_per_worker. In a "
    "scheduled function, mirror.get_strategy() returns the strategy of the worker."
)
_COPIES = (
    "Each variable is on one server, without copies: strategy.report() says where. Compare the "
    "step with one device by trainer.verify(data)."
)

ELSEWHERE = {
    **dict.fromkeys(("run", "experimental_run_v2", "explain", "prepare"), _SCHEDULE),
    **dict.fromkeys(
        (
            "distribute_dataset",
            "distribute_datasets_from_function",
            "distribute_values_from_function",
            "experimental_distribute_dataset",
            "experimental_distribute_datasets_from_function",
            "experimental_distribute_values_from_function",
            "experimental_make_numpy_dataset",
            "make_dataset_iterator",
        ),
        _BATCHES,
    ),
    **dict.fromkeys(("reduce", "gather", "local_results", "experimental_local_results"), _RESULTS),
    **dict.fromkeys(
        ("devices", "local_devices", "local_replica_ids", "cross_device_ops"), _ON_WORKERS
    ),
    **dict.fromkeys(("check_mirrored", "verify", "inspect", "shard_update"), _COPIES),
    "cluster_resolver": "Pass it as the first argument: "
    "mirror.ps.ParameterServerStrategy(resolver).",
    "schedule": "It is a method of mirror.ps.ClusterCoordinator(strategy).",
    "join": "It is a method of mirror.ps.ClusterCoordinator(strategy).",
}
