"""The few handles inside the package that tests need and that have no public way.

All other tests use the public API: `tests/laws/test_structure.py` lists who may look inside. The
docstring of each function says what makes it necessary.
"""

import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

import mirror
from mirror._src.base import (
    clock,
    interrupts,
    keras_library,
    optional,
    supported,
    tracebacks,
    unknown_names,
)
from mirror._src.base.terminal import Table
from mirror._src.cluster import agreement, consensus, resolvers, start, store
from mirror._src.cluster import failures as distributed_failures
from mirror._src.cluster import ledger as distributed_ledger
from mirror._src.data import batches as data_batches
from mirror._src.data import input as data_input
from mirror._src.data import local_input as data_local_input
from mirror._src.data import step_exchange as data_step_exchange
from mirror._src.devices import (
    backend,
    described,
    device_checks,
    eager_work,
    jax_options,
    launch,
    memory,
    op_log,
    physical,
    placement,
    resolve,
    settings,
)
from mirror._src.devices import jax_options as device_state
from mirror._src.devices import launches as launch_records
from mirror._src.devices import resolve as unused_gpu_module
from mirror._src.devices.replicas import ReplicaDevices, stored_axis
from mirror._src.engine import (
    argument_placer,
    choice,
    executor,
    per_replica,
    replica_context,
    runner,
)
from mirror._src.engine import step as engine_step
from mirror._src.engine.nnx.structure import Structure
from mirror._src.inspection import equality, explanation, measurement, stall_report, verify, watch
from mirror._src.inspection import memory as memory_reports
from mirror._src.keras import hooks as keras_hook_module
from mirror._src.keras import step_function as keras_steps
from mirror._src.ps import driver_thread, ray_cluster, server, tethered
from mirror._src.ps.objects import TrainingObjects
from mirror._src.ps.sparse import SparseTables
from mirror._src.ps.variables import ServerVariable
from mirror._src.strategy import mirrored
from mirror._src.strategy import strategy as strategy_base
from mirror._src.strategy.scope import Scope
from mirror._src.tools import asserts, demo, estimate_memory, job, workload
from mirror._src.tools import bench as bench_command
from mirror._src.tools import builtin_steps as cli_builtin_steps
from mirror._src.tools import devices as cli_devices
from mirror._src.tools import launch as cli_launch
from mirror._src.tools import main as cli_main
from mirror._src.tools import options as cli_options
from mirror._src.tools.doctor import check, environment, probes, ray_nodes
from mirror._src.tools.doctor import command as doctor_command
from mirror._src.tools.doctor import distributed as doctor_distributed
from mirror._src.tools.plugin import support as plugin_support
from mirror._src.training import agreed_stop as training_agreed_stop
from mirror._src.training import inputs as training_inputs
from mirror._src.training import losses as training_losses
from mirror._src.training import named_loss as training_labels
from mirror._src.training import objective as training_objective
from mirror._src.training import progress as training_meter
from mirror._src.training import progress as training_position
from mirror._src.training import trainer as training_trainer
from mirror._src.training.checkpoints import files, from_chief
from mirror._src.training.checkpoints import store as checkpoints_store
from tests.support.clocks import FakeClock


def has_started() -> bool:
    """Whether JAX's backend runs: every public question about devices would start it."""
    return backend.started()


def settings_in_words() -> list[tuple[str, str, str]]:
    """The settings in force and their origin, which users see in error messages only."""
    return settings.in_words()


def open_scope() -> object | None:
    """The innermost open scope or replica: `mirror.has_strategy` ignores `mirror.device`."""
    return replica_context.current_frame()


def forget_version_warning() -> None:
    """Makes the next strategy warn about JAX's version again, as in a new process."""
    supported.warn_about_jax.cache_clear()


def launch_guard() -> ModuleType:
    """The module that limits launches on host devices: users cannot see what is in flight."""
    return launch


def lowered_keras_step(model: Any, batch: Any) -> str:
    """The program of a model's training step: Keras shows its results alone."""
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([variable.value for variable in group] for group in groups)
    return model.train_function.compiled.lower(state, batch).as_text()


def messages() -> ModuleType:
    """The module for messages between processes: users send none."""
    return store


def local_input() -> tuple[ModuleType, ...]:
    """Local input, its agreement on steps and batches: public only in jobs of several processes."""
    return data_local_input, data_step_exchange, data_batches


