"""Tables of the names of TensorFlow, Keras and PyTorch, and of what mirror has in their place.

The tables on the pages "Migrating from TensorFlow" and "Migrating from PyTorch" are these tables,
and errors about unknown names quote them. After a change, update the pages with
`python -m tests.support.name_tables --write`.
"""

from typing import NamedTuple


class Table(NamedTuple):
    """A table of a migration page.

    Attributes:
        page: Name of the page.
        library: Header of the first column, such as "`tf.config.`".
        ours: Header of the second column.
        prefix: Prefix of the names in the first column.
        owner: Module whose names they replace, such as "mirror.config".
        rows: The cells of every row. A second cell that starts with a hyphen gives the reason why
            there is no equivalent.
    """

    page: str
    library: str
    ours: str
    prefix: str
    owner: str
    rows: tuple[tuple[str, str], ...]


NO_EQUIVALENT = "- "

DISTRIBUTE = Table(
    "from-tensorflow.md",
    "`tf.distribute.`",
    "mirror",
    "tf.distribute.",
    "mirror",
    (
        (
            "`MirroredStrategy(devices, cross_device_ops)`",
            "`mirror.MirroredStrategy(devices, cross_device_ops, replicas_per_device=1)`",
        ),
        ("`OneDeviceStrategy`", "`mirror.OneDeviceStrategy`"),
        ("`Strategy`", "`mirror.Strategy`"),
        (
            "`StrategyExtended`, `strategy.extended`",
            "- the members that programs need are methods of the strategy",
        ),
        ("`strategy.scope`", "`strategy.scope`"),
        (
            "`strategy.run(fn, args, kwargs, options)`, `strategy.experimental_run_v2`",
            "`strategy.run(fn, args, kwargs)`",
        ),
        ("`RunOptions`", "- everything is compiled, with static shapes"),
        (
            "`strategy.reduce(op, value, axis)`",
            '`strategy.reduce(op, value, axis=None)`, also with `"min"`, `"max"` and `where=`',
        ),
        ("`strategy.gather`", "`strategy.gather`"),
        ("`strategy.experimental_local_results`", "`strategy.local_results`"),
        ("`strategy.experimental_distribute_dataset`", "`strategy.distribute_dataset`"),
        (
            "`strategy.experimental_make_numpy_dataset`, `strategy.make_dataset_iterator`",
            "`strategy.distribute_dataset(mirror.data.from_arrays(arrays, batch_size))`",
        ),
        (
            "`strategy.distribute_datasets_from_function`, "
            "`strategy.experimental_distribute_datasets_from_function`",
            "`strategy.distribute_datasets_from_function`",
        ),
        (
            "`strategy.experimental_distribute_values_from_function`",
            "`strategy.distribute_values_from_function`",
        ),
        ("`strategy.num_replicas_in_sync`", "`strategy.num_replicas_in_sync`"),
        (
            "`strategy.cluster_resolver`",
            "- only `mirror.MultiWorkerMirroredStrategy` has `cluster_resolver`",
        ),
        (
            "`strategy.configure`, `strategy.update_config_proto`",
            "- `mirror.config` sets up the devices before JAX starts",
        ),
        ("`get_strategy`, `has_strategy`", "`mirror.get_strategy`, `mirror.has_strategy`"),
        ("`in_cross_replica_context`", "`mirror.in_cross_replica_context`"),
        ("`experimental_set_strategy`", "- use `with strategy.scope():`"),
        (
            "`get_replica_context`",
            "`mirror.get_replica_context`; raises in cross-replica context",
        ),
        ("`ReplicaContext`", "`mirror.ReplicaContext`"),
        (
            "`replica_context.all_reduce(op, value)`",
            'the same, or `mirror.all_reduce(op, value)`; `"sum"`, `"mean"`, `"min"`, `"max"`',
        ),
        (
            "`replica_context.all_gather(value, axis)`",
            "the same, or `mirror.all_gather(value)`; `axis=0` is the default",
        ),
        (
            "`replica_context.merge_call`",
            "- compute with the result of `all_reduce`",
        ),
        (
            "`replica_context.replica_id_in_sync_group`, `replica_context.num_replicas_in_sync`, "
            "`replica_context.strategy`, `replica_context.devices`",
            "the same",
        ),
        ("`InputContext`", "`mirror.InputContext`"),
        (
            "`InputOptions(experimental_fetch_to_device, ...)`",
            "`prefetch=` of `distribute_dataset`",
        ),
        ("`InputReplicationMode`", "- one pipeline for all replicas"),
        ("`DistributedDataset`", "`mirror.DistributedDataset`, with `element_spec`"),
        ("`DistributedIterator`", "`iter(dataset)`"),
        ("`DistributedValues`", "`mirror.PerReplica`; a mirrored value is a `jax.Array`"),
        ("`experimental.ValueContext`", "`mirror.ValueContext`"),
        ("`ReduceOp.SUM`, `ReduceOp.MEAN`", '`mirror.ReduceOp.SUM`, `"sum"`'),
        (
            "`CrossDeviceOps`",
            "`mirror.CrossDeviceOps`; a subclass defines `reduce_implementation`",
        ),
        ("`NcclAllReduce(num_packs)`", "`mirror.AllReduce(pack_bytes)`"),
        ("`HierarchicalCopyAllReduce`", "`mirror.AllReduce`; XLA chooses the algorithm"),
        (
            "`ReductionToOneDevice(reduce_to_device)`",
            "`mirror.ReductionToOneDevice(device)`",
        ),
        (
            "`experimental.CommunicationOptions(bytes_per_pack)`, `experimental.CollectiveHints`",
            "`mirror.AllReduce(pack_bytes)`",
        ),
        (
            "`experimental.CommunicationImplementation`, `experimental.CollectiveCommunication`",
            "`cross_device_ops=`",
        ),
        (
            "`experimental.PreemptionCheckpointHandler`, `PreemptionWatcher`, `TerminationConfig`",
            "`mirror.callbacks.Checkpoint`, which saves on SIGTERM",
        ),
        (
            "`MultiWorkerMirroredStrategy`, `experimental.MultiWorkerMirroredStrategy`, "
            "`experimental.CollectiveAllReduceStrategy`",
            "`mirror.MultiWorkerMirroredStrategy`",
        ),
        ("`cluster_resolver`", "`mirror.distributed.TFConfigClusterResolver` and others"),
        (
            "`Server`",
            "`mirror.distributed.Server`, for parameter servers",
        ),
        ("`experimental.rpc`", "`mirror.ps.ClusterCoordinator(strategy).schedule(fn, args)`"),
        (
            "`TPUStrategy`, `experimental.TPUStrategy`",
            "- not tested; try `mirror.MirroredStrategy()`",
        ),
        (
            "`ParameterServerStrategy(cluster_resolver, variable_partitioner)`, "
            "`experimental.ParameterServerStrategy`",
            "`mirror.ps.ParameterServerStrategy(cluster, partitioner=)`; TensorFlow's mode is "
            "`staleness=None`",
        ),
        (
            "`experimental.CentralStorageStrategy`",
            "- use `mirror.MirroredStrategy`, or `mirror.ps.ParameterServerStrategy(ps=1)`",
        ),
        (
            "`coordinator`, `coordinator.ClusterCoordinator`, `experimental.coordinator`",
            "`mirror.ps.ClusterCoordinator`; functions need no `tf.function`",
        ),
        (
            "`coordinator.schedule`, `coordinator.join`, `coordinator.done`, `coordinator.fetch`",
            "the methods of `mirror.ps.ClusterCoordinator` with these names",
        ),
        (
            "`coordinator.create_per_worker_dataset`",
            "the method of `mirror.ps.ClusterCoordinator` with this name",
        ),
        ("`coordinator.RemoteValue`", "`mirror.ps.RemoteValue`, with `fetch` and `done`"),
        (
            "`coordinator.PerWorkerValues`, `coordinator.PerWorkerValue`",
            "`mirror.ps.PerWorkerDataset`; pass `iter(dataset)` to scheduled functions",
        ),
        (
            "`coordinator.experimental_get_current_worker_index`",
            "- functions run on any worker",
        ),
        (
            "`experimental.partitioners`, `experimental.partitioners.MinSizePartitioner`",
            "`mirror.ps.MinSizePartitioner(min_shard_bytes, max_shards)`, the default",
        ),
        (
            "`experimental.partitioners.MaxSizePartitioner`",
            "`mirror.ps.MaxSizePartitioner(max_shard_bytes)`",
        ),
        (
            "`experimental.partitioners.FixedShardsPartitioner`, "
            "`experimental.partitioners.Partitioner`",
            "`mirror.ps.FixedShardsPartitioner(num_shards)`, or a function of shape and dtype",
        ),
    ),
)

