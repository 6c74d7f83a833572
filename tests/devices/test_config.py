"""`mirror.config`: physical and logical devices, their settings, and precedence."""

import importlib.metadata
import json
import os
import sys
from types import SimpleNamespace
from typing import NamedTuple

import jax
import pytest

import mirror
from mirror import config
from tests.support import fresh, inside
from tests.support.messages import assert_message, raises
from tests.support.observe import snapshot
from tests.support.tables import rows

physical, backend, state = inside.gpu_settings()
knobs = inside.jax_options_module()

CPU = config.PhysicalDevice("/physical_device:CPU:0", "CPU")
OTHER = config.PhysicalDevice("/physical_device:GPU:7", "GPU")
L = config.LogicalDeviceConfiguration
LIST = "mirror.config.list_physical_devices()"
LIST_GPUS = "mirror.config.list_physical_devices('GPU')"
CONFIGURATION = "mirror.config.LogicalDeviceConfiguration()"


def observe(program: str, **environment: str) -> dict:
    """Returns the facts that a program prints; the environment has the number of stand-in GPUs."""
    environment["PYTHONPATH"] = str(fresh.STAND_INS)
    output = fresh.run_program(program, environment=environment)
    (line,) = (line for line in output.splitlines() if line.startswith("FACTS "))
    return json.loads(line.removeprefix("FACTS "))


def gpu_names(*ordinals: int) -> list[str]:
    return [f"/physical_device:GPU:{i}" for i in ordinals]


def refuses(kind: type[Exception], said: dict, call, *arguments) -> None:
    """Checks that a call raises this error and changes nothing."""
    before = snapshot()
    with raises(kind, **said):
        call(*arguments)
    assert snapshot() == before, "half applied"


def assert_refused(fact: str, kind: str, **said) -> None:
    """Checks the error that a process printed for a rejected call: its kind and its message."""
    assert fact.startswith(f"{kind}: ")
    assert_message(fact, **said)


def assert_warned(lines: list[str], **said) -> None:
    """Checks that a process logged one line, a warning with this content."""
    (line,) = lines
    assert line.startswith("WARNING: ")
    assert_message(line, **said)


def assert_words(rows: list, expected: list[tuple[str, str, str]]) -> None:
    """Checks the description of settings: each name, its value, and what its reason names."""
    assert [list(row[:2]) for row in rows] == [list(row[:2]) for row in expected]
    for row, (*_, why) in zip(rows, expected, strict=True):
        assert_message(row[2], fix=why)


