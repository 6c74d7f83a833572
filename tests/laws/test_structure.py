"""The structure of the package: layered imports, one owner per JAX primitive, public names."""

import ast
import importlib
import inspect
import json
import operator
import os
import pickle
import re
import sys

import pytest

import mirror
from mirror._src.base.public_names import NAMES_OF_PS
from tests.support import fresh, import_graph, own_code
from tests.support.import_graph import FOLDERS, Size, folder_of, imports_of, modules, size_of
from tests.support.messages import raises
from tests.support.tables import rows

FACES = ["", "callbacks", "config", "data", "debugging", "distributed", "ps", "testing"]
ENTRY_POINTS = ["cli", "pytest_plugin"]

OWNERS = {
    "jax.pmap": "engine.mapping",
    "jax.device_put": ("devices.replicas", "devices.transfer"),
    "jax.devices": "devices.backend",
    "jax.local_devices": "devices.backend",
    "jax.make_jaxpr": "jaxprs.trace",
    # In steps, and in the executors that replace them.
    "jax.lax.psum": (
        "engine.in_step",
        "passes.collective_rules",
        "passes.order",
        "passes.slices",
        "passes.on_device",
    ),
    "jax.lax.pmean": "engine.in_step",
    "jax.lax.psum_scatter": ("passes.evaluate", "passes.order"),
    "jax.lax.all_gather": (
        "engine.in_step",
        "passes.collective_rules",
        "passes.evaluate",
        "passes.order",
        "passes.on_device",
    ),
}


def exported_by(tree: ast.Module) -> set[str | None]:
    """Returns the names that a public module exports."""
    lazy = [n for node in tree.body if isinstance(node, ast.If) for n in node.body]
    imports = [n for n in [*tree.body, *lazy] if isinstance(n, ast.ImportFrom)]
    names = {a.asname for n in imports for a in n.names}
    return {name for name in names if name == "__version__" or not (name or "_").startswith("_")}


def test_imports_go_down(subtests):
    for name in [n for n in modules() if folder_of(n)]:
        with subtests.test(msg=name):
            floor = FOLDERS.index(folder_of(name))
            others = imports_of(modules()[name])
            above = [m for m in others if folder_of(m) and FOLDERS.index(folder_of(m)) > floor]
            assert not above, f"mirror.{name} imports {above}, which stand above it"
            faces = {m for m in others if not folder_of(m)} - {"_version"}
            assert not faces or folder_of(name) == "tools", f"mirror.{name} imports {faces}"


def test_imports_have_no_cycles():
    trees = {name: tree for name, tree in modules().items() if folder_of(name)}
    graph = {name: imports_of(tree, at_run_time=True) - {name} for name, tree in trees.items()}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph


# Upper limits. Lower one when its room shrinks; raising one takes a line in the changelog.
BUDGETS = {
    "base": Size(1117, 14, 13),
    "devices": Size(2063, 17, 26),
    "cluster": Size(1189, 7, 20),
    "jaxprs": Size(3328, 16, 30),
    "passes": Size(2703, 16, 33),
    "engine": Size(5363, 31, 64),
    "inspection": Size(2173, 10, 24),
    "data": Size(1411, 10, 25),
    "keras": Size(500, 5, 5),
    "strategy": Size(947, 6, 9),
    "training": Size(6019, 32, 64),
    "ps": Size(3630, 20, 67),
    "tools": Size(2950, 24, 27),
}


def test_rooms_are_within_their_budgets(subtests):
    assert list(BUDGETS) == FOLDERS
    for room, budget in BUDGETS.items():
        with subtests.test(msg=room):
            size = size_of(room)
            assert all(map(operator.le, size, budget)), f"{size} of {budget}"
            # Otherwise the room could grow again without a word.
            assert size.code_lines > 0.9 * budget.code_lines, f"lower the budget to {size}"


def test_code_map_shows_the_imports_between_folders():
    _, shown, _ = import_graph.parts_of_map()
    assert shown == import_graph.diagram(), "run python -m tests.support.import_graph --write"


def test_public_modules_only_re_export(subtests):
    assert {n for n in modules() if not n.startswith("_")} == {*FACES, *ENTRY_POINTS}
    for name in [*FACES, *ENTRY_POINTS, "_public"]:
        with subtests.test(msg=name):
            tree = modules()[name]
            rest = [n for n in tree.body if not isinstance(n, ast.ImportFrom | ast.Expr | ast.If)]
            listing = ["__dir__"] if name == "debugging" else []
            assert [n.name for n in rest] == listing, "only re-exports"