def same_batches(key: str) -> data_input.SameBatches:
    """The comparison of the passes over a dataset, which has this key in all processes."""
    comparison = data_input.SameBatches()
    comparison._key = key
    return comparison


def failures() -> ModuleType:
    """The reports of failed processes: users cannot set their clock."""
    return distributed_failures


def ledger() -> Any:
    """The launches of this process: users cannot tell when they are compared."""
    return distributed_ledger.ledger


def checkpoint_store() -> type:
    """`CheckpointStore`: users save the state of a trainer only, not arrays of their choice."""
    return checkpoints_store.CheckpointStore


def checkpoint_files() -> ModuleType:
    """The module that writes and reads one checkpoint, to fail in the middle of it."""
    return files


def key_data() -> type:
    """`KeyData`, the form of random keys in a checkpoint, which users convert at once."""
    return files.KeyData


def objective() -> ModuleType:
    """The module of the sums of one launch: users see the means of whole epochs."""
    return training_objective


def meter() -> ModuleType:
    """The module that adds these sums: users see the means of whole epochs."""
    return training_meter


def labels() -> ModuleType:
    """The module that checks labels, which users do not pickle."""
    return training_labels


def position() -> ModuleType:
    """The module that counts launches in flight, which users cannot see."""
    return training_position


def agreed_stop() -> ModuleType:
    """The module with which processes agree on the last step, here one after the other."""
    return training_agreed_stop


def loss_tables() -> ModuleType:
    """The module with the names of losses, to test that each one is tested."""
    return training_losses


def guesses(kind: str) -> dict[str, str]:
    """The names of other libraries that errors explain, to test each one."""
    tables = [t for t in unknown_names.name_tables() if t.owner == kind and not t.page]
    cells = [names.split(", ") for table in tables for names, _ in table.rows]
    names = [name.strip("`") for cell in cells for name in cell]
    return {name: unknown_names.advice()[kind, name] for name in names}


def is_users_file(filename: str, library: str | None = None) -> bool:
    """Whether a file is the user's: tests cannot install Python in another folder."""
    with pytest.MonkeyPatch.context() as patch:
        if library is not None:
            directories = (library, *tracebacks._directories()[1:])
            patch.setattr(tracebacks, "_directories", lambda: directories)
        return tracebacks.is_users(filename)


def keras_devices(function: object) -> int:
    """The number of devices of a Keras step that has not run, or 0: users see it when it has."""
    return len(function.owner.replicas) if isinstance(function, keras_steps.StepFunction) else 0


def keras_hooks() -> tuple[ModuleType, ModuleType]:
    """The hooks in Keras, and their names of Keras: a release that moves one must fail by name."""
    return keras_hook_module, keras_library


def keras_step() -> ModuleType:
    """The launches and batches of Keras steps, to see which compile, and as on accelerators."""
    return keras_steps


def replica_devices() -> type[ReplicaDevices]:
    """The class that copies values to devices: users see only how long it takes."""
    return ReplicaDevices


def server_scope(name: str, strategy: mirror.Strategy) -> Scope[str]:
    """The scope of parameter servers: publicly, it needs a cluster of Ray."""
    return Scope(name, strategy._replicas, strategy)


def connection_to_ray() -> ray_cluster.Connection:
    """A connection to a cluster of Ray on this machine: publicly, a strategy ends it again."""
    return ray_cluster.Connection(None)


def servers_and_workers(strategy: object) -> dict[str, list[int]]:
    """The processes of a `ParameterServerStrategy`: to kill one, as a machine that fails does."""
    ray, engine = ray_cluster.import_ray(), strategy._engine
    actors = {"servers": engine._servers, "workers": engine._workers}
    return {  # after restarts that are due
        job: ray.get(
            [
                each.__ray_call__.options(max_task_retries=-1).remote(lambda _: os.getpid())
                for each in handles
            ]
        )
        for job, handles in actors.items()
    }


def waits_for_ray() -> tuple[ModuleType, ModuleType]:
    """The modules that wait for processes and for nodes: users cannot set their clocks."""
    return driver_thread, ray_cluster


def server_variable(name: str, variables: Any) -> ServerVariable:
    """A variable without a cluster of Ray, which it needs publicly."""
    return ServerVariable(name, variables)


def require_tables(sparse: dict[str, Any], model: Any, optimizer: Any) -> None:
    """Checks the argument `sparse` for a model: publicly, it needs a cluster of Ray."""
    objects = TrainingObjects(model, optimizer)
    SparseTables(sparse).require_in(objects.leaves, objects.tables)