@pytest.fixture
def machine(monkeypatch):
    """Simulates a machine with stand-in GPUs, which JAX does not see."""
    stand_in = fresh.stand_in("pynvml")

    def make(count: int | None, **environment: str) -> list[config.PhysicalDevice]:
        monkeypatch.setitem(sys.modules, "pynvml", stand_in)
        for name in ("GPUS", "MIB", "MIG"):
            monkeypatch.delenv(f"STAND_IN_{name}", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if count is not None:
            environment["STAND_IN_GPUS"] = str(count)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        physical._visible.cache_clear()
        return config.list_physical_devices("GPU")

    yield make
    assert stand_in._open == 0, "NVML was left open"
    physical._visible.cache_clear()


@pytest.fixture
def gpus(machine) -> list[config.PhysicalDevice]:
    return machine(2)


# The CPU, where mirror starts the backend.


@pytest.fixture(scope="module")
def alone() -> dict:
    return observe("config_splits_cpu")


def test_listing_physical_devices_does_not_start_the_backend(alone):
    assert alone["at first"] == [["/physical_device:CPU:0"], False]
    assert repr(CPU) == "PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')"


def test_logical_devices_have_short_names(alone):
    assert alone["logical"] == [[f"/device:CPU:{i}", "CPU"] for i in range(3)]
    assert alone["before"][0] is False
    assert alone["after"][0] is True


@rows("wanted", ["CP", "FOO", "", "TPU"])
def test_unknown_device_types_have_no_devices(wanted):
    """An unknown type gives an empty list and no error; None gives all devices."""
    assert config.list_physical_devices(wanted) == []
    assert config.list_logical_devices(wanted) == []
    assert config.list_physical_devices("CPU") == [CPU]
    assert config.list_physical_devices()[0] == CPU
    assert len(config.list_logical_devices("CPU")) == 8


def test_device_types_match_in_capitals_or_not():
    assert config.list_physical_devices("cpu") == config.get_visible_devices("cpu") == [CPU]
    assert config.list_logical_devices("cpu") == config.list_logical_devices("CPU")
    said = {"names": "device_type", "values": 3, "fix": "'CPU'"}
    refuses(TypeError, said, config.list_physical_devices, 3)
    refuses(TypeError, said, config.get_visible_devices, 3)
    refuses(TypeError, said, config.list_logical_devices, 3)


def test_cpu_is_split_in_three(alone):
    assert alone["never set"] is None
    assert alone["set"] == [3, 3, "all", None]
    assert_words([alone["words"]], [("host devices", "3", "mirror.config")])
    assert alone["physical"] == ["/physical_device:CPU:0"]
    assert alone["devices"] == alone["replicas"] == 3


def test_logical_devices_are_fixed_after_the_start(alone):
    assert alone["same"]
    assert_refused(alone["other"], "RuntimeError", values=alone["line"], fix="mirror.config")


def test_jax_option_shows_whether_the_backend_has_started(alone):
    """`backend.started` relies on it: the option rejects values only after the start."""
    assert alone["before"] == [False, True]
    assert alone["after"] == [True, True]
    assert alone["of jax"].startswith("RuntimeError")


def test_thread_pool_is_left_unchanged(alone):
    assert alone["pool"] is None


# The CPU, where the user starts the backend.


@pytest.fixture(scope="module")
def asked() -> dict:
    return observe("config_user_asks")


@pytest.mark.slow
def test_settings_apply_when_the_user_starts_the_backend():
    """Events find the line: one before the start, and one after it on the same line."""
    facts = observe("config_user_computes")
    assert facts["devices"] == [4, 4]
    assert facts["events"][:2] == [False, True]
    assert_refused(facts["other"], "RuntimeError", values=facts["line"], fix="mirror.config")


def test_start_without_a_computation_is_not_attributed(asked):
    nothing = ["jax.devices()", "jax.device_put"]
    assert_refused(asked["asked"], "RuntimeError", fix=nothing)
    assert "config_user_asks.py" not in asked["asked"]
    assert_refused(asked["computed"], "RuntimeError", values=asked["lines"], fix=nothing)


def test_unlisted_gpus_can_be_hidden(asked):
    """With a driver but without `nvidia-ml-py`, JAX may still have GPUs."""
    assert asked["none"] == []
    assert asked["hidden"] == [-1, "all", "cpu"]
    assert asked["same"]


# GPUs, as far as possible without one.


@pytest.fixture(scope="module")
def four() -> dict:
    return observe("config_gpus", STAND_IN_GPUS="4")


def test_visible_devices_return_a_new_list(gpus):
    assert config.get_visible_devices() == [CPU, *gpus] == config.list_physical_devices()
    assert config.get_visible_devices("GPU") == gpus
    assert config.get_visible_devices("gpu") == gpus
    config.get_visible_devices().clear()
    assert config.get_visible_devices("CPU") == [CPU]


def test_visible_devices_of_a_type_are_replaced(four):
    """By JAX's own settings, so that they always apply; the driver's order is kept."""
    assert four["listed"] == gpu_names(0, 1, 2, 3)
    assert four["one"] == [gpu_names(1), "1", None]
    assert four["exactly"] == [gpu_names(2), "2", None]
    assert four["by name"] == [gpu_names(0, 2), "0,2", None]
    assert four["cpu again"] == four["by name"]
    unknown = repr(config.PhysicalDevice("x", "GPU"))
    assert_refused(four["unknown"], "ValueError", values=unknown, fix=LIST)
    assert four["none"] == four["only the cpu"] == [[], "all", "cpu"]
    assert four["all"] == [gpu_names(0, 1, 2, 3), "all", None]
    assert four["said"] == []


def test_visible_devices_are_fixed_after_the_start(four):
    assert all(four["same"][:2])
    for error in four["other"][:2]:
        assert_refused(error, "RuntimeError", values="config_gpus.py", fix="mirror.config")


@rows("devices, type", [([], "CPU"), ([], None), (iter([]), None)])
def test_cpu_cannot_be_hidden(devices, type):
    """TensorFlow hides it and then does not start; JAX always has the CPU."""
    fix = "set_visible_devices(gpus[:1], 'GPU')"
    said = {"names": "set_visible_devices", "values": ["[]", repr(type)], "fix": fix}
    refuses(mirror.InvalidDeviceError, said, config.set_visible_devices, devices, type)


def test_logical_gpus_share_the_memory_limit(four):
    """XLA cannot split a GPU: the sum of the limits is the memory fraction of the process."""
    assert four["limit"] == [[None, "0.125"], [1024, 1024]]
    assert four["limits"] == [None, "0.125"]


def test_logical_gpus_are_fixed_after_the_start(four):
    assert four["same"][2]
    assert_refused(four["other"][2], "RuntimeError", values="config_gpus.py", fix="mirror.config")


def test_memory_limit_of_the_cpu_is_rejected(gpus):
    """Unlike in TensorFlow, logical GPUs need no memory limit. Priorities are not supported."""
    split = config.set_logical_device_configuration
    for parts, limits in (([L(10)], "[10]"), ([L(), L(10)], "[None, 10]")):
        said = {"names": "memory_limit", "values": [limits, CPU.name]}
        refuses(ValueError, said, split, CPU, parts)
    with pytest.raises(TypeError, match="experimental_priority"):
        L(experimental_priority=1)


def test_memory_growth_of_a_split_gpu_is_rejected(four):
    refuses(ValueError, {"values": CPU.name, "fix": LIST_GPUS}, config.set_memory_growth, CPU, True)
    gpus, fix = gpu_names(0, 1), "set_memory_growth(gpu, False)"
    assert_refused(four["limit first"], "ValueError", values=gpus[1], fix="growth")
    assert_refused(four["growth first"], "ValueError", values=gpus[0], fix=fix)


def test_memory_growth_of_the_cpu_is_rejected(four):
    """With a ValueError, like other bad values; TensorFlow raises a KeyError."""
    assert four["growth at first"] is None
    refuses(ValueError, {"values": CPU.name, "fix": LIST_GPUS}, config.get_memory_growth, CPU)
    refuses(ValueError, {"values": repr(OTHER), "fix": LIST}, config.get_memory_growth, OTHER)


def test_memory_growth_must_agree_for_all_visible_gpus(four):
    assert four["growth"] == [True, False, None, None, "false", None]
    assert_refused(
        four["growth differs"],
        "ValueError",
        values=["/physical_device:GPU:0 True", "/physical_device:GPU:1 False"],
        fix=[LIST_GPUS, "mirror.config.set_memory_growth(gpu, True)"],
    )
    assert four["growth taken back"] == [None, None]
    assert four["growth of a hidden one"] == [None, None]
    assert not four["started"]
    assert four["same"][3]
    assert_refused(four["other"][3], "RuntimeError", values="config_gpus.py", fix="mirror.config")


def test_memory_limits_must_agree_for_all_visible_gpus(four):
    fix = "mirror.config.set_visible_devices"
    shares = ["/physical_device:GPU:0 100.0%", "/physical_device:GPU:1 12.5%"]
    assert_refused(four["limits differ"], "ValueError", values=shares, fix=fix)
    shares = ["/physical_device:GPU:0 12.5%", "/physical_device:GPU:2 6.2%"]
    assert_refused(four["limits still differ"], "ValueError", values=shares, fix=fix)
    assert four["limit of a hidden one"] == [None, None]


def test_settings_from_several_threads_are_kept(four):
    assert four["threads"] == [True, True, None, None, "false", 1]


def test_memory_info_requires_a_device_with_statistics():
    """An unknown device is an InvalidDeviceError as everywhere; a name without index is the first.

    The peak cannot be set back in JAX, so there is no `reset_memory_stats`.
    """
    said = {"values": "/device:CPU:0", "fix": "mirror.debugging.visualize_placement(tree)"}
    for name in ("CPU:0", "cpu", config.list_logical_devices()[0], jax.devices("cpu")[0]):
        refuses(ValueError, said, memory_of, name)
    refuses(mirror.InvalidDeviceError, {"values": "/device:TPU:0"}, memory_of, "TPU:0")
    refuses(ValueError, {"values": "'nonsense'", "fix": "'/cpu:0'"}, memory_of, "nonsense")
    stats = {"bytes_in_use": 1, "peak_bytes_in_use": 2, "bytes_limit": 3, "num_allocs": 4}
    assert inside.memory_info(stats) == {"current": 1, "peak": 2, "limit": 3}
    assert inside.memory_info({"bytes_in_use": 1}) is None


def test_memory_info_of_a_gpu_with_another_allocator_names_the_variable(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    said = {"names": "/device:GPU:0", "fix": "unset XLA_PYTHON_CLIENT_ALLOCATOR"}
    with inside.pretended_types(["GPU"]):
        refuses(ValueError, said, memory_of, jax.devices("cpu")[0])


def memory_of(device) -> dict:
    return config.get_memory_info(device)


def test_device_details_describe_the_gpu(four, machine):
    assert four["details"] == [
        {},
        {"device_name": "Stand-in GPU", "compute_capability": [9, 0]},
    ]
    assert_refused(four["on the gpu"], "InvalidDeviceError", values="/device:GPU:0")
    refuses(ValueError, {"values": "'CPU'", "fix": LIST}, config.get_device_details, "CPU")
    (part,) = machine(2, CUDA_VISIBLE_DEVICES="MIG-11111111-0000-0000-0000-000000000000")
    assert config.get_device_details(part) == {"device_name": "Stand-in MIG"}


# Settings of the user by other means.


@pytest.fixture(scope="module")
def num_cpu_devices() -> dict:
    return observe("config_num_cpu_devices")


def test_number_of_host_devices_is_set_before_the_start(num_cpu_devices):
    """The last call counts, and no call starts the backend."""
    assert num_cpu_devices["started"] is False
    assert [num_cpu_devices["devices"], num_cpu_devices["replicas"]] == [4, 4]


def test_number_of_host_devices_is_checked_after_the_start(num_cpu_devices):
    assert num_cpu_devices["again"] == [True] * 3
    fix = ("Call it before", "right after the imports", "restart the kernel")
    names = ("set_num_cpu_devices", "config_num_cpu_devices.py:19: start = jax.numpy.zeros(1)")
    assert_refused(num_cpu_devices["more"], "RuntimeError", names=names, values=(5, 4), fix=fix)


@rows(
    "n, kind",
    [(0, ValueError), (-4, ValueError), *((n, TypeError) for n in (2.0, True, "4", None))],
)
def test_number_of_host_devices_must_be_a_positive_integer(n, kind):
    said = {"names": "n", "values": repr(n), "fix": "a positive integer"}
    refuses(kind, said, config.set_num_cpu_devices, n)


@rows("n", [4097, 10**20])
def test_number_of_host_devices_has_a_limit(n):
    refuses(ValueError, {"names": "n", "values": [4096, n]}, config.set_num_cpu_devices, n)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", ["XLA_FLAGS", pytest.param("JAX_NUM_CPU_DEVICES", marks=pytest.mark.nightly)]
)
def test_number_of_host_devices_of_the_environment(environment):
    """More than asked for are not an error, fewer are."""
    value = "2" if environment[0] == "J" else "--xla_force_host_platform_device_count=2"
    code = """
import mirror
try:
    mirror.config.set_num_cpu_devices(3)
except RuntimeError as error:
    print(error)
mirror.config.set_num_cpu_devices(1)
print(mirror.MirroredStrategy().num_replicas_in_sync)
"""
    said = fresh.run(code, environment={environment: value})
    assert_message(said, names=(environment, value), values=(3, 2), fix="Unset it")
    assert said.split()[-1] == "1"


@pytest.fixture(scope="module")
def flags() -> dict:
    return observe(
        "config_user_flags",
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
        PJRT_NPROC="3",
        JAX_PLATFORMS="cpu",
        XLA_PYTHON_CLIENT_PREALLOCATE="true",
        XLA_CLIENT_MEM_FRACTION="0.5",
        STAND_IN_GPUS="3",
    )


@pytest.fixture(scope="module")
def options() -> dict:
    return observe(
        "config_user_options",
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
        JAX_NUM_CPU_DEVICES="2",
        JAX_PLATFORMS="cuda,cpu",
        XLA_PYTHON_CLIENT_MEM_FRACTION="0.3",
        STAND_IN_GPUS="3",
    )


def test_users_settings_are_never_overwritten(flags, options):
    """This includes the size of the thread pool, `PJRT_NPROC`."""
    assert flags["kept"]
    assert flags["kept after the start"]
    assert options["kept"]


def test_users_host_devices_take_precedence(flags, options):
    by = "XLA_FLAGS=--xla_force_host_platform_device_count=8"
    assert_warned(flags["split"], names=by, values=[8, 4])
    assert [flags["devices"], flags["logical"]] == [8, 4]
    assert_refused(flags["too many"], "RuntimeError", names=by, values=[8, 9])
    by = "JAX_NUM_CPU_DEVICES=2"
    assert_refused(options["too many"], "RuntimeError", names=by, values=[2, 3])
    assert options["as many"] == []
    assert options["logical"] == ["/device:CPU:0", "/device:CPU:1"]


def test_hidden_device_is_rejected(flags):
    names = "(/device:CPU:0, /device:CPU:1, /device:CPU:2, /device:CPU:3)"
    values = [jax.devices("cpu")[7], names]
    assert_refused(flags["left out"], "InvalidDeviceError", values=values, fix="mirror.config")


def test_users_gpus_take_precedence(flags, options):
    assert flags["visible"] == gpu_names(0, 1)
    by = "jax_cuda_visible_devices='0,1'"
    assert_refused(flags["hidden"], "RuntimeError", names=by, values=gpu_names(0, 1, 2))
    by = "jax_cuda_visible_devices='1,0'"
    assert_warned(options["one"], names=by, values="/physical_device:GPU:0")


def test_users_platforms_take_precedence(flags, options):
    assert_warned(flags["one"], names="jax_platforms='cpu'", values="GPU")
    assert_warned(options["none"], names="jax_platforms='cuda,cpu'", values="GPUs")


def test_users_memory_settings_take_precedence(flags, options):
    assert flags["growth"] == [False, False, False]
    assert flags["grow"] == [True, True, True]
    by, over = "XLA_PYTHON_CLIENT_PREALLOCATE=true", "set_memory_growth(True)"
    assert_warned(flags["grow said"], names=by, fix=over)
    assert_warned(flags["limit"], names=["XLA_CLIENT_MEM_FRACTION=0.5", "memory_limit"])
    by = "XLA_PYTHON_CLIENT_MEM_FRACTION=0.3"
    assert_warned(options["limit"], names=[by, "memory_limit"])


def test_settings_are_described_with_their_reason(flags, options, monkeypatch):
    expected = [
        ("host devices", "4", "mirror.config"),
        ("platforms", "cpu", "jax_platforms='cpu'"),
        ("visible GPUs", "0", "mirror.config"),
        ("memory growth", "False", "XLA_PYTHON_CLIENT_PREALLOCATE=true"),
        ("memory fraction", "0.5", "XLA_CLIENT_MEM_FRACTION=0.5"),
        ("soft placement", "False", "default"),
    ]
    assert_words(flags["words"], expected)
    expected = [("visible GPUs", "none", "mirror.config"), ("memory growth", "default", "default")]
    assert_words(options["words"][2:4], expected)
    later = state.State(logical={CPU: (L(),) * 9})  # the user has asked JAX for 8 since
    for configured in (state.State(), later):
        monkeypatch.setattr(state, "_state", configured)
        expected = [("host devices", "8", "jax_num_cpu_devices=8")]
        assert_words(inside.settings_in_words()[:1], expected)


@pytest.mark.slow
def test_failed_backend_start_names_the_platforms():
    facts = observe("config_no_start", JAX_PLATFORMS="cuda")
    for fact, where in (("cuda", "cuda"), ("strategy", "cuda"), ("nonsense", "nonsense")):
        by, fix = f"jax_platforms='{where}'", "JAX_PLATFORMS=cpu"
        assert_refused(facts[fact], "InvalidDeviceError", names=by, fix=fix)
    assert not facts["started"]
    assert facts["logical"] == ["/device:CPU:0", "/device:CPU:1"]


def test_user_may_change_settings_of_mirror(monkeypatch):
    environment: dict[str, str] = {}
    monkeypatch.setattr(knobs, "os", SimpleNamespace(environ=environment))
    knob = knobs.JaxOption("NEW", "OLD")
    assert (knob.value, knob.of_user, str(knob)) == (None, None, "NEW=None")
    assert_message(knob.source, fix="default")
    knob.set("ours")
    assert (knob.value, knob.of_user) == ("ours", None)
    assert_message(knob.source, fix="mirror.config")
    knob.set(None)
    assert environment == {}
    knob.set("ours")
    environment["NEW"] = "theirs"
    for value in ("other", None):
        knob.set(value)
        assert environment == {"NEW": "theirs"}
    assert knob.of_user == "theirs"
    assert_message(knob.source, fix="NEW=theirs")
    environment = environment.copy()
    monkeypatch.setattr(knobs, "os", SimpleNamespace(environ={"OLD": "theirs", "NEW": ""}))
    assert (knob.of_user, str(knob)) == ("theirs", "OLD=theirs")


# Physical devices, from the driver and CUDA_VISIBLE_DEVICES.

SHOWN = [
    (None, [0, 1, 2]),
    ("0,1", [0, 1]),
    ("2, 0", [2, 0]),
    ("1", [1]),
    ("", []),
    ("-1", []),
    ("1,-1,0", [1]),
    ("0,7,1", [0]),
    ("0,nonsense,1", [0]),
    ("nonsense", []),
    ("0,,1", [0]),
    ("1,1", []),
    ("1,0,GPU-11111111", []),
    ("GPU-11111111-0000-0000-0000-000000000000", [1]),
    ("GPU-2,GPU-0", [2, 0]),
    ("GPU-", []),
    ("gpu-2", []),
    ("0,GPU-9", [0]),
    ("²", []),
    ("MIG-9", []),
]


@rows("wanted, shown", SHOWN)
def test_cuda_visible_devices_is_parsed_as_by_cuda(machine, wanted, shown):
    """By index, UUID or its prefix, up to the first unknown GPU; a repeated GPU hides all."""
    found = machine(3, **({} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}))
    assert [device.name for device in found] == gpu_names(*range(len(shown)))
    uuids = [gpu.uuid for gpu in physical.gpus_of_process()]
    assert [int(uuid[4]) for uuid in uuids] == shown


