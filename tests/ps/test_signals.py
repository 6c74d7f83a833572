"""SIGTERM in a program that uses Ray: its own handler stays, and `Checkpoint` saves."""

import signal

import pytest

import mirror
from tests.ps.programs import run_program

pytestmark = pytest.mark.dev("ray")

HANDLERS = """
import os, signal
import ray
import mirror

def handler(number, frame):
    met.append(number)

if __name__ == "__main__":
    met = []
    for wanted in (handler, signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGTERM, wanted)
        with mirror.ps.ParameterServerStrategy(ps=1, workers=1):
            assert ray.is_initialized()
            assert signal.getsignal(signal.SIGTERM) is wanted
            if wanted is not signal.SIG_DFL:
                os.kill(os.getpid(), signal.SIGTERM)
        assert not ray.is_initialized()
        assert signal.getsignal(signal.SIGTERM) is wanted
        if wanted is not signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)
    assert met == [signal.SIGTERM] * 2
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.nightly
def test_handler_of_sigterm_is_kept(tmp_path):
    run_program(tmp_path, HANDLERS, status=-signal.SIGTERM)


TRAINING = """
import os, signal, sys
import ray
import mirror
from tests.ps.trained import create, fit, on_one_device

class Terminate(mirror.callbacks.Callback):
    def on_step(self, fit):
        if fit.position.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    place, directory = sys.argv[1:]
    if place != "servers":
        # Without an address, it joins the cluster that a program before has left behind.
        ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    if place == "after Ray":
        ray.shutdown()
    if "servers" in place:
        trainer = create(mirror.ps.ParameterServerStrategy(ps=1, workers=1))
    else:
        trainer = on_one_device()
    checkpoint = mirror.callbacks.Checkpoint(directory, every_epochs=0)
    try:
        fit(trainer, epochs=50, callbacks=[checkpoint, Terminate()])
    finally:
        print(trainer._position.step)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "servers",
        *(
            pytest.param(place, marks=pytest.mark.nightly)
            for place in ("servers of the user's Ray", "after Ray")
        ),
    ],
)
def test_sigterm_saves(tmp_path, place):
    """Ray sets a handler of its own, of which the user knows nothing."""
    saved = tmp_path / "saved"
    printed = run_program(tmp_path, TRAINING, place, str(saved), status=143)
    step = mirror.load_checkpoint(saved).step
    assert 5 <= step < 200
    assert int(printed) == step
