"""Checks of the programs that configure nothing, on any number of CPUs or GPUs."""

import re
import traceback
from collections.abc import Callable

import jax
import numpy as np

import mirror
from tests.programs import play
from tests.support.inside import forget_placement_warnings

JOB = "/job:localhost/replica:0/task:0"
PRODUCT = np.array([[22.0, 28.0], [49.0, 64.0]], np.float32)


def problems(count: int, kind: str) -> dict[str, str]:
    """Returns the problem of each program on this number of devices; "" if it passes."""
    assert len(mirror.config.list_logical_devices(kind)) == count
    found = {}
    for name, check in CHECKS.items():
        try:
            check(count, kind)
        except Exception:
            found[name] = traceback.format_exc()
        else:
            found[name] = ""
    return found


def log_placement(count: int, kind: str) -> None:
    played = play("p02_log_placement")
    *ops, first_row, second_row = played.text.splitlines()
    assert ops[-1] == f"Executing op matmul in device {JOB}/device:{kind}:0"
    assert {line.rpartition(" ")[2] for line in ops} == {f"{JOB}/device:{kind}:0"}
    assert all(line.startswith("Executing op ") for line in ops)
    assert [first_row, second_row] == ["[[22. 28.]", " [49. 64.]]"]
    np.testing.assert_array_equal(played.values["c"], PRODUCT)


def manual_placement(count: int, kind: str) -> None:
    """The last device is made the default, so that it is not the CPU's first."""
    for default, i in ((None, 0), (f"/device:{kind}:{count - 1}", count - 1)):
        with mirror.device(default):
            played = play("p03_manual_placement")
        *made, product = re.findall("Executing op .*", played.text)
        assert {line.rpartition(" ")[2] for line in made} == {f"{JOB}/device:CPU:0"}
        assert product == f"Executing op matmul in device {JOB}/device:{kind}:{i}"
        assert "[[22. 28.]\n [49. 64.]]\n" in played.text
        rows = [line.split() for line in played.text.splitlines() if line.startswith("['")]
        assert [row[-1] for row in rows] == [*["/device:CPU:0"] * 2, f"/device:{kind}:{i}"]
        assert on(played.values["a"]) == on(played.values["b"]) == "/device:CPU:0"
        assert on(played.values["c"]) == f"/device:{kind}:{i}"


def no_such_device(count: int, kind: str) -> None:
    forget_placement_warnings()
    lines = play("p07_no_such_device").text.splitlines()
    there = [device.name for device in mirror.config.list_logical_devices()]
    product = ["[[22. 28.]", " [49. 64.]]"]
    if "/device:GPU:2" in there:
        assert [line for line in lines if "Executing" not in line] == product * 2
        return
    error, said, *ops = lines
    assert error.startswith(
        f"Unknown device /device:GPU:2. Available devices: ({', '.join(there)}). "
    )
    assert said == f"Unknown device /device:GPU:2; soft placement uses /device:{kind}:0 instead."
    assert ops[-3] == f"Executing op matmul in device {JOB}/device:{kind}:0"
    assert ops[-2:] == product


def towers(count: int, kind: str) -> None:
    played = play("p08_towers")
    ops = re.findall("Executing op (.*) in device (.*)", played.text)
    products = [f"{JOB}/device:{kind}:{i}" for i in range(count)]
    assert [device for op, device in ops if op == "matmul"] == products
    assert [device for op, device in ops if op == "add"] == [f"{JOB}/device:CPU:0"] * (count - 1)
    assert played.text.endswith(f"\n{count * PRODUCT}\n")
    if count == 2:
        assert played.text.endswith("\n[[ 44.  56.]\n [ 98. 128.]]\n")
    assert on(played.values["total"]) == "/device:CPU:0"


def two_devices_at_once(count: int, kind: str) -> None:
    """On a GPU products are made in TensorFloat-32, and its libraries may choose among several."""
    played = play("p09_two_devices_at_once", "60")
    second = f"/device:{kind}:{min(count - 1, 1)}"
    assert list(map(on, played.values["powers_on_one"])) == [f"/device:{kind}:0"] * 2
    assert list(map(on, played.values["powers_on_two"])) == [f"/device:{kind}:0", second]
    a, b = (played.values[name].astype(np.float64) for name in "AB")
    expected = np.linalg.matrix_power(a, 10) + np.linalg.matrix_power(b, 10)
    for name in ("on_one", "on_two"):
        assert on(played.values[name]) == "/device:CPU:0"
        rtol = 1e-5 if kind == "CPU" else 2e-2
        np.testing.assert_allclose(played.values[name], expected, rtol=rtol)
    took, both, equal = played.text.splitlines()
    duration = r"computation time: \d+:\d\d:\d\d(\.\d+)?"
    assert re.fullmatch(f"One device, /device:{kind}:0, {duration}", took)
    assert re.fullmatch(f"Two devices, /device:{kind}:0 and {second}, {duration}", both)
    assert equal == "Equal: True" or (kind == "GPU" and equal == "Equal: False")


def model_parallel(count: int, kind: str) -> None:
    """Twenty steps are those that NumPy takes, from gradients that are written out by hand."""
    values = play("p15_model_parallel").values
    ends = [f"/device:{kind}:0", f"/device:{kind}:{count - 1}"]
    built = values["build"](*ends)
    for halves in (built, values["split"]):
        for half, end in zip(halves, ends, strict=True):
            assert {on(half.kernel[...]), on(half.bias[...])} == {end}
    assert on(values["loss_fn"](built, *ends)) == ends[1]

    x, y = (np.asarray(values[name], np.float64) for name in "xy")
    halves = values["build"]("/cpu:0", "/cpu:0")
    v, b, w, c = (np.asarray(p, np.float64) for h in halves for p in (h.kernel[...], h.bias[...]))
    losses = []
    for _ in range(20):
        hidden = np.tanh(x @ v + b)
        off = hidden @ w + c - y
        losses.append((off**2).mean())
        of_out = 2 * off / len(y)
        of_in = of_out @ w.T * (1 - hidden**2)
        gradients = x.T @ of_in, of_in.sum(0), hidden.T @ of_out, of_out.sum(0)
        v, b, w, c = (p - 0.3 * g for p, g in zip((v, b, w, c), gradients, strict=True))
    tolerance = 1e-5 if kind == "CPU" else 5e-3
    for which in ("split", "whole"):
        np.testing.assert_allclose(values[f"{which}_losses"], losses, rtol=tolerance)
        last = [g[k][...] for g in values[f"{which}_gradients"] for k in ("kernel", "bias")]
        for gradient, expected in zip(last, gradients, strict=True):
            np.testing.assert_allclose(gradient, expected, atol=tolerance)
        trained = [p[...] for half in values[which] for p in (half.kernel, half.bias)]
        for parameter, expected in zip(trained, (v, b, w, c), strict=True):
            np.testing.assert_allclose(parameter, expected, atol=10 * tolerance)


def on(array: jax.Array) -> str:
    """The one logical device that an array lies on."""
    (device,) = array.devices()
    kind = "CPU" if device.platform == "cpu" else "GPU"
    return f"/device:{kind}:{jax.local_devices(backend=device.platform).index(device)}"


CHECKS: dict[str, Callable[[int, str], None]] = {
    "P2": log_placement,
    "P3": manual_placement,
    "P7": no_such_device,
    "P8": towers,
    "P9": two_devices_at_once,
    "P15": model_parallel,
}
