"""Keras models under `MultiWorkerMirroredStrategy`."""

import pytest

import mirror
from tests.support import processes
from tests.support.keras_models import MARKS, assert_close, compiled, digits, functional, numbers

pytestmark = MARKS


@pytest.mark.nightly
def test_several_processes_are_refused():
    """Where the model is created, compiled or used, instead of hanging or training alone."""
    ended = processes.run_program("several_keras", devices=1, after_failure=15)
    for output in processes.outputs_of(ended):
        assert "refused, and trained outside: (8, 2)" in output


@pytest.mark.slow
def test_one_process_trains_on_its_devices():
    """A program for a cluster that is started on one machine."""

    def fit(model):
        x, y = digits()
        return model.fit(x, y, batch_size=64, verbose=0, shuffle=False)

    strategy = mirror.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled(functional)
    history = fit(model)
    strategy.check_mirrored(model)
    assert {len(v.value.devices()) for v in model.variables} == {8}
    wanted = compiled(functional)
    assert_close(numbers(model, history), numbers(wanted, fit(wanted)))
