"""The Keras programs of TensorFlow's guides, on n devices and without mirror."""

import contextlib
from typing import Any

import numpy as np
import pytest

import mirror
from tests.programs import play
from tests.programs.keras_digits import digits
from tests.support.keras_models import MARKS, assert_close, keras
from tests.support.strategies import cpu_strategy

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`"),
    pytest.mark.filterwarnings("ignore:10 examples cannot be split evenly across 4"),
]

FITS = {  # the results that each program computes after training
    "keras_mirrored_dense": {"eval_loss"},
    "keras_dense_classifier": {"eval_loss", "eval_accuracy"},
    "keras_convolutional_net": set(),
    "keras_distributed_training": {"eval_loss", "eval_acc", "unreplicated", "replicated"},
}


class Alone:
    """In place of a strategy: its scope does nothing, so that the program uses Keras alone.

    Args:
        n: Number of replicas, which the programs multiply batch sizes with.
    """

    def __init__(self, n: int) -> None:
        self.num_replicas_in_sync = n
        self.scope = contextlib.nullcontext


def played(name: str, monkeypatch: pytest.MonkeyPatch, strategy: Any) -> dict[str, Any]:
    """Returns the global variables of a program whose strategy is this one."""
    keras.utils.set_random_seed(0)
    with monkeypatch.context() as patch:
        patch.setattr(mirror, "MirroredStrategy", lambda devices=None: strategy)
        return play(name).values


GUIDE = "keras_distributed_training"


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([GUIDE], id="guide", marks=pytest.mark.slow),
        pytest.param([*FITS.keys() - {GUIDE}], id="others", marks=pytest.mark.nightly),
    ],
)
def test_program_computes_the_numbers_of_keras(names, monkeypatch, subtests):
    for name in names:
        with subtests.test(msg=name):
            n = 4
            alone = played(name, monkeypatch, Alone(n))
            values = played(name, monkeypatch, cpu_strategy(n))
            history = values["history"].history
            assert len(history["loss"]) == 3
            assert history["loss"][-1] < history["loss"][0]
            assert_close(history, alone["history"].history, atol=1e-6)
            for result in FITS[name]:
                assert_close(values[result], alone[result], atol=1e-6)
            assert {len(v.value.devices()) for v in values["model"].trainable_variables} == {n}


@pytest.mark.slow
def test_custom_training_loop_computes_the_numbers_of_fit(monkeypatch):
    values = played("keras_custom_training", monkeypatch, cpu_strategy(4))
    keras.utils.set_random_seed(0)
    model, size, data = values["create_model"](), values["GLOBAL_BATCH_SIZE"], digits()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(learning_rate=0.001), loss)
    train, test = (len(part) // size * size for part in (data.train_labels, data.test_labels))
    history = model.fit(
        data.train_images[:train],
        data.train_labels[:train],
        validation_data=(data.test_images[:test], data.test_labels[:test]),
        batch_size=size,
        epochs=3,
        shuffle=False,
        verbose=0,
    ).history
    assert_close(values["losses"], history["loss"], atol=1e-6)
    assert_close(values["test_losses"], history["val_loss"], atol=1e-6)
    assert_close(values["model"].get_weights(), model.get_weights(), atol=1e-5)
    assert values["losses"][-1] < values["losses"][0]
    assert np.isfinite(values["accuracies"]).all()