@rows("wanted, shown", [("GPU-0", [0]), ("GPU-", []), ("0,GPU-", [0]), ("0,1", [0])])
def test_cuda_visible_devices_of_a_single_gpu(machine, wanted, shown):
    """CUDA selects nothing by the prefix that all UUIDs have (seen on an H100, CUDA 13)."""
    found = machine(1, CUDA_VISIBLE_DEVICES=wanted)
    assert [device.name for device in found] == gpu_names(*shown)


def test_no_gpus_are_listed_without_a_driver(machine, monkeypatch, caplog):
    assert machine(None) == []
    assert physical.driver_version() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    physical._visible.cache_clear()
    monkeypatch.setattr(physical, "_DRIVERS", ("/nowhere",))
    monkeypatch.setattr(physical, "_DRIVER_OF_ROCM", "/nowhere")
    assert config.list_physical_devices() == [CPU]
    assert not physical.unlisted_platforms()
    assert caplog.text == ""


FILES = {  # the only one of the driver's files, whether JAX's plugin is installed, what is reported
    "WSL2 with a GPU of another vendor": ("/dev/dxg", False, False),
    "WSL2": ("/dev/dxg", True, True),
    "gVisor": ("/dev/nvidiactl", False, True),
    "container": ("/dev/nvidia0", False, True),
    "Linux": ("/proc/driver/nvidia/version", False, True),
}