def replacements() -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """The methods of other strategies and their replacements: users see one by its error."""
    starts = ("Instead of ", "There is no equivalent of ")  # not guesses
    advice = unknown_names.advice()
    instead = {name: text for (owner, name), text in advice.items() if owner == "parameter servers"}
    return instead, {k: v for k, v in advice.items() if v.startswith(starts)}


def nodes() -> tuple[ModuleType, ...]:
    """The nodes of a cluster with parameter servers: publicly, they need one process each."""
    return server, tethered


def count_calls(
    module: object, name: str, patch: pytest.MonkeyPatch, results: list[object] | None = None
) -> list[object]:
    """Fills a list with the results of a function that users cannot observe."""
    results = [] if results is None else results
    call: Callable[..., object] = getattr(module, name)

    def counted(*arguments: object, **options: object) -> object:
        result = call(*arguments, **options)
        results.append(result)
        return result

    patch.setattr(module, name, counted)
    return results


@contextmanager
def devices_of_other_bits() -> Iterator[None]:
    """Lets each device compute other values than the first, as damaged hardware does."""
    computed = device_checks.computed

    def differs(x):
        return computed(x) * (1 + 1e-7 * jax.lax.axis_index("devices"))

    device_checks.digest_of.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_checks, "computed", differs)
        yield
    device_checks.digest_of.cache_clear()


@contextmanager
def pretended_types(types: Iterable[str]) -> Iterator[None]:
    """Makes the first host devices look like devices of other types, which tests do not have."""
    devices = jax.devices("cpu")
    types_by_device = dict(zip(devices, types, strict=False))

    def type_of(device):
        return types_by_device.get(device, "CPU")

    def devices_of_type(wanted):
        return tuple(device for device in devices if type_of(device) == wanted)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("devices.backend", "devices.replicas", "devices.device_checks"):
            patch.setattr(f"mirror._src.{module}.type_of", type_of)
        patch.setattr("mirror._src.engine.all_reduce.type_of", type_of)
        patch.setattr(backend, "devices_of_type", devices_of_type)
        device_checks.digest_of.cache_clear()
        yield
    device_checks.digest_of.cache_clear()


def programs(strategy: mirror.Strategy) -> list[Any]:
    """The compiled programs of a strategy: users see only that a call is slow."""
    found = (p for step in strategy._runner._steps._steps.values() for p in step.programs.values())
    return list({id(program): program for program in found}.values())


def lowered(strategy: mirror.Strategy, step: Callable[..., Any], args: Any) -> Any:
    """The program of a step before XLA compiles it: reports do not show XLA's text."""
    return strategy._runner.lower(step, args, {})


def num_all_reduces(strategy: mirror.Strategy, step: Callable[..., Any], args: Any) -> int:
    """The number of buffers that XLA reduces: reports omit what `run` merges after the step."""
    text = lowered(strategy, step, args).compile().as_text()
    operands = re.findall(r" all-reduce(?:-start)?\(([^)]*)\)", text)
    return sum(each.count("%") for each in operands)


def count_launches(patch: pytest.MonkeyPatch) -> list[object]:
    """Fills a list with an element per launch, whose order with other events users cannot see."""
    return count_calls(executor, "launch", patch)


def count_all_launches(patch: pytest.MonkeyPatch) -> list[object]:
    """Fills a list at the start of each launch, also of those that no step makes."""
    return count_calls(eager_work, "Uncounted", patch)


@contextmanager
def repeated_devices(devices: Iterable[jax.Device]) -> Iterator[None]:
    """Makes these the devices by default: a GPU in several parts, which tests do not have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "default_devices", lambda: tuple(devices))
        yield


@contextmanager
def all_reduce_that(
    fault: str | None, stuck: Iterable[jax.Device] = ()
) -> Iterator[list[tuple[jax.Device, ...]]]:
    """Gives the all-reduce across GPUs a fault that no test can cause; yields what is checked."""
    checked: list[tuple[jax.Device, ...]] = []

    def find(devices: tuple[jax.Device, ...], deadline_secs: float) -> str | None:
        assert 0 < deadline_secs < 40
        checked.append(devices)
        return fault

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "all_reduce_fault", find)
        patch.setattr(choice, "unresponsive_devices", lambda devices: tuple(stuck))
        yield checked


def limit_programs(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lets a strategy keep few programs: hundreds would take a minute to compile."""
    monkeypatch.setattr(engine_step, "_MAX_PROGRAMS", number)


