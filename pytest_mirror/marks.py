"""The mark `mirror`, and the fixture `strategy` that it is for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_mirror.settings import EXECUTORS, SETTINGS, is_secs

if TYPE_CHECKING:
    import mirror

_KEYWORDS = ("replicas", "executors", "timeout")


@dataclass(frozen=True)
class Layout:
    """How many replicas a test runs on, and by which executor.

    Attributes:
        executor: one of `EXECUTORS`.
        replicas: `None`: one on each device.
    """

    executor: str
    replicas: int | None

    def __str__(self) -> str:
        return f"{self.executor}-{'all' if self.replicas is None else self.replicas}"

    @property
    def num_devices(self) -> int:
        """How many devices it needs."""
        return 1 if self.executor == "vmap" or self.replicas is None else self.replicas


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a marked test once for each layout; an error in a mark is one of collection."""
    layouts = _layouts(metafunc.definition, metafunc.fixturenames)
    if layouts:
        metafunc.parametrize("_mirror_layout", layouts, ids=str)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Checks the marks of tests that nothing generates, such as those of a `TestCase`."""
    _layouts(item, getattr(item, "fixturenames", ()))


def marked(node: pytest.Item) -> dict[str, Any]:
    """The keywords of the marks, checked; the one that is closest to the test wins."""
    found: dict[str, Any] = {}
    for mark in node.iter_markers("mirror"):
        if mark.args:
            _refuse(node, f"{mark.args[0]!r} has no keyword. Say which: {', '.join(_KEYWORDS)}")
        for name, value in mark.kwargs.items():
            if name not in _KEYWORDS:
                _refuse(node, f"there is no keyword {name!r}. There are {', '.join(_KEYWORDS)}")
            found.setdefault(name, value)
    if "timeout" in found and not is_secs(found["timeout"]):
        _refuse(node, f"timeout={found['timeout']!r} is no time in seconds. Say 0 for no limit")
    for name in ("replicas", "executors"):
        if name in found:
            found[name] = _several(node, name, found[name])
    return found


def _several(node: pytest.Item, name: str, value: Any) -> Sequence[Any]:
    """One value, or several that differ, checked."""
    values = tuple(value) if isinstance(value, list | tuple | range) else (value,)
    for one in values:
        if name == "executors" and one not in EXECUTORS:
            _refuse(node, f"there is no executor {one!r}. There are {', '.join(EXECUTORS)}")
        if name == "replicas" and (isinstance(one, bool) or not isinstance(one, int) or one < 1):
            _refuse(node, f"replicas={value!r}: {one!r} is no number of replicas. Say 1 or more")
    if not values or len(set(values)) < len(values):
        what = "repeats some" if values else "is empty"
        _refuse(node, f"{name}={value!r} {what}. Name each once, or leave it out")
    return values


def _layouts(node: pytest.Item, fixtures: Sequence[str]) -> list[Layout]:
    """In the order of the mark, so that all processes of a run agree."""
    found = marked(node)
    if not found.keys() & {"replicas", "executors"}:
        return []
    if "_mirror_layout" not in fixtures:
        if any(m.name == "mirror" and m.kwargs.keys() - {"timeout"} for m in node.own_markers):
            _refuse(node, "the test does not use the fixture `strategy`. Take it as an argument")
        return []  # the mark is of a class or a module, and for its other tests
    replicas = found.get("replicas", [None])
    return [Layout(e, n) for e in found.get("executors", ["pmap"]) for n in replicas]


def _refuse(node: pytest.Item, why: str) -> None:
    pytest.fail(f"@pytest.mark.mirror on {node.nodeid}: {why}.", pytrace=False)


@pytest.fixture
def _mirror_layout() -> Layout | None:
    """Where the mark says nothing of layouts."""
    return None


@pytest.fixture
def strategy(
    request: pytest.FixtureRequest, _mirror_layout: Layout | None
) -> "mirror.MirroredStrategy":
    """A strategy as the mark says; without one, over all devices, with what suits them.

    With `--mirror-devices` the replicas are on host devices, also where there are accelerators.
    """
    from mirror import MirroredStrategy  # brings JAX
    from mirror._src.testing import plugin_support

    on_host = request.config.stash[SETTINGS].devices is not None
    devices = plugin_support.devices_for_tests(on_host=on_host)
    if _mirror_layout is None:
        return MirroredStrategy(devices if on_host else None)
    needed = _mirror_layout.num_devices
    if len(devices) < needed:
        pytest.fail(
            f"{request.node.nodeid} needs {needed} devices, and there are {len(devices)}: "
            f"{', '.join(map(str, devices))}. Run pytest with --mirror-devices={needed}, on host "
            "devices.",
            pytrace=False,
        )
    return plugin_support.make_strategy(_mirror_layout.executor, _mirror_layout.replicas, devices)