def test_names_that_are_imported_when_used_are_seen_by_type_checkers():
    (lazy,) = [n for n in modules()[""].body if isinstance(n, ast.If)]
    assert ast.unparse(lazy.test) == "_TYPE_CHECKING"
    *faces, names = [(node.module, alias.name) for node in lazy.body for alias in node.names]
    assert faces == [("mirror", face) for face in FACES if face]
    assert names == ("mirror._public", "*")
    assert mirror.ps is importlib.import_module("mirror.ps")


def test_star_imports_the_public_names():
    names: dict[str, object] = {}
    exec("from mirror import *", names)
    assert names.keys() - {"__builtins__"} == set(PUBLIC) - {"ps"}


def test_names_are_found_by_pickle_before_the_first_use():
    code = f"""
        import pickle, sys, mirror
        assert "jax" not in sys.modules
        assert pickle.loads({pickle.dumps(mirror.ReduceOp.MEAN)!r}) is mirror.ReduceOp.MEAN
    """
    fresh.run(code)


LIBRARIES = """
    aim fsspec gcsfs grain jax2onnx keras metrax mlflow onnxruntime platformdirs ray s3fs
    tensorboardX tensorflow torch torchdata trackio upath wandb
"""


@pytest.mark.slow
def test_libraries_are_imported_when_they_are_used(tmp_path):
    """Not by names of mirror, nor by a training with local files."""
    code = f"""
        import sys
        import numpy as np, optax
        from flax import nnx
        import mirror

        names = [getattr(module, name) for module in (mirror, mirror.callbacks, mirror.debugging)
                 for name in dir(module) if name != "ps"]
        x = np.ones((4, 3), "float32")
        trainer = mirror.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), "mse")
        log = mirror.callbacks.CSVLogger({str(tmp_path / "log.csv")!r})
        files = mirror.callbacks.Checkpoint({str(tmp_path)!r}), log
        added = mirror.callbacks.Throughput(), mirror.callbacks.LearningRate(lambda step: 0.1)
        trainer.fit((x, x[:, :1]), batch_size=4, callbacks=[*files, *added])
        trainer.restore({str(tmp_path)!r})
        found = {{*{LIBRARIES.split()!r}}} & sys.modules.keys()
        assert not found, found
    """
    fresh.run(code)


# What runs in a new process, and the modules of `mirror` that it imports, without those before it.
LIGHT = {
    "import mirror": "_src _src.base _src.base.public_names _version",
    "mirror --help": """
        _src.base.interrupts _src.base.optional _src.tools _src.tools.main _src.tools.options
    """,
    "mirror launch nothing.py": """
        _src.base.compile_cache _src.devices _src.devices.names
        _src.devices.physical _src.tools.die_with_parent _src.tools.job _src.tools.launch
    """,
}
PLUGIN = """
    pytest_plugin _src.tools _src.tools.die_with_parent _src.tools.job _src.tools.plugin
    _src.tools.plugin.marks _src.tools.plugin.member _src.tools.plugin.processes
    _src.tools.plugin.timeout
"""
SHOWN = """
import os, runpy, sys
def show(status):
    names = [name for name in sys.modules if name.partition(".")[0] in ("mirror", "jax", "numpy")]
    print("\\n", *sorted(names), flush=True)
    ends(0)
ends, os._exit = os._exit, show
"""


def imported_by(code: str, **environment: str) -> set[str]:
    """Returns the modules of `mirror`, JAX and NumPy that a process has at its end."""
    said = fresh.run(f"{SHOWN}\n{code}\nshow(0)", environment=environment)
    return {name.removeprefix("mirror.") for name in said.splitlines()[-1].split()} - {"mirror"}


def test_modules_that_start_without_jax(subtests):
    run = "try: runpy.run_module('mirror', run_name='__main__')\nexcept SystemExit: pass"
    expected: set[str] = set()
    for line, more in LIGHT.items():
        expected |= set(more.split())
        with subtests.test(msg=line):
            code = line if line == "import mirror" else f"sys.argv = {line.split()}\n{run}"
            assert imported_by(code) == expected
    with subtests.test(msg="completion"):
        pytest.importorskip("argcomplete", reason="needs the extra completion")
        shell = {"_ARGCOMPLETE": "1", "COMP_LINE": "mirror de", "COMP_POINT": "9"}
        more = {"_ARGCOMPLETE_IFS": " ", "_ARGCOMPLETE_STDOUT_FILENAME": os.devnull}
        code = f"sys.argv = ['mirror']\n{run}\nassert False, 'no completion'"
        wanted = set(f"{LIGHT['import mirror']} {LIGHT['mirror --help']}".split())
        assert imported_by(code, **shell, **more) == wanted