CONFIG = Table(
    "from-tensorflow.md",
    "`tf.config.`",
    "`mirror.config.`",
    "tf.config.",
    "mirror.config",
    (
        ("`list_physical_devices`, `list_logical_devices`", "the same"),
        ("`PhysicalDevice`, `LogicalDevice`", "the same"),
        ("`set_visible_devices`, `get_visible_devices`", "the same"),
        (
            "`LogicalDeviceConfiguration`, `experimental.VirtualDeviceConfiguration`",
            "`LogicalDeviceConfiguration(memory_limit)`",
        ),
        (
            "`set_logical_device_configuration`, `experimental.set_virtual_device_configuration`",
            "`set_logical_device_configuration`",
        ),
        (
            "`get_logical_device_configuration`, `experimental.get_virtual_device_configuration`",
            "`get_logical_device_configuration`",
        ),
        (
            "`experimental.set_memory_growth`, `experimental.get_memory_growth`",
            "`set_memory_growth`, `get_memory_growth`",
        ),
        (
            "`experimental.get_memory_info`, `experimental.get_memory_usage`",
            '`get_memory_info`: `"current"`, `"peak"`, `"limit"`',
        ),
        ("`experimental.reset_memory_stats`", "- JAX cannot reset the peak"),
        ("`experimental.get_device_details`", "`get_device_details`"),
        ("`experimental`", "the same names without `experimental`"),
        (
            "`set_soft_device_placement`, `get_soft_device_placement`",
            "the same; off by default, and applies to `mirror.device` only",
        ),
        (
            "`run_functions_eagerly`, `functions_run_eagerly`",
            "- wrap a direct call of the step in `with jax.disable_jit():`",
        ),
        ("`optimizer`, `experimental.enable_mlir_bridge`", "- XLA compiles everything"),
        (
            "`experimental.enable_tensor_float_32_execution`",
            '- `jax.config.update("jax_default_matmul_precision", "tensorfloat32")`',
        ),
        ("`experimental.enable_op_determinism`", "- use XLA's flags"),
        ("`threading`", "- the launch guard limits the work on host devices"),
        (
            "`experimental.set_device_policy`, `experimental.set_synchronous_execution`",
            "- JAX copies arrays between devices as needed; `jax.block_until_ready` waits",
        ),
        (
            "`experimental_connect_to_cluster`, `experimental_connect_to_host`, "
            "`experimental.ClusterDeviceFilters`",
            "- `mirror.distributed.initialize` connects the processes",
        ),
    ),
)

