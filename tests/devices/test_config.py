"""`mirror.config`: the devices there are, what is set of them before the start, and who wins."""

import importlib.util
import json
import sys
from types import SimpleNamespace
from typing import NamedTuple

import jax
import pytest

import mirror
from mirror import config
from mirror._src.devices import backend, memory, physical, settings, state
from mirror._src.devices import jax_options as knobs
from mirror._src.devices import startup as start
from mirror._src.devices.resolve import canonicalize_replica_devices
from tests.support import fresh
from tests.support.messages import assert_message, raises
from tests.support.observe import snapshot

CPU = config.PhysicalDevice("/physical_device:CPU:0", "CPU")
OTHER = config.PhysicalDevice("/physical_device:GPU:7", "GPU")
L = config.LogicalDeviceConfiguration
LIST = "mirror.config.list_physical_devices()"
LIST_GPUS = "mirror.config.list_physical_devices('GPU')"
CONFIGURATION = "mirror.config.LogicalDeviceConfiguration()"
# Also where there are GPUs, JAX has the CPU alone: its plugins are not found.
PREFIX = """\
import sys
sys.modules["jax_plugins"] = None
from tests.support.observe import *
listen()
CPU, *GPUS = config.list_physical_devices()
"""


def observe(code: str, **environment: str) -> dict:
    """The facts that a fresh process tells, with as many stand-in GPUs as the environment says."""
    environment["PYTHONPATH"] = str(fresh.STAND_INS)
    said = fresh.run(f"{PREFIX}{code}\ntell()", environment=environment)
    (line,) = (line for line in said.splitlines() if line.startswith("FACTS "))
    return json.loads(line.removeprefix("FACTS "))


def gpu_names(*ordinals: int) -> list[str]:
    return [f"/physical_device:GPU:{i}" for i in ordinals]


def refuses(kind: type[Exception], said: dict, call, *arguments) -> None:
    """The call raises that, with a message that says that, and changes nothing."""
    before = snapshot()
    with raises(kind, **said):
        call(*arguments)
    assert snapshot() == before, "half applied"


def assert_refused(fact: str, kind: str, **said) -> None:
    """What a fresh process tells of a call that was refused: the error's kind and its message."""
    assert fact.startswith(f"{kind}: ")
    assert_message(fact, **said)


def assert_warned(lines: list[str], **said) -> None:
    """Of the log lines of a fresh process: there is one, a warning, and it says that."""
    (line,) = lines
    assert line.startswith("WARNING: ")
    assert_message(line, **said)


def assert_words(rows: list, expected: list[tuple[str, str, str]]) -> None:
    """Of what is configured: each setting, its value, and what its reason names."""
    assert [list(row[:2]) for row in rows] == [list(row[:2]) for row in expected]
    for row, (*_, why) in zip(rows, expected, strict=True):
        assert_message(row[2], fix=why)


@pytest.fixture
def machine(monkeypatch):
    """Makes this a machine with stand-in GPUs; JAX is not told of them."""
    spec = importlib.util.spec_from_file_location("pynvml", fresh.STAND_INS / "pynvml.py")
    stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)

    def make(count: int | None, **environment: str) -> list[config.PhysicalDevice]:
        monkeypatch.setitem(sys.modules, "pynvml", stand_in)
        for name in ("CUDA_VISIBLE_DEVICES", "STAND_IN_GPUS", "STAND_IN_MIB"):
            monkeypatch.delenv(name, raising=False)
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

