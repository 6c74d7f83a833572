"""Tests with marks, which `tests/tools/test_plugin.py` copies and runs."""

import pytest


@pytest.mark.mirror(replicas=[1, 2, 4], executors=["pmap", "vmap", "staged"])
def test_sum(strategy, request):
    layout = request.node.callspec.id
    assert layout.endswith(f"-{strategy.num_replicas_in_sync}")
    assert float(strategy.reduce("sum", 1.0)) == strategy.num_replicas_in_sync
    assert len(set(strategy.devices)) == (1 if "vmap" in layout else int(layout[-1]))


@pytest.mark.mirror(executors="staged")
class TestMarks:
    def test_of_the_class(self, strategy):
        assert strategy.num_replicas_in_sync == 4

    @pytest.mark.mirror(replicas=2, timeout=60)
    def test_the_closest_wins(self, strategy):
        assert strategy.num_replicas_in_sync == 2

    def test_without_the_fixture(self):
        pass


@pytest.mark.parametrize("x", [1, 2])
def test_default(strategy, x):
    assert strategy.num_replicas_in_sync == len(set(strategy.devices)) == 4


@pytest.mark.mirror(replicas=8)
def test_needs_more(strategy):
    pass
