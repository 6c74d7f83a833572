"""The programs of TensorFlow's guides that train."""

import re

import numpy as np
import pytest
import tensorboardX  # noqa: F401  it sets an environment variable

from tests.programs import play


@pytest.mark.parametrize("where", ["devices", "host"])
@pytest.mark.slow
def test_log_shows_where_variables_are_stored_and_steps_run(where):
    played = play("p10_mirrored_dense", where)
    lines = played.text.splitlines()
    devices = [f"/device:CPU:{i}" for i in range(8)]
    for name in ("MirroredStrategy", "model.kernel", "model.bias"):
        assert any(name in line and all(d in line for d in devices) for line in lines), name
    assert any("train_step" in line for line in lines)
    # On the host, all-reduces name a device twice: as the reducing one and as a receiver.
    reduced = [line for line in lines if "reduce" in line.lower() and line.count(devices[0]) == 2]
    assert bool(reduced) == ("Using staged" in played.text) == (where == "host")
    losses = played.values["history"]["loss"]
    assert losses == sorted(losses, reverse=True)
    kernel, bias = played.values["model"].kernel[...], played.values["model"].bias[...]
    assert (kernel.item(), bias.item()) == pytest.approx((3, -1), abs=0.05)


@pytest.mark.slow
def test_classifier_prints_loss_and_accuracy_per_epoch():
    played = play("p11_dense_classifier")
    epochs = re.findall(
        r"epoch (\d+)/10(?: on 8 replicas)?: loss \S+, accuracy \S+, val_loss \S+, val_accuracy",
        played.text,
    )
    assert epochs == [str(i + 1) for i in range(10)]
    history = played.values["history"]
    assert history["val_accuracy"][-1] > 0.9 > history["accuracy"][0]
    assert [*history] == ["loss", "accuracy", "val_loss", "val_accuracy"]


@pytest.mark.parametrize("count", [2])
@pytest.mark.nightly
def test_convolutional_net_has_one_set_of_weights_and_writes_the_program(count, tmp_path):
    small = ["--width", "0.06", "--images", "110", "--epochs", "2"]
    played = play("p14_convolutional_net", "--devices", str(count), "--log", str(tmp_path), *small)
    first, second = map(float, re.findall(r"Epoch \d, total cost: (\S+)", played.text))
    assert np.isfinite([first, second]).all()
    assert re.search(rf"Devices: {count}, total time: \d+\.\d+ s", played.text)
    trainer = played.values["trainer"]
    trainer.strategy.check_mirrored(trainer.model)
    assert any(b"stablehlo" in file.read_bytes() for file in tmp_path.iterdir())
