"""Processes agree on a program before it first runs, or all of them say what differs."""

import re
import shutil

import pytest

from tests.support import fresh, processes
from tests.support.messages import assert_message

# What the last process has, and what the others have, in the message of every process.
DIFFERENCES = {
    "batch_size": ("ProgramMismatchError", "x", ["float32[6,3]", "float32[4,3]"]),
    "loss_scale": ("ProgramMismatchError", "several_different.py", ["2.0", "1.0"]),
    "width": ("ProgramMismatchError", "model.layers.0.kernel", ["float32[3,5]", "float32[3,4]"]),
    "order": ("ProgramMismatchError", "several_different.py", ["psum", "in step"]),
    "function": ("ProgramMismatchError", "<lambda> on process", ["step on process"]),
    "dtype": ("ProgramMismatchError", "x", ["float16[4,3]", "float32[4,3]"]),
    "seed": ("ReplicaDivergenceError", "model.layers.0.kernel", ["model.layers.1.kernel"]),
    "number": ("ReplicaDivergenceError", "rate", ["1 mirrored input"]),
    "shuffle": ("ReplicaDivergenceError", "several_different.py", ["batch", "seed=0"]),
    "batch_of_jax": ("ReplicaDivergenceError", "float32[24,3]", ["batch (", "float32[12,3]"]),
    "constant": ("ProgramMismatchError", "constant", ["float32[5]"]),
    "flag": ("ProgramMismatchError", "several_different.py", ["sum", "max"]),
    "text": ("ProgramMismatchError", "several_different.py", ["sum", "max"]),
    "lowering": ("ProgramMismatchError", "step", ["MIRROR_LOWERING=xla"]),
}


@pytest.mark.parametrize(
    ("count", "devices"),
    [pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.nightly)],
)
def test_every_process_names_what_differs_and_nothing_runs(count, devices):
    names = ["same", *DIFFERENCES, "byte_order", "same"]
    ended = processes.run_program(
        "several_different", *names, processes=count, devices=devices, after_failure=15
    )
    for i, output in enumerate(processes.outputs_of(ended)):
        for name, (kind, where, values) in DIFFERENCES.items():
            (text,) = re.findall(f"<{name}>(.*?)</{name}>", output, re.DOTALL)
            assert text.split()[0] == kind, text
            other = 0 if i == count - 1 else count - 1
            # Batches are compared with whoever has arrived.
            peer = [] if name in ("shuffle", "batch_of_jax") else [f"process {other}"]
            assert_message(text, names=[f"process {i}", *peer])
            assert where in text, text
            assert all(value in text for value in values), (text, values)
        assert output.count("<same> ran</same>") == 2, output
        assert "<byte_order> ran</byte_order>" in output, "no false alarm"


@pytest.mark.parametrize(
    ("count", "absent"),
    [
        pytest.param(2, 0, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.nightly),
        pytest.param(3, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_process_that_does_not_come_is_named_by_the_deadline(count, absent):
    """By all others; the absent one may be process 0, which compares."""
    code = """
        import sys, mirror
        mirror.distributed.initialize(agreement_secs=3)
        strategy = mirror.MultiWorkerMirroredStrategy()
        if mirror.distributed.process_index() == ABSENT:
            mirror.distributed.barrier("gave up", 60)
            sys.exit()
        try:
            strategy.run(lambda: 1)
        except mirror.ProgramMismatchError as error:
            print(error)
        mirror.distributed.barrier("gave up", 60)
    """
    code = code.replace("ABSENT", str(absent))
    outputs = processes.outputs_of(processes.run(code, processes=count, after_failure=10))
    for i in set(range(count)) - {absent}:
        assert_message(
            outputs[i],
            names=["<lambda>", f"Process {absent} has", f"Process {i} is"],
            values="3 s",
            fix="mirror.distributed.initialize(agreement_secs=...)",
        )


@pytest.mark.nightly
def test_programs_are_the_same_from_other_folders_and_hash_seeds(tmp_path):
    """No false alarm over the table of steps, nnx and Linen."""
    for name in ("mirror", "tests"):
        shutil.copytree(fresh.ROOT / name, tmp_path / "elsewhere" / name)
    each = [
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "2", "PYTHONPATH": str(tmp_path / "elsewhere")},
    ]
    # Safe path: a module is not taken from the working directory.
    ended = processes.run(
        ["-P", "-m", "tests.programs.several_agreeing"], each=each, after_failure=15, timeout=900
    )
    outputs = processes.outputs_of(ended)
    assert "elsewhere" not in outputs[0]
    assert str(tmp_path) in outputs[1].splitlines()[0]
    for output in outputs:
        assert output.count("agrees: ") == 15
        assert int(re.findall(r"programs: (\d+)", output)[0]) >= 20


HOST_VALUES = {  # by name in several_host_values.py: the leaf that differs
    "number": "lr",
    "integer": "lr",
    "numpy_scalar": "lr",
    "numpy_array": "lr",
    "jax_array": "lr",
    "kept_array": "w",
    "large_array": "w",
    "changed_result": "w",
    "assign": "net.scale",
    "nnx_eager": "net.linear.bias",
    "nnx_assignment": "net.linear.bias",
    "hyperparameter": "state.opt_state.hyperparams.learning_rate",
    "callback_hyperparameter": "optimizer.opt_state.hyperparams.learning_rate",
    "callback_bias": "model.bias",
    "results_of_another_program": "",
    "results_of_a_dropped_step": "",
    "swapped_results": "arrays that earlier steps returned",
    "earlier_result": "arrays that earlier steps returned",
    "known_constant": "arrays that earlier steps returned",
    "swapped_variables": "arrays that earlier steps returned",
    "nothing": "",
}


@pytest.mark.slow
def test_what_a_host_writes_between_two_launches_is_compared(subtests):
    ended = processes.run_program("several_host_values", devices=1, after_failure=15)
    output = processes.outputs_of(ended)[0]
    for row, leaf in HOST_VALUES.items():
        for name in ("warm", "same", "differs"):
            with subtests.test(msg=f"{row}, {name}"):
                (text,) = re.findall(f"<{row} {name}>(.*?)</{row} {name}>", output, re.DOTALL)
                if name == "differs" and leaf:
                    assert_message(text, names=[leaf, "process 1"], fix="every process")
                else:
                    assert text == "", "a false alarm"