CPU_ALONE = """
facts["at first"] = [names(config.list_physical_devices()), started()]
facts["never set"] = config.get_logical_device_configuration(CPU)
probe = "jax_cpu_get_local_topology_timeout_minutes"
value = jax.config.values[probe]
config.set_logical_device_configuration(CPU, [L()] * 5)
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # too late: an option wins
config.set_logical_device_configuration(CPU, [L(), L(), L()])
facts["set"] = [len(config.get_logical_device_configuration(CPU)), *options()]
facts["words"] = settings.in_words()[0]
facts["before"] = [started(), jax.config.values[probe] == value]

pool, find = [], jax.local_devices
def local_devices(*arguments, **options):
    pool.append(os.environ.get("PJRT_NPROC"))
    return find(*arguments, **options)
jax.local_devices = local_devices
facts["line"] = here(); logical = config.list_logical_devices()
facts["pool"] = pool[0]

facts["after"] = [started(), jax.config.values[probe] == value]
facts["logical"] = [[d.name, d.device_type] for d in logical]
facts["physical"] = names(config.list_physical_devices())
facts["devices"] = jax.device_count()
facts["replicas"] = mirror.MirroredStrategy().num_replicas_in_sync
facts["same"] = unchanged(config.set_logical_device_configuration, CPU, [L()] * 3)
facts["other"] = refused(config.set_logical_device_configuration, CPU, [L()] * 2)
facts["of jax"] = refused(jax.config.update, probe, value + 1)
"""


@pytest.fixture(scope="module")
def alone() -> dict:
    return observe(CPU_ALONE)


def test_listing_physical_devices_starts_nothing(alone):
    assert alone["at first"] == [["/physical_device:CPU:0"], False]
    assert repr(CPU) == "PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')"


def test_logical_devices_have_short_names(alone):
    assert alone["logical"] == [[f"/device:CPU:{i}", "CPU"] for i in range(3)]
    assert alone["before"][0] is False
    assert alone["after"][0] is True


@pytest.mark.parametrize("wanted", ["cpu", "FOO", 3, "", "TPU"])
def test_a_type_is_matched_exactly(wanted):
    """Of what is no type there are none, and never an error; of no type, all."""
    assert config.list_physical_devices(wanted) == []
    assert config.list_logical_devices(wanted) == []
    assert config.list_physical_devices("CPU") == [CPU]
    assert config.list_physical_devices()[0] == CPU
    assert len(config.list_logical_devices("CPU")) == 8


def test_the_cpu_is_split_in_three(alone):
    assert alone["never set"] is None
    assert alone["set"] == [3, 3, "all", None]
    assert_words([alone["words"]], [("host devices", "3", "mirror.config")])
    assert alone["physical"] == ["/physical_device:CPU:0"]
    assert alone["devices"] == alone["replicas"] == 3


def test_after_the_start_parts_are_fixed(alone):
    assert alone["same"]
    assert_refused(alone["other"], "RuntimeError", values=alone["line"], fix="mirror.config")


def test_an_option_of_jax_tells_whether_it_has_started(alone):
    """`start.started` rests on it: the option refuses a value after the start, and not before."""
    assert alone["before"] == [False, True]
    assert alone["after"] == [True, True]
    assert alone["of jax"].startswith("RuntimeError")


def test_the_pool_of_threads_is_left_alone(alone):
    assert alone["pool"] is None


# The CPU, where the user starts the backend.

USER_COMPUTES = """
config.set_logical_device_configuration(CPU, [L()] * 4)
events = []
jax.monitoring.register_event_duration_secs_listener(lambda *_, **__: events.append(started()))
facts["line"] = here(); x = jnp.zeros(3)
facts["events"] = events
facts["devices"] = [jax.device_count(), len(config.list_logical_devices())]
facts["other"] = refused(config.set_logical_device_configuration, CPU, [L()] * 2)
"""

USER_ASKS = """
from mirror._src.devices import physical

sys.modules["pynvml"] = None
physical._DRIVER = "/"
facts["none"] = names(config.list_physical_devices("GPU"))
config.set_visible_devices([], "GPU")
facts["hidden"] = options()
facts["lines"] = [here()]; jax.eval_shape(lambda x: x + 1, 1.0)
jax.devices()
facts["asked"] = refused(config.set_logical_device_configuration, CPU, [L()] * 2)
facts["lines"] += [here()]; x = jnp.zeros(3)
facts["computed"] = refused(config.set_logical_device_configuration, CPU, [L()] * 2)
facts["same"] = unchanged(config.set_visible_devices, [], "GPU")
facts["said"] = said()
"""


