"""Unusual processes: forks, pools, event loops, flags of Python, homes without files."""

import subprocess
import sys
import textwrap

import pytest

from tests.support import fresh
from tests.support.messages import assert_message
from tests.support.strict import STRICT

DEADLINE = 100

SETUP = f"""
    import sys
    sys.path.insert(0, {str(fresh.ROOT)!r})  # `-I` ignores PYTHONPATH and the working directory
    import asyncio, multiprocessing, os
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    import jax, numpy as np, optax
    from flax import nnx
    jax.config.update("jax_platforms", "cpu")
    import mirror
    mirror.config.set_num_cpu_devices(2)

    def loss_fn(model, batch):
        return optax.l2_loss(model(batch["x"]))[:, 0]

    ROWS = np.ones((4, 2), np.float32)
    strategy = mirror.MirroredStrategy()
    with strategy.scope():
        trainer = mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.adam(1e-3), loss_fn)

    def fit(data, **options):
        history = trainer.fit(data, 2, initial_epoch=0, **options)
        assert np.isfinite(history["loss"]).all()
        return history

    def step(x):
        return mirror.all_reduce("sum", x.sum())

    BATCH = mirror.PerReplica([np.ones(2, np.float32)] * 2)
"""
TRAINS = """
    fit([{'x': ROWS}] * 3)
"""

FORKS = """
    fit([{'x': ROWS}])  # the backend runs, with its threads
    class Source:
        def __iter__(self):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                for rows in pool.imap(np.sqrt, [ROWS] * 6):
                    yield {"x": rows}
    fit(Source())
"""
TORCH_FORKS = """
    import torch
    fit([{'x': ROWS}])
    data = torch.utils.data.TensorDataset(torch.ones(12, 2))
    loader = torch.utils.data.DataLoader(
        data, 4, num_workers=2, multiprocessing_context="fork",
        collate_fn=lambda rows: {"x": torch.stack([row for row, in rows]).numpy()},
    )
    fit(loader)
"""
SPAWNS = """
    class Source:
        def __iter__(self):
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                for rows in pool.map(np.sqrt, [ROWS] * 3):
                    yield {"x": rows}
    if __name__ == "__main__":
        fit(Source())
"""
RUNS_IN_A_FORK = """
    strategy.run(step, (BATCH,))
    pid = os.fork()
    if not pid:
        for use in (lambda: strategy.run(step, (BATCH,)), mirror.MirroredStrategy):
            try:
                use()
            except RuntimeError as error:
                print(f"child: {error}", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    assert float(strategy.run(step, (BATCH,))) == 4  # the parent goes on
"""
ASYNC = """
    async def train():
        loop = asyncio.get_running_loop()
        fit([{'x': ROWS}])
        waits = [asyncio.to_thread(strategy.run, step, (BATCH,)) for _ in range(4)]
        results = await asyncio.gather(*waits, asyncio.to_thread(trainer.evaluate, [{'x': ROWS}]))
        assert all(float(result) == 4 for result in results[:-1])
        await asyncio.to_thread(fit, [{'x': ROWS}] * 3)
    asyncio.run(train())
"""
SAVES = """
    import tempfile
    with tempfile.TemporaryDirectory() as directory:
        fit([{'x': ROWS}], callbacks=mirror.callbacks.Checkpoint(directory))
        trainer.restore(directory)
    print(trainer.summary({'x': ROWS}), strategy.inspect(step, (BATCH,)))
"""
STREAMS = """
    sys.stdout = sys.stderr = None
    fit([{'x': ROWS}] * 3)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    sys.stderr.close()
    fit([{'x': ROWS}] * 3)
    sys.stderr = None  # or Python fails to flush it
"""
HOMELESS = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null"}
ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}

# Code, flags of Python, variables of the environment.
CASES = {
    "warnings are errors, no asserts, no home, ASCII": (
        TRAINS + SAVES,
        [*STRICT, "-OO"],
        {**HOMELESS, **ASCII},
    ),
}
MORE_CASES = {
    "asyncio, then no or closed standard streams": (ASYNC + STREAMS, [], {}),
    "fork in the source": (FORKS, ["-W", "ignore"], {}),
    "spawn in the source": (SPAWNS, [], {}),
    "isolated": (TRAINS + SAVES, ["-I"], {}),
    "developer mode": (TRAINS, ["-X", "dev", "-W", "ignore"], {}),
}


def output_of(code: str, flags: list[str], environment: dict[str, str]) -> str:
    """Runs code after `SETUP` to its end; returns what it prints."""
    program = textwrap.dedent(SETUP) + textwrap.dedent(code) + "\nprint('reached the end')\n"
    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        env={**fresh.INHERITED, **environment},
        cwd=fresh.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(CASES, id="some", marks=pytest.mark.slow),
        pytest.param(MORE_CASES, id="more", marks=pytest.mark.nightly),
    ],
)
def test_unusual_processes_train(rows, subtests):
    for name, case in rows.items():
        with subtests.test(msg=name):
            assert "reached the end" in output_of(*case)


@pytest.mark.slow
@pytest.mark.dev("torch")
def test_forked_workers_of_torch_load_data():
    assert "reached the end" in output_of(TORCH_FORKS, ["-W", "ignore"], {})


@pytest.mark.slow
def test_a_step_in_a_forked_process_is_an_error():
    """JAX's threads are not there after a fork, and a step would wait for them forever."""
    output = output_of(RUNS_IN_A_FORK, ["-W", "ignore"], {})
    assert "reached the end" in output
    errors = [line for line in output.splitlines() if line.startswith("child: ")]
    assert len(errors) == 2
    for error in errors:
        assert_message(error, values="forked", fix='multiprocessing.get_context("spawn")')
