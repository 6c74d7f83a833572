"""`mirror.config.set_compilation_cache`: a second process loads what the first one compiled."""

import concurrent.futures

import pytest

import mirror
from tests.support import fresh
from tests.support.messages import assert_message, raises

# Counts JAX's events of its cache; `directory` and `faulty` are filled in.
TRAINS = """
import collections, sys
import jax, numpy as np, optax
from flax import nnx
import mirror

mirror.config.set_num_cpu_devices(2)
mirror.config.set_compilation_cache(sys.argv[1])
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
with mirror.MirroredStrategy(2).scope():
    trainer = mirror.Trainer(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), "mse")
x, y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")
history = trainer.fit((x, y), batch_size=4, progress=False)
hits, misses = (events[f"/jax/compilation_cache/cache_{kind}"] for kind in ("hits", "misses"))
print("COUNTS", hits, misses, history["loss"][-1])
"""
UNSET = {"JAX_COMPILATION_CACHE_DIR": "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1.0"}


OTHER_VERSION = "import jax._src.cache_key; jax._src.cache_key.jaxlib_version_str = '0.0.1'"


def train(directory, before="") -> tuple[int, int, str]:
    """Trains in a new process; returns the programs that it loaded and compiled, and its loss."""
    code = f"import sys; sys.argv = ['', {str(directory)!r}]\n{before}\n{TRAINS}"
    (line,) = (
        line
        for line in fresh.run(code, environment=UNSET).splitlines()
        if line.startswith("COUNTS ")
    )
    _, hits, misses, loss = line.split()
    return int(hits), int(misses), loss


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path, subtests):
    hits, misses, loss = train(tmp_path / "new" / "programs")
    assert not hits
    assert misses > 3
    entries = sorted((tmp_path / "new" / "programs").iterdir())
    assert len(entries) == misses
    with subtests.test(msg="another version of jaxlib adds its own"):
        assert train(tmp_path / "new" / "programs", OTHER_VERSION) == (0, misses, loss)
    with subtests.test(msg="a second process"):
        assert train(tmp_path / "new" / "programs") == (misses, 0, loss)
    with subtests.test(msg="entries that a killed process has not completed"):
        for entry in entries:
            entry.write_bytes(entry.read_bytes()[:-9])
        assert train(tmp_path / "new" / "programs") == (0, misses, loss)


@pytest.mark.slow
def test_processes_that_start_at_once_share_a_folder(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        (*_, loss), (*_, same) = threads.map(train, [tmp_path / "new"] * 2)
    assert same == loss
    hits, misses, after = train(tmp_path / "new")
    assert (misses, after) == (0, loss)
    assert hits


SETS = """
import logging, os, pathlib, sys
import jax, mirror
from jax import config

folder = pathlib.Path(sys.argv[1])
logging.basicConfig(format="%(message)s")
def state():
    return config.jax_compilation_cache_dir, config.jax_persistent_cache_min_compile_time_secs
def show(*directory):
    mirror.config.set_compilation_cache(*directory)
    print("STATE", *map(repr, state()), flush=True)

(folder / "file").write_text("")
show(folder / "file" / "programs")
os.environ["XDG_CACHE_HOME"] = str(folder / "xdg")
show()
access, os.access = os.access, lambda path, mode: False  # root writes everywhere
show(folder / "shared")
os.access = access
show("gs://bucket/programs")
config.update("jax_compilation_cache_dir", str(folder / "mine"))
show(folder / "shared")
show(folder / "mine")
"""


def test_settings_and_warnings(tmp_path):
    code = f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n{SETS}"
    lines = iter(fresh.run(code, environment=UNSET).splitlines())
    assert_message(next(lines), names=f"{tmp_path}/file/programs")
    assert next(lines).split()[1:] == ["''", "1.0"]
    assert next(lines).split()[1:] == [repr(f"{tmp_path}/xdg/mirror/programs"), "0.0"]
    assert_message(next(lines), names=f"{tmp_path}/shared", values="read-only")
    directory, secs = next(lines).split()[1:]
    assert directory == repr(f"{tmp_path}/shared")
    assert float(secs) > 1e6, "JAX would warn for each program that it cannot write"
    assert next(lines).split()[1:] == ["'gs://bucket/programs'", "0.0"]
    assert_message(next(lines), names=f"{tmp_path}/shared", values=f"{tmp_path}/mine")
    assert next(lines).split()[1:] == [repr(f"{tmp_path}/mine"), "0.0"]
    assert next(lines).split()[1:] == [repr(f"{tmp_path}/mine"), "0.0"]
    assert not list(lines)


def test_directory_must_be_a_path():
    with raises(TypeError, names="directory", values="True"):
        mirror.config.set_compilation_cache(True)