@contextmanager
def when_programs_are_found(strategy: mirror.Strategy, call: Callable[[], None]) -> Iterator[None]:
    """Calls a function when a strategy has looked for a program to run: users see none."""
    runner = strategy._runner
    find = runner._find

    def find_and_call(*arguments: Any, **options: Any) -> Any:
        program = find(*arguments, **options)
        call()
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_find", find_and_call)
        yield


def count_address_checks(patch: pytest.MonkeyPatch) -> list[object]:
    """Fills a list with an element per array whose address is read: users only see calls wait."""
    return count_calls(argument_placer, "buffers_of", patch)


def stop_logging_launches(patch: pytest.MonkeyPatch) -> None:
    """Stops the log of the pytest plugin, which runs Python code at each launch."""
    patch.setattr(launch_records, "log", None)


def launches() -> ModuleType:
    """The records of launches that have not ended: users see reports about them only."""
    return launch_records


def watch_module() -> ModuleType:
    """The module of `mirror.debugging.watch`: it ends processes, which a test replaces."""
    return watch


def peers_module() -> ModuleType:
    """The posts of the processes of a job, which a test of one process writes itself."""
    return stall_report


def trainer_module() -> ModuleType:
    """The module that starts the watch of a trainer: users cannot count its watches."""
    return training_trainer


def expect_batches(number: int, patch: pytest.MonkeyPatch) -> None:
    """Makes a pass of this many batches suspiciously long: 10,000 take seconds."""
    patch.setattr(training_inputs, "_MANY_BATCHES", number)


def use_clock(fake: FakeClock, patch: pytest.MonkeyPatch) -> None:
    """Replaces the clock of the package: users cannot make minutes pass."""
    patch.setattr(clock, "now", fake.now)
    patch.setattr(clock, "wait", fake.wait)


def asserts_and_support() -> tuple[ModuleType, ModuleType]:
    """The modules of `mirror.testing` and of the plugin, whose executors no option names."""
    return asserts, plugin_support


def structure_of_nnx() -> type:
    """The class that splits nnx objects: users cannot count how often they are split."""
    return Structure


def relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """The measure of `verify`, which reports its maximum over a model only."""
    return verify.relative_difference(a, b)


def table() -> type:
    """The tables of reports, which users only see filled."""
    return Table


def commands() -> ModuleType:
    """The module that starts the commands, to replace them."""
    return cli_main


def command_tables() -> dict[str, Any]:
    """The texts and options of the commands: their tests loop over them."""
    return cli_options.read_commands()


def launcher() -> tuple[ModuleType, type[Exception]]:
    """What `mirror launch` decides, and its error.

    Most of its rows are environments with GPUs, which the machine of the tests need not have.
    """
    return cli_launch, cli_options.OptionError


def starter() -> ModuleType:
    """What starts the processes of `mirror launch` and of the plugin, for processes of tests."""
    return job


def optional_packages() -> ModuleType:
    """The install commands, which change when the package is published."""
    return optional


def consensus_of_processes() -> ModuleType:
    """How processes decide: stand-ins of processes in one process need its time and its keys."""
    return consensus


def start_of_job() -> ModuleType:
    """How a process joins a job, and what it says first: a user has one process at a time."""
    return start


def connect(replicas: Any) -> None:
    """Opens the connections of a strategy's devices, which do not fail on one machine."""
    mirrored._connect(replicas)


def forget_placement_warnings() -> None:
    """Makes soft placement warn about each name again, as in a new process."""
    placement._warn_substituted.cache_clear()


def unlist_gpus() -> None:
    """Makes a driver exist whose GPUs no package lists, which no test can install."""
    physical._DRIVERS = ("/",)


def next_agreement() -> int:
    """The number of the next agreement of processes on a program: users see only that they wait."""
    return agreement._topic.number


def checkpoint_of_chief() -> ModuleType:
    """The module that sends a checkpoint to other processes, whose sizes and limits are fixed."""
    return from_chief


def name_of(device: jax.Device) -> str:
    """The name of a device of any process: `mirror.config` lists those of its own process only."""
    return backend.logical_name(device)