@pytest.fixture
def only_file(monkeypatch):
    """Makes one of the files of drivers exist, and no other."""

    def make(name: str | None) -> None:
        drivers = {name, *physical._DRIVERS, physical._DRIVER_OF_ROCM}
        exists = os.path.exists
        monkeypatch.setattr(
            os.path, "exists", lambda path: path == name if path in drivers else exists(path)
        )

    return make


@rows("file, has_plugin, is_reported", FILES)
def test_driver_without_bindings_is_reported_once(
    machine, monkeypatch, caplog, only_file, file, has_plugin, is_reported
):
    """JAX may have GPUs with any of the files that it looks for itself."""
    caplog.clear()
    machine(None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    only_file(file)
    plugins = [SimpleNamespace(name="xla_cuda12")] * has_plugin
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
    physical._warn_missing_nvml.cache_clear()
    for _ in range(3):
        physical._visible.cache_clear()
        assert config.list_physical_devices("GPU") == []
    assert bool(physical.unlisted_platforms()) is is_reported
    lines = [r.getMessage() for r in caplog.records if "nvidia-ml-py" in r.getMessage()]
    assert len(lines) == is_reported
    for line in lines:
        assert_message(line, names="nvidia-ml-py", fix="pip install nvidia-ml-py")
    physical._warn_missing_nvml.cache_clear()


def test_advice_for_unlisted_gpus_names_what_is_missing(machine, monkeypatch, only_file):
    machine(None)
    only_file("/dev/nvidiactl")
    assert_message(physical.how_to_list(), fix="NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    only_file("/dev/kfd")
    assert_message(physical.how_to_list(), fix="HIP_VISIBLE_DEVICES")
    only_file("/dev/nvidiactl")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert_message(physical.how_to_list(), fix="pip install nvidia-ml-py")


def test_driver_version_is_reported(machine):
    machine(1)
    assert physical.driver_version() == "570.1"


# Rejected arguments.


@rows("device", [OTHER, "CPU:0", "/device:CPU:0", None, 3, jax.devices])
def test_unknown_physical_device_is_rejected(gpus, device):
    said = {"values": [repr(device), CPU.name, *gpu_names(0, 1)], "fix": LIST}
    for call, *rest in (
        (config.set_visible_devices, "GPU"),
        (config.get_logical_device_configuration,),
        (config.set_logical_device_configuration, [L()]),
        (config.get_memory_growth,),
        (config.set_memory_growth, True),
        (config.get_device_details,),
    ):
        asked = [device] if call is config.set_visible_devices else device
        refuses(ValueError, said, call, asked, *rest)


def test_physical_device_of_another_type_is_rejected(gpus):
    said = {"values": [repr(gpus[0]), "CPU"], "fix": LIST}
    refuses(ValueError, said, config.set_visible_devices, [CPU, gpus[0]], "CPU")
    said = {"values": [repr(CPU), "GPU"], "fix": LIST}
    refuses(ValueError, said, config.set_visible_devices, CPU, "GPU")


@rows("type", ["gpu", "TPU", "", 3])
def test_visible_devices_reject_an_unknown_type(type):
    said = {"names": "device_type", "values": [repr(type), "'CPU'", "'GPU'"]}
    refuses(ValueError, said, config.set_visible_devices, [], type)


@rows("devices", [None, 3, jax.devices])
def test_visible_devices_must_be_a_list(devices):
    said = {"values": f"({type(devices).__name__})", "fix": LIST}
    refuses(TypeError, said, config.set_visible_devices, devices, "GPU")


@rows("parts", [3, None, L(), [None], [L(), 1024], [L], "ab"])
def test_logical_devices_must_be_configurations(parts):
    said = {"values": f"({type(parts).__name__})", "fix": CONFIGURATION}
    refuses(TypeError, said, config.set_logical_device_configuration, CPU, parts)


def test_empty_list_of_logical_devices_is_rejected(gpus):
    for device in (CPU, gpus[0]):
        said = {"values": device.name, "fix": CONFIGURATION}
        refuses(ValueError, said, config.set_logical_device_configuration, device, [])


@rows("limit", [0, -1, "1024", True, float("nan"), float("inf"), [1]])
def test_memory_limit_must_be_positive(limit):
    with raises(ValueError, names="memory_limit", values=[repr(limit), "MiB"], fix="1024"):
        L(limit)


def test_configurations_compare_by_value():
    assert L() == L(None) != L(1024)
    assert repr(L(1.5)) == "LogicalDeviceConfiguration(memory_limit=1.5)"
    with pytest.raises(AttributeError):
        setattr(L(), "memory_limit", 3)  # noqa: B010


def test_limits_that_xla_cannot_keep_are_rejected(machine):
    small, silent = machine(2, STAND_IN_MIB="1024,-")
    split = config.set_logical_device_configuration
    said: dict = {"names": "memory_limit", "values": ["[9, None]", small.name]}
    refuses(ValueError, said, split, small, [L(9), L()])
    said = {"names": "memory_limit", "values": ["[600, 600]", small.name, 1200, 1024]}
    refuses(ValueError, said, split, small, [L(600), L(600)])
    said = {"values": ["[1]", silent.name], "fix": "XLA_CLIENT_MEM_FRACTION"}
    refuses(ValueError, {"names": "memory_limit", **said}, split, silent, [L(1)])


@rows("visible", [None, "0", "0,1"])
def test_limits_apply_to_the_partition_that_cuda_uses_in_mig_mode(machine, visible):
    """NVML describes the whole card; GPU 1 has no such mode."""
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    gpu = machine(2, STAND_IN_MIB="81559,16384", STAND_IN_MIG="9984", **variables)[0]
    assert config.get_device_details(gpu) == {"device_name": "Stand-in MIG"}
    said: dict = {"names": "memory_limit", "values": ["[20000]", gpu.name, 9984]}
    refuses(ValueError, said, config.set_logical_device_configuration, gpu, [L(20000)])


def test_mig_mode_without_a_partition_describes_the_card(machine):
    (gpu,) = machine(1, STAND_IN_MIG="0")
    assert config.get_device_details(gpu)["device_name"] == "Stand-in GPU"


@rows("value", [None, 1, "yes"])
def test_switches_must_be_bools(gpus, value):
    values = [repr(value), True, False]
    said = {"names": "enable", "values": values}
    refuses(TypeError, said, config.set_memory_growth, gpus[0], value)
    said = {"names": "enabled", "values": values}
    refuses(TypeError, said, config.set_soft_device_placement, value)


# Names of JAX's GPUs, with fake GPUs.


class FakeGpu(NamedTuple):
    id: int
    platform: str = "gpu"
    process_index: int = 0


def fake_gpus(monkeypatch, count: int) -> list:
    found = [FakeGpu(i) for i in range(count)]

    def local_devices(backend=None):
        if backend in (None, "gpu"):
            return list(found)
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", local_devices)
    return found


def test_split_gpu_has_logical_devices(gpus, monkeypatch):
    first, second = fake_gpus(monkeypatch, 2)
    assert backend.devices_of_type("GPU") == (first, second)
    monkeypatch.setattr(state, "_state", state.State(logical={gpus[0]: (L(), L(), L())}))
    assert backend.devices_of_type("GPU") == (first, first, first, second)
    assert backend.logical_name(second) == "/device:GPU:3"
    assert backend.physical_of(second) == gpus[1]
    names = [device.name for device in config.list_logical_devices("GPU")]
    assert names == [f"/device:GPU:{i}" for i in range(4)]
    monkeypatch.setattr(state, "_state", state.State(visible_gpus=(gpus[1],)))
    assert backend.devices_of_type("GPU") == (second,)


def test_gpus_unknown_to_the_driver_are_logical_devices(machine, monkeypatch):
    machine(1)
    first, second = fake_gpus(monkeypatch, 2)
    assert backend.default_devices() == (first, second)
    assert backend.physical_of(second) is None


def test_missing_devices_are_an_error(gpus, monkeypatch):
    fake_gpus(monkeypatch, 3)
    monkeypatch.setattr(state, "_state", state.State(visible_gpus=()))
    names, fix = ["mirror.config", "jax_platforms"], "JAX_PLATFORMS=cuda,cpu"
    with raises(mirror.InvalidDeviceError, names=names, values=["GPU", "CPU"], fix=fix):
        config.list_logical_devices()


def test_split_gpu_repeats_its_jax_device(gpus, monkeypatch):
    first, second = fake_gpus(monkeypatch, 2)
    monkeypatch.setattr(state, "_state", state.State(logical={gpus[0]: (L(), L())}))
    assert inside.default_devices() == (first, first, second)
    assert inside.replica_devices_of(["GPU:1", "gpu:0"]) == (first, first)
    with raises(ValueError, values="(/device:GPU:0, /device:GPU:0, /device:GPU:2)"):
        mirror.MirroredStrategy()


FORCED = [
    ("", None),
    ("--xla_force_host_platform_device_count=4", 4),
    ("--xla_force_host_platform_device_count=4 --xla_force_host_platform_device_count=2", 2),
    ("--xla_cpu_multi_thread_eigen=false", None),
]


@rows("flags, count", FORCED)
def test_last_flag_for_host_devices_counts(monkeypatch, flags, count):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert inside.host_devices_of_flags() == count