@pytest.fixture(scope="module")
def asked() -> dict:
    return observe(USER_ASKS)


def test_settings_hold_where_the_user_starts_the_backend():
    """The line is known by events: one before the start, and one after it on the same line."""
    facts = observe(USER_COMPUTES)
    assert facts["devices"] == [4, 4]
    assert facts["events"][:2] == [False, True]
    assert_refused(facts["other"], "RuntimeError", values=facts["line"], fix="mirror.config")


def test_what_computes_nothing_is_not_known_and_not_guessed(asked):
    nothing = ["jax.devices()", "jax.device_put"]
    assert_refused(asked["asked"], "RuntimeError", fix=nothing)
    assert "<string>" not in asked["asked"]
    assert_refused(asked["computed"], "RuntimeError", values=asked["lines"], fix=nothing)


def test_gpus_that_cannot_be_listed_can_be_hidden(asked):
    """There is a driver, but no `nvidia-ml-py`: JAX may have GPUs all the same."""
    assert asked["none"] == []
    assert asked["hidden"] == [-1, "all", "cpu"]
    assert asked["same"]


# GPUs, as far as they go without one.

GPUS = """
import threading

facts["listed"] = names(GPUS)
facts["details"] = [config.get_device_details(device) for device in (CPU, GPUS[0])]
facts["growth at first"] = config.get_memory_growth(GPUS[0])

sys.setswitchinterval(1e-6)
def grow(gpu):
    for i in range(61):
        config.set_memory_growth(gpu, i % 2 == 0)
def split():
    for i in range(61):
        config.set_logical_device_configuration(CPU, [L()] * (i % 2 + 1))
threads = [threading.Thread(target=grow, args=[gpu]) for gpu in GPUS[:2]]
threads.append(threading.Thread(target=split))
for thread in threads: thread.start()
for thread in threads: thread.join()
facts["threads"] = [*map(config.get_memory_growth, GPUS), memory()[0], options()[0]]
for gpu in GPUS[:2]: config.set_memory_growth(gpu, False)

def show(devices, *type):
    config.set_visible_devices(devices, *type)
    return [names(config.get_visible_devices())[1:], *options()[1:]]
facts["one"] = show(GPUS[1], "GPU")
facts["exactly"] = show([GPUS[2], CPU])
facts["by name"] = show(["/physical_device:GPU:2", "/physical_device:GPU:0"], "GPU")
facts["cpu again"] = show([CPU], "CPU")
facts["unknown"] = refused(config.set_visible_devices, [*GPUS, config.PhysicalDevice("x", "GPU")])
facts["none"] = show([], "GPU")
facts["only the cpu"] = show([CPU])
facts["all"] = show(GPUS, "GPU")

config.set_memory_growth(GPUS[0], True)
facts["growth"] = [*map(config.get_memory_growth, GPUS), *memory()]
facts["growth first"] = refused(config.set_logical_device_configuration, GPUS[0], [L()] * 2)
facts["growth differs"] = refused(config.list_logical_devices)
config.set_memory_growth(GPUS[0], False)
facts["growth taken back"] = memory()

config.set_logical_device_configuration(GPUS[1], [L(1024), L(1024)])
facts["limit"] = [memory(), [part.memory_limit for part in
                             config.get_logical_device_configuration(GPUS[1])]]
facts["limit first"] = refused(config.set_memory_growth, GPUS[1], False)
facts["limits differ"] = refused(mirror.MirroredStrategy)
config.set_visible_devices(GPUS[:1], "GPU")
facts["limit of a hidden one"] = memory()
config.set_memory_growth(GPUS[3], True)
facts["growth of a hidden one"] = memory()
config.set_visible_devices(GPUS[:3], "GPU")
config.set_logical_device_configuration(GPUS[0], [L(2048)])
config.set_logical_device_configuration(GPUS[2], [L(1024)])
facts["limits still differ"] = refused(config.list_logical_devices)
config.set_logical_device_configuration(GPUS[2], [L(2048)])
facts["limits"] = memory()

facts["started"] = started()
facts["logical"] = names(config.list_logical_devices())
facts["same"] = [
    unchanged(config.set_visible_devices, GPUS[:3], "GPU"),
    unchanged(config.set_visible_devices, [CPU, *GPUS[2::-1]]),
    unchanged(config.set_logical_device_configuration, GPUS[1], [L(1024), L(1024)]),
    unchanged(config.set_memory_growth, GPUS[3], True),
]
facts["other"] = [
    refused(config.set_visible_devices, GPUS[:2], "GPU"),
    refused(config.set_visible_devices, [], "GPU"),
    refused(config.set_logical_device_configuration, GPUS[1], [L(1024)]),
    refused(config.set_memory_growth, GPUS[3], False),
]
facts["on the gpu"] = refused(config.get_memory_info, "GPU:0")
facts["said"] = said()
"""