def test_plugin_starts_without_jax(tmp_path):
    (tmp_path / "test_it.py").write_text("def test(): pass")
    options = ["-q", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "mirror.pytest_plugin"]
    code = f"import pytest; assert pytest.main({[*options, str(tmp_path)]}) == 0"
    expected = set(f"{LIGHT['import mirror']} {PLUGIN}".split())
    modules_of = imported_by(code, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="")
    assert modules_of == expected


def test_names_of_parameter_servers_are_in_their_module_only(subtests):
    """`from mirror import *` must not shadow other names, such as asyncio's CancelledError."""
    assert sorted(NAMES_OF_PS) == sorted(MODULES["ps"].split())
    for name in NAMES_OF_PS:
        with subtests.test(msg=name):
            assert not hasattr(mirror, name)
            assert name not in dir(mirror)
            with raises(AttributeError, names=name, fix=f"mirror.ps.{name}"):
                getattr(mirror, name)
            with raises(ImportError, names=name, fix=f"mirror.ps.{name}"):
                exec(f"from mirror import {name}", {})


def test_tests_do_not_import_test_modules():
    """Helpers that several test modules share are in `tests/support`."""
    for path, tree in own_code.modules():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            wrong = [name for name in names if re.match(r"tests\.(\w+\.)*test_", name)]
            assert not wrong, f"{path}:{node.lineno} imports {wrong}"


def test_primitives_have_one_owner(subtests):
    users: dict[str, set[str]] = {primitive: set() for primitive in OWNERS}
    last = {primitive.rpartition(".")[2] for primitive in OWNERS}
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in last:
                users.get(ast.unparse(node), set()).add(name.removeprefix("_src."))
    for primitive, owners in OWNERS.items():
        with subtests.test(msg=primitive):
            assert users[primitive] <= ({owners} if isinstance(owners, str) else set(owners))


# JAX has no public equivalent; the module names the versions, and a test fails when it is removed.
PRIVATE = {
    ("_src.devices.eager_work", "jax._src"),
    ("_src.cluster.store", "jax._src"),
}


def test_only_public_modules_of_jax_and_flax_are_imported():
    for name, tree in modules().items():
        for node in ast.walk(tree):
            target = getattr(node, "module", None) or ""
            allowed = (name, target) in PRIVATE or target.startswith("mirror._src")
            assert allowed or "._src" not in target, f"mirror.{name} imports {target}"


NAMES = """
AllReduce CrossDeviceOps DataParallel DistributedDataset EqualityReport Explanation History
InputContext InvalidDeviceError LossScale Metric MirroredStrategy MultiWorkerMirroredStrategy
OneDeviceStrategy PerReplica ProgramMismatchError ProgramReport REPLICA_AXIS ReduceOp
ReductionToOneDevice ReplicaContext ReplicaDivergenceError StalledError Strategy Trainer
ValueContext Variable VerifyError VerifyReport Weighted add_n all_gather all_reduce callbacks config
data debugging device distributed ensure_mirrored example_keys example_mask get_replica_context
get_strategy has_strategy in_cross_replica_context load_checkpoint per_replica_on_purpose
ps testing
"""
PUBLIC = NAMES.split()


def test_host_values_are_not_exchanged_by_jax():
    """Its functions for several processes are collectives outside the launch guard."""
    for name, tree in modules().items():
        assert "multihost_utils" not in ast.unparse(tree), name


def test_host_values_are_placed_on_all_devices_in_one_process_only():
    """`jax.device_put` to devices of several processes compares the values of all by a collective.

    So a function that puts an array on anything but one device first leaves, or fails, if there are
    several processes.
    """
    found = {}
    for name, tree in modules().items():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "jax.device_put":
                    target = ast.unparse(call.args[1])
                    if target != "device":
                        found[f"{name}.{function.name}: {target}"] = (function, call)
    assert len(found) > 5
    for what, (function, call) in found.items():
        assert any(leaves_if_remote(node) for node in before(function, call)), what