def on_replicas(value: mirror.PerReplica, strategy: mirror.Strategy) -> mirror.PerReplica:
    """A value placed on the devices of a strategy: publicly, a step or a dataset places it."""
    return per_replica.on_replicas(value, strategy._replicas)


def name_tables() -> list[unknown_names.NameTable]:
    """The tables of names of other libraries, to compare the pages of the documentation."""
    return [table for table in unknown_names.name_tables() if table.page]


def plant_bug(call: Callable[[], object], filename: str, patch: pytest.MonkeyPatch) -> None:
    """Makes `Strategy.run` call a function of a test as its own: the package has no bug to show."""
    patch.setattr(runner.Runner, "run", lambda *_: call())
    patch.setattr(tracebacks, "is_own", lambda name: name == filename)


def inventory() -> ModuleType:
    """The module of `mirror devices`, to show it devices and settings that tests do not have."""
    return cli_devices


def bench() -> tuple[ModuleType, ModuleType]:
    """The modules of `mirror bench`, to give it devices, times and results that vary by machine."""
    return bench_command, workload


def builtin_step(name: str, strategy: mirror.Strategy, batch_size: int) -> tuple[Any, Any]:
    """A step of `mirror bench` and its arguments, to verify it: users see its times only."""
    return cli_builtin_steps.make_builtin_step(name, strategy, batch_size)


def quartiles(secs: list[float]) -> tuple[float, float]:
    """The quartiles of times, which users see of times that vary."""
    return measurement.quartiles(secs)


def demo_run() -> ModuleType:
    """The results of `mirror demo`, which always passes; it needs the extra `demo`."""
    importlib.import_module("sklearn.datasets")  # it sets environment variables
    return demo


def deferred_interrupts() -> ModuleType:
    """The module that defers Ctrl-C, to press it at a chosen point."""
    return interrupts


def doctor() -> tuple[ModuleType, ...]:
    """The checks of `mirror doctor`, for faults that tests cannot cause, such as a crash."""
    return check, doctor_command, environment, probes


def doctor_of_jobs() -> ModuleType:
    """The checks of `mirror doctor --distributed`, for hosts and processes with faults."""
    return doctor_distributed


def doctor_of_ray() -> tuple[ModuleType, ModuleType]:
    """The checks of `mirror doctor` in a cluster of Ray, and the names of its resources."""
    return ray_nodes, server


def versions() -> ModuleType:
    """The supported versions, which tests cannot change."""
    return supported


def unused_gpus() -> ModuleType:
    """The comparison of JAX's GPUs with those of the driver: tests have neither."""
    return unused_gpu_module


def drivers() -> ModuleType:
    """The GPUs that drivers list, which tests do not have."""
    return physical


def members() -> ModuleType:
    """The places of processes in a job, which resolvers find for users."""
    return resolvers


def gpu_settings() -> tuple[ModuleType, ModuleType, ModuleType]:
    """GPUs as drivers, JAX and settings have them, for GPUs in several parts and hidden ones."""
    return physical, backend, device_state


def default_devices() -> tuple[jax.Device, ...]:
    """The devices of a strategy by default, with a GPU in several parts, which it rejects."""
    return resolve.canonicalize_replica_devices(None)


def replica_devices_of(names: list[str]) -> tuple[jax.Device, ...]:
    """The devices with these names, with a GPU in several parts, which a strategy rejects."""
    return resolve.canonicalize_replica_devices(names)


def jax_options_module() -> ModuleType:
    """The options of JAX that settings change, for releases that rename one."""
    return jax_options


def memory_info(stats: dict[str, int]) -> dict[str, int] | None:
    """The memory of a device by its statistics, which CPUs do not have."""
    return memory.memory_info(stats)


def host_devices_of_flags() -> int | None:
    """The number of host devices in `XLA_FLAGS`, which JAX reads once per process."""
    return jax_options.host_devices_of_flags()


def eager_guard() -> ModuleType:
    """The module that limits eager work on host devices: users cannot see what is in flight."""
    return eager_work


def count_eager_bounds(patch: pytest.MonkeyPatch) -> list[object]:
    """Fills a list with an element per start of that limit, which users cannot see."""
    return count_calls(executor, "bound_eager_work", patch)


def launch_log() -> ModuleType:
    """The log of executed operations: users cannot see whether it is off in a thread."""
    return op_log


def explanations() -> tuple[ModuleType, ...]:
    """The parts of `strategy.explain`, which adds measured times: these vary by machine."""
    return explanation, memory_reports, measurement