OTHER = Table(
    "from-tensorflow.md",
    "TensorFlow, Keras",
    "mirror",
    "",
    "mirror",
    (
        ("`tf.distribute`, `tf.distribute.experimental`", "`mirror`: `mirror.MirroredStrategy`"),
        ("`tf.device`", "`mirror.device`"),
        (
            '`tf.device("/job:ps/task:0")`',
            "`strategy.Variable(3.0)` of a `mirror.ps.ParameterServerStrategy`, which selects the "
            "server",
        ),
        (
            "`tf.compat.v1.train.replica_device_setter`",
            "- `mirror.ps.ParameterServerStrategy` places the variables",
        ),
        (
            "`tf.compat.v1.train.SyncReplicasOptimizer`",
            "`mirror.ps.ParameterServerStrategy(backup_workers=)`",
        ),
        (
            "`tf.debugging.set_log_device_placement`",
            "`mirror.debugging.set_log_device_placement`",
        ),
        ("`tf.add_n`", "`mirror.add_n`"),
        (
            "`tf.Variable`, `tf.VariableSynchronization`, `tf.VariableAggregation`",
            '`mirror.Variable(synchronization="on_read", aggregation="sum")`: strings',
        ),
        ("`variable.read_value`, `variable.value`", "`variable[...]`"),
        ("`variable.numpy`", "`np.asarray(variable[...])`"),
        (
            "`tf.nn.compute_average_loss(losses, global_batch_size=)`",
            '- return per-example losses; in a custom loop, `mirror.all_reduce("mean", loss)`',
        ),
        (
            "`tf.nn.scale_regularization_loss`",
            "- add the regularization loss to the per-example losses",
        ),
        ("`tf.function`", "- `strategy.run` compiles the step"),
        ("`tf.GradientTape`", "`nnx.value_and_grad(loss_fn)(model, batch)`"),
        ("`tf.Module`, `tf.keras.Model`, `tf.keras.layers`", "`flax.nnx.Module`, `flax.nnx`"),
        ("`tf.keras.Sequential`", "`flax.nnx.Sequential`"),
        (
            "`tf.keras.optimizers`, `tf.train.GradientDescentOptimizer`",
            "`nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)`",
        ),
        (
            "`tf.keras.losses`",
            "`optax.losses`, or a name in `mirror.Trainer`",
        ),
        ("`tf.keras.metrics`", "`flax.nnx.metrics`, or metrics per example in `loss_fn`"),
        (
            "`tf.keras`",
            "`mirror.Trainer` with `flax.nnx`, or Keras 3 on JAX",
        ),
        ("`tf.nn`", "`jax.nn` for functions, `flax.nnx` for layers"),
        ("`tf.random`", "`jax.random`; in a step, `replica_context.fold_in(key)`"),
        (
            "`tf.reduce_sum`, `tf.reduce_mean`, `tf.reduce_max`, `tf.reduce_min`",
            '`jnp.sum`; over the replicas, `strategy.reduce("sum", value)`',
        ),
        ("`tf.constant`, `tf.convert_to_tensor`, `tf.Tensor`", "`jnp.asarray`, `jax.Array`"),
        ("`tf.print`", '`jax.debug.print("{}", x)`'),
        ("`tf.cond`, `tf.while_loop`", "`jax.lax.cond`, `jax.lax.while_loop`"),
        ("`tf.data`, `tf.data.Dataset`", "pass it directly, or use `mirror.data.from_arrays`"),
        (
            "`tf.data.experimental.AutoShardPolicy`",
            '`OFF`: `strategy.distribute_dataset(data, input="local")`, for `DATA` with '
            "`mirror.data.from_arrays(..., shard=(index, count))`",
        ),
        ("`tf.train.ClusterSpec`", "`mirror.distributed.ClusterSpec`"),
        (
            "`tf.train.Server`",
            "`mirror.distributed.Server`, for parameter servers",
        ),
        ("`tf.distribute.cluster_resolver`", "`mirror.distributed.TFConfigClusterResolver`"),
        ("`tf.test.is_gpu_available`", '`mirror.config.list_physical_devices("GPU")`'),
        (
            "`model.compile`, `model.fit`, `model.evaluate`, `model.predict`",
            "`mirror.Trainer` with `fit`, `evaluate`, `predict`",
        ),
        (
            "`model.fit` under `tf.distribute.ParameterServerStrategy`",
            "`mirror.Trainer` with an nnx model in `strategy.scope()`, and `fit`",
        ),
        (
            "`tf.keras.utils.experimental.DatasetCreator`",
            "- pass the dataset to `fit`, also with `mirror.ps.ParameterServerStrategy`",
        ),
        ("`compile(steps_per_execution=)`", "`mirror.Trainer(steps_per_execution=)`"),
        (
            '`tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")`',
            '`mirror.Trainer(precision="bfloat16")`',
        ),
        ("`LossScaleOptimizer`", '`mirror.LossScale`, automatic with `precision="float16"`'),
        (
            "`fit(sample_weight=, class_weight=)`",
            "`mirror.Trainer(sample_weight=, class_weight=)`",
        ),
        ("`fit(initial_epoch=, steps_per_epoch=, validation_steps=)`", "the same"),
        ('`History.history["loss"]`', '`history["loss"]`, `mirror.History`'),
        ("`callbacks.Callback`", "`mirror.callbacks.Callback`"),
        (
            "`callbacks.ModelCheckpoint`, `callbacks.BackupAndRestore`",
            "`mirror.callbacks.Checkpoint`, and `trainer.restore`",
        ),
        (
            "`callbacks.EarlyStopping`, `callbacks.CSVLogger`, `callbacks.TensorBoard`",
            "the same name in `mirror.callbacks`",
        ),
        ("`callbacks.TerminateOnNaN`", "`mirror.callbacks.NaNGuard`"),
        ("`callbacks.ProgbarLogger`", "`mirror.callbacks.ProgressBar`"),
        (
            "`callbacks.LearningRateScheduler`",
            "- use an Optax schedule; `mirror.callbacks.LearningRate` logs it",
        ),
        ("`callbacks.ReduceLROnPlateau`", "- use `optax.contrib.reduce_on_plateau`"),
        (
            "`tf.train.Checkpoint`, `tf.train.CheckpointManager`",
            "`trainer.save`, `trainer.restore`, `mirror.load_checkpoint`",
        ),
    ),
)