def before(function: ast.FunctionDef, call: ast.Call) -> list[ast.stmt]:
    """Returns the statements of a function, or around the call, that begin before the call."""
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    return [node for node in statements if node.lineno <= call.lineno]


def leaves_if_remote(node: ast.stmt) -> bool:
    """Whether the statement returns or fails if other processes have a part of the value."""
    if isinstance(node, ast.Assert):
        return ast.unparse(node.test) == "not self.spans_processes"
    if not isinstance(node, ast.If):
        return False
    test = ast.unparse(node.test)
    if test.endswith("and (not self.spans_processes)"):
        return True  # the call is in its body
    is_remote = "self.spans_processes" in test or "is_remote(" in test
    return is_remote and isinstance(node.body[-1], ast.Return | ast.Raise)


def test_public_names_match():
    exported = exported_by(modules()[""]) | exported_by(modules()["_public"])
    assert exported == {*PUBLIC, "__version__"}
    assert dir(mirror) == sorted(PUBLIC)


MODULES = {
    "config": """
        LogicalDevice LogicalDeviceConfiguration PhysicalDevice get_device_details
        get_logical_device_configuration get_memory_growth get_memory_info get_soft_device_placement
        get_visible_devices list_logical_devices list_physical_devices set_compilation_cache
        set_logical_device_configuration set_memory_growth set_num_cpu_devices
        set_num_cpu_threads get_num_cpu_threads
        set_soft_device_placement set_visible_devices
    """,
    "distributed": """
        ClusterResolver ClusterSpec Server SimpleClusterResolver SlurmClusterResolver
        TFConfigClusterResolver barrier initialize is_chief process_count process_index
    """,
    "debugging": "Table Watch set_log_device_placement visualize_placement watch",
    "callbacks": """
        CSVLogger Callback Checkpoint EMA EarlyStopping LearningRate Log NaNGuard Profiler
        ProgressBar TensorBoard Throughput Tracker FitLoop
    """,
    "data": "ArrayDataset from_arrays",
    "ps": """
        CancelledError ClusterCoordinator FixedShardsPartitioner MaxSizePartitioner
        MinSizePartitioner ParameterServerLostError ParameterServerStrategy PerWorkerDataset
        RemoteValue ServerTable
    """,
    "testing": "assert_equals_one_device assert_mirrored assert_trains_like_one_device",
}


def test_public_names_of_modules_match(subtests):
    for name in MODULES:
        with subtests.test(msg=name):
            assert exported_by(modules()[name]) == set(MODULES[name].split())
            for attribute in MODULES[name].split():
                value = getattr(getattr(mirror, name), attribute)
                assert value.__doc__, attribute
                assert not isinstance(value, type) or value.__module__ == f"mirror.{name}"


def test_wrong_calls_of_public_names_show_the_signature(subtests):
    """Python's own error gives no hint, and its traceback ends in a line of mirror."""
    for name in [*PUBLIC, *(f"{m}.{n}" for m in MODULES for n in MODULES[m].split())]:
        value = operator.attrgetter(name)(mirror)
        is_class = inspect.isclass(value)
        own = vars(value).get("__init__") if is_class else value
        is_other = is_class and (inspect.isabstract(value) or "__new__" in vars(value))
        if not inspect.isfunction(own) or is_other or value is mirror.CrossDeviceOps:
            continue
        with (
            subtests.test(msg=name),
            pytest.raises(TypeError, match=r"The signature is|Its arguments are"),
        ):
            value(no_such_argument=1)
        public = pickle.loads(pickle.dumps(value))
        assert public is value, name


# What `dir` and completion show of the objects that a user holds.
MEMBERS = {
    "Strategy": """
        check_mirrored cross_device_ops devices distribute_dataset distribute_datasets_from_function
        distribute_values_from_function explain gather inspect is_chief local_devices
        init local_replica_ids local_results num_replicas_in_sync reduce run scope shard verify
    """,
    "ReplicaContext": """
        all_gather all_reduce devices fold_in num_replicas_in_sync replica_id_in_sync_group shared
        strategy
    """,
    "Trainer": "evaluate export fit model optimizer predict restore save summary verify",
    "ReduceOp": "MAX MEAN MIN SUM",
    "CrossDeviceOps": """
        all_reduce batch_reduce broadcast device pack_bytes
        reduce reduce_implementation reduce_stacked
    """,
    "DistributedDataset": "element_spec padded peek set_epoch source",
    "PerReplica": "dtype from_stacked num_replicas shapes stacked values",
    "EqualityReport": "heading reasons verdict",
    "VerifyReport": "largest same_bits",
    "debugging": "set_log_device_placement visualize_placement watch",
}