@pytest.fixture(scope="module")
def four() -> dict:
    return observe(GPUS, STAND_IN_GPUS="4")


def test_visible_devices_are_a_fresh_list_of_all(gpus):
    assert config.get_visible_devices() == [CPU, *gpus] == config.list_physical_devices()
    assert config.get_visible_devices("GPU") == gpus
    assert config.get_visible_devices("gpu") == []
    config.get_visible_devices().clear()
    assert config.get_visible_devices("CPU") == [CPU]


def test_visible_devices_of_a_type_are_replaced(four):
    """By JAX's own settings, so that they hold whoever starts it; the order stays the driver's."""
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


def test_after_the_start_visible_devices_are_fixed(four):
    assert all(four["same"][:2])
    for error in four["other"][:2]:
        assert_refused(error, "RuntimeError", values="<string>", fix="mirror.config")


@pytest.mark.parametrize(("devices", "type"), [([], "CPU"), ([], None), (iter([]), None)])
def test_the_cpu_cannot_be_hidden(devices, type):
    """TensorFlow lets it be hidden and then starts nothing; JAX always has it."""
    fix = "set_visible_devices(gpus[:1], 'GPU')"
    said = {"names": "set_visible_devices", "values": ["[]", repr(type)], "fix": fix}
    refuses(mirror.InvalidDeviceError, said, config.set_visible_devices, devices, type)


def test_parts_of_a_gpu_share_its_memory(four):
    """XLA cannot split a GPU: the sum of the limits is the part of it that the process may take."""
    assert four["limit"] == [[None, "0.125"], [1024, 1024]]
    assert four["limits"] == [None, "0.125"]


def test_after_the_start_parts_of_a_gpu_are_fixed(four):
    assert four["same"][2]
    assert_refused(four["other"][2], "RuntimeError", values="<string>", fix="mirror.config")


def test_a_limit_on_the_cpu_is_refused(gpus):
    """Unlike in TensorFlow, the parts of a GPU need no limit. Priorities are not known of."""
    split = config.set_logical_device_configuration
    for parts, limits in (([L(10)], "[10]"), ([L(), L(10)], "[None, 10]")):
        said = {"names": "memory_limit", "values": [limits, CPU.name]}
        refuses(ValueError, said, split, CPU, parts)
    with pytest.raises(TypeError, match="experimental_priority"):
        L(experimental_priority=1)


def test_memory_growth_is_for_gpus_that_are_not_split(four):
    refuses(ValueError, {"values": CPU.name, "fix": LIST_GPUS}, config.set_memory_growth, CPU, True)
    gpus, fix = gpu_names(0, 1), "set_memory_growth(gpu, False)"
    assert_refused(four["limit first"], "ValueError", values=gpus[1], fix="growth")
    assert_refused(four["growth first"], "ValueError", values=gpus[0], fix=fix)


def test_memory_growth_of_the_cpu_is_refused(four):
    """With a ValueError, as everything of that kind; TensorFlow raises a KeyError."""
    assert four["growth at first"] is None
    refuses(ValueError, {"values": CPU.name, "fix": LIST_GPUS}, config.get_memory_growth, CPU)
    refuses(ValueError, {"values": repr(OTHER), "fix": LIST}, config.get_memory_growth, OTHER)