def memory_estimates() -> tuple[ModuleType, ...]:
    """The parts of `mirror estimate-memory`, to compare arrays that users see as a sum only."""
    return estimate_memory, memory_reports, workload


def described_gpus(name: str, count: int, hosts: int = 1) -> tuple[jax.Device, ...]:
    """GPUs that exist only to compile for; users see the memory of their programs only."""
    return described.described_gpus(name, count, hosts)


def gpu_models() -> Iterable[str]:
    """The names of the GPUs that mirror describes, to compare the help and the pages."""
    return described.gpu_models()


def install_gpu_compiler(versions: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    """Makes these versions of JAX's CUDA plugin installed, which tests cannot change."""
    installed = {"jaxlib": described.version_of("jaxlib"), **versions}
    patch.setattr(described, "version_of", installed.get)


def compiled_step(
    strategy: mirror.Strategy,
    make: Callable[[mirror.Strategy], Any],
    donate_argnums: tuple[int, ...] = (),
) -> jax.stages.Compiled:
    """The program of a step for devices that only compile, made as for `mirror estimate-memory`."""
    step, args = estimate_memory.without_arrays(
        "the step", lambda each: workload._custom("the step", make, each, False), strategy
    )
    examined = strategy._runner.examined_without_arrays(step, args, donate_argnums)
    assert examined.lowered is not None, "the step runs as one program"
    return examined.lowered.compile()


def slice_arrays_from(num_bytes: int, patch: pytest.MonkeyPatch) -> None:
    """Lets `shard="model"` store arrays of this size in slices, for small tests."""
    patch.setattr(choice, "SLICE_BYTES", num_bytes)


def axis_in_slices(shape: Sequence[int], num_devices: int) -> int | None:
    """Returns the axis along which `shard="model"` stores a float32 array of this shape."""
    type_ = jax.ShapeDtypeStruct(tuple(shape), np.float32)
    return stored_axis(type_, num_devices, choice.SLICE_BYTES)


def strategy_in_slices(devices: Sequence[jax.Device], **options: Any) -> mirror.MirroredStrategy:
    """Returns a strategy that stores arrays of any size in slices."""
    with pytest.MonkeyPatch.context() as patch:
        slice_arrays_from(1, patch)
        return mirror.MirroredStrategy(devices, **{"shard": "model", **options})


def give_host_memory(num_bytes: int | None, patch: pytest.MonkeyPatch) -> None:
    """Makes the machine have this much memory, for `shard="auto"` and checkpoints."""
    for module in (choice, checkpoints_store):
        patch.setattr(module, "host_memory", lambda: num_bytes)


def forget_strategies() -> None:
    """Forgets the strategies of other tests, about which a lone `Trainer` would be warned."""
    strategy_base.strategies.clear()


def forget_eager_work() -> None:
    """Releases results of eager ops, which the launch guard keeps until a later eager op."""
    eager_work.forget_finished()


def checkpoint_state(trainer: mirror.Trainer[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays and the position of a checkpoint, which users see in a file only."""
    return trainer._checkpoint_state()


def lowered_text(trainer: mirror.Trainer[Any]) -> str:
    """The program of the last step, which the callbacks write to a file."""
    return trainer._lowered_text()


def traced(strategy: mirror.Strategy, step: Callable[..., Any], args: Any) -> Any:
    """The trace of a step: reports describe it, and the passes rewrite it."""
    return strategy._runner.traced(step, args, {})[1]


def memory_of_step(trainer: mirror.Trainer[Any], data: Any) -> int:
    """Returns the estimated bytes per device of a step, which only reports for users show."""
    source = trainer.strategy.distribute_dataset([data], remainder="pad", prefetch=0)
    runner = trainer._runner
    return runner.memory(next(iter(source.padded(multiple=runner.multiple)))).peak_bytes


def break_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the guess behind a warning raise: no step is known that does, and each must run."""

    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(equality, "guess", fail)


def is_suspected(strategy: mirror.Strategy, step: Any, args: Sequence[Any]) -> bool:
    """Whether a step seems to differ from one device: `run` only warns if that is proved."""
    call, analysis = strategy._runner.analyzed(step, tuple(args), {})
    state = equality._state(call, analysis)
    guessed = equality._guessed(call, analysis, strategy.num_replicas_in_sync)
    assert state
    return any(guessed[k].is_different for k in state)
