"""The house: imports go down one list of layers, and each JAX primitive has one owner."""

import ast
import pathlib
import subprocess
import sys

import pytest

import mirror

PACKAGE = pathlib.Path(mirror.__file__).parent

# Bottom first; an import may only go to a module that stands before.
LAYERS = [
    "_version",
    "_types",
    "_errors",
    "devices",
    "devices.spec",
    "devices.backend",
    "devices.canonical",
    "devices.replicas",
    "values",
    "program",
    "program.trace",
    "program.ensure",
    "program.proof",
    "cross_device_ops",
    "executors",
    "executors.launch",
    "executors.pmap",
    "context",
    "objects",
    "calls",
    "plan",
    "step",
    "runner",
    "reductions",
    "checks",
    "display",
    "data",
    "data.distribute",
    "strategy",
    "mirrored",
    "",  # the package itself: a table of contents
    "demo",
    "demo.*",
    "cli",
]

OWNERS = {
    "jax.pmap": "executors.pmap",
    "jax.device_put": "devices.replicas",
    "jax.devices": "devices.backend",
    "jax.local_devices": "devices.backend",
    "jax.make_jaxpr": "program.trace",
    "jax.lax.psum": "cross_device_ops",
    "jax.lax.pmean": "cross_device_ops",
    "jax.lax.all_gather": "cross_device_ops",
}


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix("__init__").removesuffix(".")] = ast.parse(path.read_text())
    return found


def floor(name: str) -> int:
    """The layer of a module; the parts of the demo share one."""
    if name in LAYERS:
        return LAYERS.index(name)
    return LAYERS.index(name.rsplit(".", 1)[0] + ".*")


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


@pytest.mark.parametrize("name", [n for n in modules() if n])
def test_imports_go_down(name):
    above = [m for m in imported(modules()[name]) if floor(m) > floor(name)]
    assert not above, f"mirror.{name} imports {above}, which stand above it"


@pytest.mark.parametrize("primitive", OWNERS)
def test_each_primitive_has_one_owner(primitive):
    users = {
        name
        for name, tree in modules().items()
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == primitive
            for node in ast.walk(tree)
        )
    }
    assert users <= {OWNERS[primitive]}


def test_only_public_modules_of_jax_and_flax_are_imported():
    for name, tree in modules().items():
        for node in ast.walk(tree):
            target = getattr(node, "module", None) or ""
            assert "._src" not in target, f"mirror.{name} imports {target}"


def test_the_package_is_a_table_of_contents():
    tree = modules()[""]
    assert all(isinstance(n, ast.ImportFrom | ast.Expr) for n in tree.body), "only re-exports"


NAMES = """
AllReduce CrossDeviceOps DistributedDataset InvalidDeviceError MirroredStrategy OneDeviceStrategy
PerReplica REPLICA_AXIS ReduceOp ReplicaContext ReplicaDivergenceError ReplicaMismatchError Strategy
VerifyReport ensure_mirrored get_replica_context get_strategy has_strategy
in_cross_replica_context
"""
PUBLIC = NAMES.split()


def test_public_names():
    tree = modules()[""]
    exported = {a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert exported == {*PUBLIC, "__version__"}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    value = getattr(mirror, name)
    if isinstance(value, str):
        return
    assert value.__doc__, name
    for attribute, member in vars(value).items():
        if not attribute.startswith("_") and callable(member):
            assert member.__doc__, f"{name}.{attribute}"


@pytest.mark.parametrize("error", ["ReplicaDivergenceError", "ReplicaMismatchError"])
def test_error_classes_are_value_errors(error):
    assert issubclass(getattr(mirror, error), ValueError)
    assert issubclass(mirror.InvalidDeviceError, RuntimeError)


def test_import_starts_nothing():
    """No backend, no environment, no thread, no log line at import."""
    code = (
        "import os, threading; before = dict(os.environ); import jax, mirror\n"
        "assert before == dict(os.environ), 'environment'\n"
        "assert threading.active_count() == 1, 'threads'\n"
        "jax.config.update('jax_num_cpu_devices', 5)  # raises once a backend has started\n"
        "assert jax.device_count() == 5"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