def test_memory_growth_is_one_for_all_visible_gpus(four):
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
    assert_refused(four["other"][3], "RuntimeError", values="<string>", fix="mirror.config")


def test_limits_are_one_for_all_visible_gpus(four):
    fix = "mirror.config.set_visible_devices"
    shares = ["/physical_device:GPU:0 100.0%", "/physical_device:GPU:1 12.5%"]
    assert_refused(four["limits differ"], "ValueError", values=shares, fix=fix)
    shares = ["/physical_device:GPU:0 12.5%", "/physical_device:GPU:2 6.2%"]
    assert_refused(four["limits still differ"], "ValueError", values=shares, fix=fix)
    assert four["limit of a hidden one"] == [None, None]


def test_settings_from_several_threads_are_all_kept(four):
    assert four["threads"] == [True, True, None, None, "false", 1]


def test_memory_info_is_of_devices_that_count():
    """An unknown device is an InvalidDeviceError as everywhere; a name without index is the first.

    The peak cannot be set back in JAX, so there is no `reset_memory_stats`.
    """
    said = {"values": "/device:CPU:0", "fix": "mirror.debugging.visualize_placement(tree)"}
    for name in ("CPU:0", "cpu", config.list_logical_devices()[0], jax.devices("cpu")[0]):
        refuses(ValueError, said, memory_of, name)
    refuses(mirror.InvalidDeviceError, {"values": "/device:TPU:0"}, memory_of, "TPU:0")
    refuses(ValueError, {"values": "'nonsense'", "fix": "'/cpu:0'"}, memory_of, "nonsense")
    stats = {"bytes_in_use": 1, "peak_bytes_in_use": 2, "bytes_limit": 3, "num_allocs": 4}
    assert memory.memory_info(stats) == {"current": 1, "peak": 2, "limit": 3}
    assert memory.memory_info({"bytes_in_use": 1}) is None


def memory_of(device) -> dict:
    return config.get_memory_info(device)


def test_device_details(four, machine):
    assert four["details"] == [
        {},
        {"device_name": "Stand-in GPU", "compute_capability": [9, 0]},
    ]
    assert_refused(four["on the gpu"], "InvalidDeviceError", values="/device:GPU:0")
    refuses(ValueError, {"values": "'CPU'", "fix": LIST}, config.get_device_details, "CPU")
    (part,) = machine(2, CUDA_VISIBLE_DEVICES="MIG-11111111-0000-0000-0000-000000000000")
    assert config.get_device_details(part) == {"device_name": "Stand-in MIG"}


# What the user has set by other means.

USERS_FLAGS = """
jax.config.update("jax_cuda_visible_devices", "0,1")
mine = [options(), dict(os.environ)]
facts["visible"] = names(config.get_visible_devices("GPU"))
facts["growth"] = [config.get_memory_growth(gpu) for gpu in GPUS]
facts["too many"] = refused(config.set_logical_device_configuration, CPU, [L()] * 9)
config.set_logical_device_configuration(CPU, [L()] * 4)
facts["split"] = said()
facts["hidden"] = refused(config.set_visible_devices, GPUS[1:], "GPU")
config.set_visible_devices(GPUS[:1], "GPU")
facts["one"] = said()
facts["grow"] = [unchanged(config.set_memory_growth, GPUS[0], grow) for grow in (True, False)]
facts["grow said"] = said()
config.set_logical_device_configuration(GPUS[0], [L(1024)] * 2)
facts["limit"] = said()
facts["kept"] = mine == [options(), dict(os.environ)]
facts["words"] = settings.in_words()
facts["logical"] = len(config.list_logical_devices())
facts["devices"] = jax.device_count()
facts["left out"] = refused(mirror.device, jax.devices()[7])
facts["grow"].append(unchanged(config.set_memory_growth, GPUS[2], True))
facts["kept after the start"] = mine == [options(), dict(os.environ)]
"""

