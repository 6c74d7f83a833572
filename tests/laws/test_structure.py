"""The house: imports go down one list of layers, and each JAX primitive has one owner."""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

import mirror
from tests.support import fresh

PACKAGE = pathlib.Path(mirror.__file__).parent

# Bottom first; an import may only go to a folder that stands before, or stay inside its own.
FOLDERS = [
    *("utils", "devices", "values", "program", "collectives", "executors", "context", "variables"),
    *("run", "checks", "data", "explain", "strategy", "training", "testing", "cli"),
]
FACES = ["", "callbacks", "config", "data", "debugging", "testing"]

OWNERS = {
    "jax.pmap": "executors.pmap",
    "jax.device_put": ("devices.replicas", "devices.transfer"),
    "jax.devices": "devices.backend",
    "jax.local_devices": "devices.backend",
    "jax.make_jaxpr": "program.trace",
    # In steps; and what an executor puts in their place.
    "jax.lax.psum": (
        "collectives.in_step",
        "executors.collectives",
        "executors.shards",
    ),
    "jax.lax.pmean": "collectives.in_step",
    "jax.lax.psum_scatter": "executors.shards",
    "jax.lax.all_gather": (
        "collectives.in_step",
        "executors.collectives",
        "executors.shards",
    ),
}


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The modules of the package by their names below `mirror`; the faces and `_src`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix("__init__").removesuffix(".")] = ast.parse(path.read_text())
    return found


def folder(name: str) -> str:
    """The folder of a module of `_src`; of another, nothing."""
    return name.split(".")[1] if name.startswith("_src.") else ""


def imported(tree: ast.Module) -> set[str]:
    """Every module of the package that is imported, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {node.module or ""} | {f"{node.module}.{a.name}" for a in node.names}
    known = modules()
    inside = {n.removeprefix("mirror").lstrip(".") for n in names if n.split(".")[0] == "mirror"}
    # `from mirror import calls` names a module of the package, not the package itself.
    return {n for n in inside if n in known and (n or inside == {""})}


def exported_by(tree: ast.Module) -> set[str | None]:
    """What a table of contents exports."""
    return {a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}


@pytest.mark.parametrize("name", [n for n in modules() if folder(n)])
def test_imports_go_down(name):
    floor = FOLDERS.index(folder(name))
    others = imported(modules()[name])
    above = [m for m in others if folder(m) and FOLDERS.index(folder(m)) > floor]
    assert not above, f"mirror.{name} imports {above}, which stand above it"
    faces = {m for m in others if not folder(m)} - {"_version"}
    assert not faces or folder(name) == "cli", f"mirror.{name} imports {faces}"


def test_no_imports_in_a_circle():
    graph = {name: imported(tree) - {name} for name, tree in modules().items() if folder(name)}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph


@pytest.mark.parametrize("name", FACES)
def test_the_top_has_only_faces(name):
    assert {n for n in modules() if not n.startswith("_")} == set(FACES)
    tree = modules()[name]
    rest = [n for n in tree.body if not isinstance(n, ast.ImportFrom | ast.Expr)]
    assert [n.name for n in rest] == (["__dir__"] if name == "" else []), "only re-exports"


@pytest.mark.parametrize("primitive", OWNERS)
def test_each_primitive_has_one_owner(primitive):
    users = {
        name.removeprefix("_src.")
        for name, tree in modules().items()
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == primitive
            for node in ast.walk(tree)
        )
    }
    owners = OWNERS[primitive]
    assert users <= ({owners} if isinstance(owners, str) else set(owners))


# Nothing public serves; the module says which versions have it, and a test tells when it has gone.
PRIVATE = {("_src.devices.eager_work", "jax._src")}


def test_only_public_modules_of_jax_and_flax_are_imported():
    for name, tree in modules().items():
        for node in ast.walk(tree):
            target = getattr(node, "module", None) or ""
            allowed = (name, target) in PRIVATE or target.startswith("mirror._src")
            assert allowed or "._src" not in target, f"mirror.{name} imports {target}"


NAMES = """
AllReduce CrossDeviceOps DataParallel DistributedDataset Explanation History InputContext
InvalidDeviceError MirroredStrategy OneDeviceStrategy PerReplica ProgramReport REPLICA_AXIS ReduceOp
ReductionToOneDevice ReplicaContext ReplicaDivergenceError ReplicaMismatchError Strategy Trainer
ValueContext Variable VerifyReport Weighted add_n callbacks config data debugging device
ensure_mirrored example_keys get_replica_context get_strategy has_strategy in_cross_replica_context
load_checkpoint testing
"""
PUBLIC = NAMES.split()


def test_public_names():
    assert exported_by(modules()[""]) == {*PUBLIC, "__version__"}
    assert dir(mirror) == sorted(PUBLIC)


MODULES = {
    "config": """
        LogicalDevice LogicalDeviceConfiguration PhysicalDevice get_device_details
        get_logical_device_configuration get_memory_growth get_memory_info get_soft_device_placement
        get_visible_devices list_logical_devices list_physical_devices
        set_logical_device_configuration set_memory_growth set_soft_device_placement
        set_visible_devices
    """,
    "debugging": "Table set_log_device_placement visualize_placement",
    "callbacks": """
        CSVLogger Callback Checkpoint EarlyStopping LearningRate NaNGuard Profiler ProgressBar
        TensorBoard TrainingRun
    """,
    "data": "ArrayDataset from_arrays",
    "testing": "assert_mirrored assert_trains_like_one_device",
}


@pytest.mark.parametrize("name", MODULES)
def test_public_names_of_modules(name):
    assert exported_by(modules()[name]) == set(MODULES[name].split())
    for attribute in MODULES[name].split():
        value = getattr(getattr(mirror, name), attribute)
        assert value.__doc__, attribute
        assert not isinstance(value, type) or value.__module__ == f"mirror.{name}"


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    value = getattr(mirror, name)
    if isinstance(value, str):
        return
    assert value.__doc__, name
    assert not isinstance(value, type) or value.__module__ == "mirror"
    for attribute, member in vars(value).items():
        if not attribute.startswith("_") and callable(member):
            assert member.__doc__, f"{name}.{attribute}"


@pytest.mark.parametrize("error", ["ReplicaDivergenceError", "ReplicaMismatchError"])
def test_error_classes_are_value_errors(error):
    assert issubclass(getattr(mirror, error), ValueError)
    assert issubclass(mirror.InvalidDeviceError, RuntimeError)


@pytest.mark.parametrize("attempts", [3])
def test_import_is_quick(attempts):
    """At most 0.3 of the work of importing what it needs, in the best of a few tries.

    A ratio, because a busy machine slows both alike: 0.20 to 0.26 with two other processes at work.
    """
    code = (
        "import time; start = time.process_time(); import jax, flax.nnx, optax\n"
        "before = time.process_time(); import mirror\n"
        "print((time.process_time() - before) / (before - start))"
    )
    took = [float(fresh.run(code)) for _ in range(attempts)]
    assert min(took) <= 0.3


def test_import_starts_nothing():
    """No backend, no environment, no thread, no log line at import."""
    code = (
        "import os, threading; before = dict(os.environ); import jax, mirror\n"
        "assert before == dict(os.environ), 'environment'\n"
        "assert threading.active_count() == 1, 'threads'\n"
        "from mirror._src.devices import startup; assert not startup.started()\n"
        "jax.config.update('jax_num_cpu_devices', 5)  # raises once a backend has started\n"
        "assert jax.device_count() == 5"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