@rows("name", list(MEMBERS))
def test_completion_shows_no_internals(name):
    shown = {member for member in dir(getattr(mirror, name)) if not member.startswith("_")}
    assert shown == set(MEMBERS[name].split())


def test_public_names_are_documented(subtests):
    for name in PUBLIC:
        with subtests.test(msg=name):
            value = getattr(mirror, name)
            if isinstance(value, str):
                continue
            assert value.__doc__, name
            assert not isinstance(value, type) or value.__module__ == "mirror"
            for attribute, member in vars(value).items():
                if not attribute.startswith("_") and callable(member):
                    assert member.__doc__, f"{name}.{attribute}"


def test_error_classes_have_standard_bases():
    assert issubclass(mirror.ReplicaDivergenceError, ValueError)
    assert issubclass(mirror.VerifyError, ValueError)
    assert issubclass(mirror.InvalidDeviceError, RuntimeError)


def test_first_use_loads_only_what_is_needed_and_starts_nothing(subtests):
    """Beyond JAX, Flax and Optax: few packages, no backend, thread, variable or listener."""
    found = json.loads(fresh.run(IMPORT).splitlines()[-1])
    with subtests.test(msg="packages"):
        # Chex brings absl and toolz. Others, such as Orbax or Ray, would double the time.
        needed = {"mirror", "chex", "absl", "toolz", "packaging", "rich"}
        packages = {name.partition(".")[0] for name in found["modules"]}
        others = packages - needed - sys.stdlib_module_names - {"jax"}
        assert not others, "import them where they are used"
        assert "mirror" in packages
    with subtests.test(msg="lazy modules"):
        lazy = {n.module for n in modules()["ps"].body if isinstance(n, ast.ImportFrom)}
        assert set(found["modules"]) & lazy == {"mirror._src.base.tracebacks"}
    for name in ("environment", "threads", "backend", "listeners"):
        with subtests.test(msg=name):
            assert found[name] is False, "it was changed"
    with subtests.test(msg="listeners of the first setter"):
        assert found["queries"] is False
        assert found["setter"] is True, "the first setter registers one"


IMPORT = """
import json, os, sys, threading, jax, flax.nnx, optax
from jax._src import monitoring
def state():
    lists = {k: v for k, v in vars(monitoring).items() if k.endswith('_listeners')}
    lists = {k: list(v) for k, v in lists.items() if isinstance(v, list)}
    assert len(lists) >= 3, 'where JAX keeps its listeners'
    threads = threading.active_count()
    return {'environment': dict(os.environ), 'threads': threads, 'listeners': lists}
before, modules = state(), set(sys.modules)
import mirror
dir(mirror)
found = {name: value != before[name] for name, value in state().items()}
found['modules'] = sorted(set(sys.modules) - modules)
from tests.support.inside import has_started
found['backend'] = has_started()
mirror.config.list_physical_devices(); mirror.config.get_visible_devices()
found['queries'] = state()['listeners'] != before['listeners']
(cpu,) = mirror.config.list_physical_devices('CPU')
part = mirror.config.LogicalDeviceConfiguration()
mirror.config.set_logical_device_configuration(cpu, [part] * 2)
found['setter'] = state()['listeners'] != before['listeners']
assert jax.device_count() == 2
print(json.dumps(found))
"""