USERS_OPTIONS = """
jax.config.update("jax_cuda_visible_devices", "1,0")
mine = [options(), dict(os.environ)]
facts["too many"] = refused(config.set_logical_device_configuration, CPU, [L()] * 3)
config.set_logical_device_configuration(CPU, [L()] * 2)
facts["as many"] = said()
config.set_visible_devices(GPUS[:1], "GPU")
facts["one"] = said()
config.set_logical_device_configuration(GPUS[1], [L(), L()])
config.set_logical_device_configuration(GPUS[0], [L(1024)])
facts["limit"] = said()
config.set_visible_devices([], "GPU")
facts["none"] = said()
facts["kept"] = mine == [options(), dict(os.environ)]
facts["words"] = settings.in_words()
facts["logical"] = names(config.list_logical_devices())
"""

NO_START = """
facts["cuda"] = refused(config.list_logical_devices)
facts["strategy"] = refused(mirror.MirroredStrategy)
jax.config.update("jax_platforms", "nonsense")
facts["nonsense"] = refused(config.list_logical_devices)
facts["started"] = started()
jax.config.update("jax_platforms", "cpu")
config.set_logical_device_configuration(CPU, [L()] * 2)
facts["logical"] = names(config.list_logical_devices())
"""


@pytest.fixture(scope="module")
def flags() -> dict:
    return observe(
        USERS_FLAGS,
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
        USERS_OPTIONS,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
        JAX_NUM_CPU_DEVICES="2",
        JAX_PLATFORMS="cuda,cpu",
        XLA_PYTHON_CLIENT_MEM_FRACTION="0.3",
        STAND_IN_GPUS="3",
    )


def test_what_the_user_set_is_never_overwritten(flags, options):
    """The width of the pool, `PJRT_NPROC`, is among it."""
    assert flags["kept"]
    assert flags["kept after the start"]
    assert options["kept"]


def test_the_users_host_devices_win(flags, options):
    by = "XLA_FLAGS=--xla_force_host_platform_device_count=8"
    assert_warned(flags["split"], names=by, values=[8, 4])
    assert [flags["devices"], flags["logical"]] == [8, 4]
    assert_refused(flags["too many"], "RuntimeError", names=by, values=[8, 9])
    by = "jax_num_cpu_devices=2"
    assert_refused(options["too many"], "RuntimeError", names=by, values=[2, 3])
    assert options["as many"] == []
    assert options["logical"] == ["/device:CPU:0", "/device:CPU:1"]


def test_a_device_that_is_left_out_is_refused(flags):
    names = "(/device:CPU:0, /device:CPU:1, /device:CPU:2, /device:CPU:3)"
    values = [jax.devices("cpu")[7], names]
    assert_refused(flags["left out"], "InvalidDeviceError", values=values, fix="mirror.config")


def test_the_users_gpus_win(flags, options):
    assert flags["visible"] == gpu_names(0, 1)
    by = "jax_cuda_visible_devices='0,1'"
    assert_refused(flags["hidden"], "RuntimeError", names=by, values=gpu_names(0, 1, 2))
    by = "jax_cuda_visible_devices='1,0'"
    assert_warned(options["one"], names=by, values="/physical_device:GPU:0")


def test_the_users_platforms_win(flags, options):
    assert_warned(flags["one"], names="jax_platforms='cpu'", values="GPU")
    assert_warned(options["none"], names="jax_platforms='cuda,cpu'", values="GPUs")


def test_the_users_memory_wins(flags, options):
    assert flags["growth"] == [False, False, False]
    assert flags["grow"] == [True, True, True]
    by, over = "XLA_PYTHON_CLIENT_PREALLOCATE=true", "set_memory_growth(True)"
    assert_warned(flags["grow said"], names=by, fix=over)
    assert_warned(flags["limit"], names=["XLA_CLIENT_MEM_FRACTION=0.5", "memory_limit"])
    by = "XLA_PYTHON_CLIENT_MEM_FRACTION=0.3"
    assert_warned(options["limit"], names=[by, "memory_limit"])