PYTORCH = Table(
    "from-pytorch.md",
    "PyTorch",
    "mirror",
    "",
    "mirror",
    (
        (
            "`nn.DataParallel(model, device_ids)`",
            "`mirror.DataParallel(model, device_ids)`, with full batches and outputs",
        ),
        ("`DistributedDataParallel`, `DDP`", "`mirror.MirroredStrategy` and `run`"),
        (
            "`FullyShardedDataParallel`, `FSDP`",
            "- each device has a copy of the parameters",
        ),
        ("`ZeroRedundancyOptimizer`", "`mirror.MirroredStrategy(shard_update=True)`"),
        (
            "`torchrun`, `init_process_group`, `destroy_process_group`",
            "- one process drives all devices",
        ),
        ("`get_rank()`", "`replica_context.replica_id_in_sync_group`, in a step"),
        ("`get_world_size()`", "`strategy.num_replicas_in_sync`"),
        (
            "`all_reduce(tensor, op)`",
            '`mirror.all_reduce("sum", tree)`, for a whole pytree',
        ),
        (
            "`all_gather`",
            "`mirror.all_gather`; `strategy.gather` for unequal lengths",
        ),
        ("`broadcast(tensor, src=0)`", "- mirrored values are identical from the start"),
        (
            "`barrier()`, `no_sync()`",
            "- the program defines the collectives; see `mirror.Trainer(accumulate_steps=)`",
        ),
        (
            "`DistributedSampler`, `set_epoch`",
            "`strategy.distribute_dataset(loader)`, with global batches",
        ),
        (
            "`DataLoader`, `TensorDataset`",
            "pass a loader, or use `mirror.data.from_arrays`",
        ),
        ("`Join`, uneven inputs", "- batches of any size are counted exactly"),
        ("`SyncBatchNorm`", "`nnx.BatchNorm(axis_name=mirror.REPLICA_AXIS)`"),
        ("`find_unused_parameters`", "- gradients of unused parameters are zeros"),
        ("`gradient_as_bucket_view`, `bucket_cap_mb`", "`mirror.AllReduce(pack_bytes)`"),
        ("`register_comm_hook`", "a custom `mirror.CrossDeviceOps`"),
        ("`torch.cuda.device(1)`", '`mirror.device("/gpu:1")`'),
        (
            "`torch.cuda.device_count()`",
            '`len(mirror.config.list_physical_devices("GPU"))`',
        ),
        (
            "`torch.cuda.memory_allocated()`, `max_memory_allocated()`",
            '`mirror.config.get_memory_info("GPU:0")`',
        ),
        (
            "`torch.cuda.set_per_process_memory_fraction`",
            "`memory_limit=` of `mirror.config.LogicalDeviceConfiguration`",
        ),
        (
            "`torch.save`, `torch.load(map_location=)`",
            "`trainer.save`, `trainer.restore`; in a loop, Orbax",
        ),
        ("`model.eval()`, `model.train()`", "the same, before `strategy.run`"),
        ("`requires_grad_(False)`", "`mirror.Trainer(wrt=)`"),
        ("`torch.autocast(dtype=torch.bfloat16)`", '`mirror.Trainer(precision="bfloat16")`'),
        ("`torch.amp.GradScaler`", '`mirror.LossScale`, automatic with `precision="float16"`'),
        (
            "`consume_prefix_in_state_dict_if_present`, `module.` in names",
            "- a model is not wrapped",
        ),
    ),
)

TABLES = (DISTRIBUTE, CONFIG, OTHER, PYTORCH)