# Algorithms with tests of their own, and the seam for all other tests. Everything else uses the
# public API, so that a change inside the package does not break the tests of what users see.
MAY_LOOK_INSIDE = (
    *("fuzz/", "mutation/", "jaxprs/", "passes/", "laws/test_structure.py", "support/inside.py"),
    *("cluster/test_ledger.py", "laws/test_passes.py"),
    *("ps/simulated.py", "ps/recorded.py", "ps/test_driver.py", "ps/test_driver_thread.py"),
    *("ps/test_placement.py", "ps/test_separable.py"),
    *("ps/stored.py", "ps/test_store.py", "ps/test_buffers.py", "ps/test_wire.py"),
    *("ps/test_rows.py", "ps/test_sparse.py", "ps/local_tables.py"),
    *("ps/test_step_data.py", "ps/test_parts.py", "ps/test_losses.py"),
    *("ps/test_worker.py", "ps/one_worker.py", "ps/servers.py", "ps/test_variable.py"),
    # Names and their parser, a check with faults inside, node lists, and messages that are late.
    *("devices/test_names.py", "devices/test_collective_check.py", "programs/check_stalls.py"),
    *("cluster/test_resolvers.py", "cluster/test_store.py"),
    # Functions of text, numbers and errors, which no device can change.
    *("base/test_closing.py", "base/test_errors.py", "base/test_terminal.py"),
)

# Files that are not converted yet, by folder. The lists may only shrink.
STILL_INSIDE: dict[str, str] = {}
STILL_BY_THE_CLOCK: dict[str, str] = {}
STILL_SLEEPING = {
    "inspection": """
        test_explain.py
    """,
}
MAY_SLEEP = {
    "support/processes.py": "polls processes of which any may end first",
    "support/stand_ins/srun.py": "polls processes of which any may end first",
    "support/waiting.py": "polls what no event reports",
}


def assert_only(found: set[str], still: dict[str, str], what: str) -> None:
    """Checks that only these files do something, and that each of them still does."""
    still_there = {
        f"{folder}/{name}".removeprefix("/")
        for folder, names in still.items()
        for name in names.split()
    }
    wrong, done = found - still_there, still_there - found
    assert not wrong, f"{sorted(wrong)}: {what}"
    assert not done, f"{sorted(done)} are converted: delete them from the list"


def test_tests_use_the_public_api():
    found = {name for name, tree in own_code.modules() if own_code.looks_inside(tree)}
    found = {name for name in found if not name.startswith(MAY_LOOK_INSIDE)}
    assert_only(found, STILL_INSIDE, "use the public API, or add a handle to support/inside.py")
    seam = ast.parse((own_code.TESTS / "support/inside.py").read_text())
    for node in seam.body:
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node), f"{node.name}: say why there is no public way"


def test_tests_do_not_compare_clocks():
    """A slow machine fails them. Assert an order of events; a limit only ends a hang."""
    found = {name for name, tree in own_code.modules() if own_code.clock_asserts(tree)}
    found.remove("laws/test_structure.py")  # the examples below
    assert_only(found, STILL_BY_THE_CLOCK, "assert on events, not on durations")


def test_tests_do_not_sleep():
    """Except in `tests/programs`, whose processes may hang or be slow."""
    found = {name for name, tree in own_code.modules() if own_code.sleeps(tree)}
    found = {name for name in found if not name.startswith("programs/")}
    assert found >= MAY_SLEEP.keys()
    assert_only(found - MAY_SLEEP.keys(), STILL_SLEEPING, "wait for an event, as in `wait_until`")


CODE_OF_TESTS = {
    "inside": """
        import mirror._src
        import mirror._src.engine.runner as runner
        from mirror._src import run
        from mirror._src.engine import runner
        mirror._src.engine.runner.run()
        patch.setattr("mirror._src.engine.runner", None)
        code = "import jax; from mirror._src.engine import runner"
    """,
    "outside": """
        import mirror
        from mirror import data
        path = "mirror/_src/engine"
    """,
    "by the clock": """
        assert time.monotonic() - start < 5
        assert 1 < time.perf_counter() - start
        end = monotonic() + 5; assert done or perf_counter() < end
        start = time.time(); took = time.time() - start; assert round(took, 1) < 3
        run('start = time.time()\\nassert time.time() - start < 3')
    """,
    "by events": """
        start = time.monotonic(); assert shown == 3
        assert queue.get(timeout=end - time.monotonic()) == 3
        assert time() == 3
    """,
}


def test_laws_of_tests_see_what_they_forbid(subtests):
    for kind, lines in CODE_OF_TESTS.items():
        for line in lines.strip().splitlines():
            with subtests.test(msg=line.strip()):
                tree = ast.parse(line.strip())
                assert own_code.looks_inside(tree) == (kind == "inside")
                assert bool(own_code.clock_asserts(tree)) == (kind == "by the clock")
    assert own_code.sleeps(ast.parse("def f():\n    time.sleep(1)"))
    assert not own_code.sleeps(ast.parse("run('time.sleep(1)')"))