def test_what_is_configured_is_said_with_the_reason(flags, options, monkeypatch):
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
        assert_words(settings.in_words()[:1], expected)


def test_a_backend_that_does_not_start_says_where_it_looked():
    facts = observe(NO_START, JAX_PLATFORMS="cuda")
    for fact, where in (("cuda", "cuda"), ("strategy", "cuda"), ("nonsense", "nonsense")):
        by, fix = f"jax_platforms='{where}'", "JAX_PLATFORMS=cpu"
        assert_refused(facts[fact], "InvalidDeviceError", names=by, fix=fix)
    assert not facts["started"]
    assert facts["logical"] == ["/device:CPU:0", "/device:CPU:1"]


def test_the_user_may_change_what_mirror_set(monkeypatch):
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


# Physical devices, as the driver and CUDA_VISIBLE_DEVICES have them.

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


@pytest.mark.parametrize(("wanted", "shown"), SHOWN)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(machine, wanted, shown):
    """By index, by UUID and its beginning, up to the first that names none; repeated, none."""
    found = machine(3, **({} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}))
    assert [device.name for device in found] == gpu_names(*range(len(shown)))
    uuids = [gpu.uuid for gpu in physical.gpus_of_process()]
    assert [int(uuid[4]) for uuid in uuids] == shown


def test_without_a_driver_there_are_no_gpus(machine, monkeypatch, caplog):
    assert machine(None) == []
    assert physical.driver_version() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    physical._visible.cache_clear()
    monkeypatch.setattr(physical, "_DRIVER", "/nowhere")
    monkeypatch.setattr(physical, "_DRIVER_OF_ROCM", "/nowhere")
    assert config.list_physical_devices() == [CPU]
    assert not physical.may_have_gpus()
    assert caplog.text == ""


def test_a_driver_that_cannot_be_asked_is_said_once(machine, monkeypatch, caplog):
    machine(None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(physical, "_DRIVER", "/")
    physical._say_what_is_missing.cache_clear()
    for _ in range(3):
        physical._visible.cache_clear()
        assert config.list_physical_devices("GPU") == []
    (line,) = (r.getMessage() for r in caplog.records if "nvidia-ml-py" in r.getMessage())
    assert_message(line, names="nvidia-ml-py", fix="pip install nvidia-ml-py")
    physical._say_what_is_missing.cache_clear()


def test_the_driver_is_known(machine):
    machine(1)
    assert physical.driver_version() == "570.1"


# Everything that is refused.


@pytest.mark.parametrize("device", [OTHER, "CPU:0", "/device:CPU:0", None, 3, jax.devices])
def test_an_unknown_physical_device_is_refused(gpus, device):
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


def test_a_physical_device_of_another_type_is_refused(gpus):
    said = {"values": [repr(gpus[0]), "CPU"], "fix": LIST}
    refuses(ValueError, said, config.set_visible_devices, [CPU, gpus[0]], "CPU")
    said = {"values": [repr(CPU), "GPU"], "fix": LIST}
    refuses(ValueError, said, config.set_visible_devices, CPU, "GPU")


@pytest.mark.parametrize("type", ["gpu", "TPU", "", 3])
def test_visible_devices_of_no_type_are_refused(type):
    said = {"names": "device_type", "values": [repr(type), "'CPU'", "'GPU'"]}
    refuses(ValueError, said, config.set_visible_devices, [], type)


@pytest.mark.parametrize("devices", [None, 3, jax.devices])
def test_visible_devices_that_are_no_list_are_refused(devices):
    said = {"values": f"({type(devices).__name__})", "fix": LIST}
    refuses(TypeError, said, config.set_visible_devices, devices, "GPU")


@pytest.mark.parametrize("parts", [3, None, L(), [None], [L(), 1024], [L], "ab"])
def test_parts_that_are_no_configurations_are_refused(parts):
    said = {"values": f"({type(parts).__name__})", "fix": CONFIGURATION}
    refuses(TypeError, said, config.set_logical_device_configuration, CPU, parts)


def test_no_parts_are_refused(gpus):
    for device in (CPU, gpus[0]):
        said = {"values": device.name, "fix": CONFIGURATION}
        refuses(ValueError, said, config.set_logical_device_configuration, device, [])


@pytest.mark.parametrize("limit", [0, -1, "1024", True, float("nan"), float("inf"), [1]])
def test_a_limit_is_a_positive_number(limit):
    with raises(ValueError, names="memory_limit", values=[repr(limit), "MiB"], fix="1024"):
        L(limit)


def test_a_configuration_is_a_value():
    assert L() == L(None) != L(1024)
    assert repr(L(1.5)) == "LogicalDeviceConfiguration(memory_limit=1.5)"
    with pytest.raises(AttributeError):
        setattr(L(), "memory_limit", 3)  # noqa: B010


def test_limits_that_xla_cannot_keep_are_refused(machine):
    small, silent = machine(2, STAND_IN_MIB="1024,-")
    split = config.set_logical_device_configuration
    said: dict = {"names": "memory_limit", "values": ["[9, None]", small.name]}
    refuses(ValueError, said, split, small, [L(9), L()])
    said = {"names": "memory_limit", "values": ["[600, 600]", small.name, 1200, 1024]}
    refuses(ValueError, said, split, small, [L(600), L(600)])
    said = {"values": ["[1]", silent.name], "fix": "XLA_CLIENT_MEM_FRACTION"}
    refuses(ValueError, {"names": "memory_limit", **said}, split, silent, [L(1)])


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_a_switch_is_a_bool(gpus, value):
    values = [repr(value), True, False]
    said = {"names": "enable", "values": values}
    refuses(TypeError, said, config.set_memory_growth, gpus[0], value)
    said = {"names": "enabled", "values": values}
    refuses(TypeError, said, config.set_soft_device_placement, value)


# What JAX's GPUs are called, with GPUs that only look like JAX's.


class FakeGpu(NamedTuple):
    id: int
    platform: str = "gpu"


def fake_gpus(monkeypatch, count: int) -> list:
    found = [FakeGpu(i) for i in range(count)]

    def local_devices(backend=None):
        if backend in (None, "gpu"):
            return list(found)
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", local_devices)
    return found


def test_parts_of_a_gpu_are_logical_devices_on_it(gpus, monkeypatch):
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


def test_gpus_that_the_driver_does_not_list_are_logical_devices(machine, monkeypatch):
    machine(1)
    first, second = fake_gpus(monkeypatch, 2)
    assert backend.default_devices() == (first, second)
    assert backend.physical_of(second) is None


def test_no_devices_at_all_is_an_error(gpus, monkeypatch):
    fake_gpus(monkeypatch, 3)
    monkeypatch.setattr(state, "_state", state.State(visible_gpus=()))
    names, fix = ["mirror.config", "jax_platforms"], "JAX_PLATFORMS=cuda,cpu"
    with raises(mirror.InvalidDeviceError, names=names, values=["GPU", "CPU"], fix=fix):
        config.list_logical_devices()


def test_parts_of_a_gpu_are_the_gpu_as_often(gpus, monkeypatch):
    first, second = fake_gpus(monkeypatch, 2)
    monkeypatch.setattr(state, "_state", state.State(logical={gpus[0]: (L(), L())}))
    assert canonicalize_replica_devices(None) == (first, first, second)
    assert canonicalize_replica_devices(["GPU:1", "gpu:0"]) == (first, first)
    with raises(ValueError, values="(/device:GPU:0, /device:GPU:0, /device:GPU:2)"):
        mirror.MirroredStrategy()


FORCED = [
    ("", None),
    ("--xla_force_host_platform_device_count=4", 4),
    ("--xla_force_host_platform_device_count=4 --xla_force_host_platform_device_count=2", 2),
    ("--xla_cpu_multi_thread_eigen=false", None),
]


@pytest.mark.parametrize(("flags", "count"), FORCED)
def test_the_last_flag_for_host_devices_counts(monkeypatch, flags, count):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert start.forced_host_devices() == count
