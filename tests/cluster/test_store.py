"""Messages through the coordination service: waiting, and what is asked of the coordinator."""

import types

import jax
import pytest

from mirror._src.cluster import store
from tests.support.messages import raises


class Client:
    """A client whose texts come after some requests that end at their deadlines."""

    def __init__(self, texts, late=0, error="DEADLINE_EXCEEDED: too late"):
        self.texts, self.late, self.error = texts, late, error
        self.millis = []

    def blocking_key_value_get(self, key, millis):
        self.millis.append(millis)
        if key not in self.texts or len(self.millis) <= self.late:
            raise jax.errors.JaxRuntimeError(self.error)
        return self.texts[key]

    def key_value_dir_get(self, directory):
        return [(key, text) for key, text in self.texts.items() if key.startswith(directory)]


@pytest.fixture
def use(monkeypatch):
    """Returns a function that makes a client the one of this process."""
    return lambda client: monkeypatch.setattr(store, "_client", lambda: client)


def test_a_waiting_thread_asks_once_a_minute(use):
    client = Client({"mirror/key": "text"}, late=3)
    use(client)
    assert store.wait("key") == "text"
    assert client.millis == [60_000] * 4


def test_ctrl_c_is_handled_every_half_second_while_the_main_thread_reads(use, monkeypatch):
    now = [0.0]
    client = Client({}, late=9)
    get = client.blocking_key_value_get

    def wait_and_get(key, millis):
        now[0] += millis / 1000
        return get(key, millis)

    client.blocking_key_value_get = wait_and_get
    monkeypatch.setattr(store, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    use(client)
    assert store.get("key", 1.2) is None
    assert client.millis[:2] == [500, 500]
    assert sum(client.millis) == pytest.approx(1200, abs=2)


@pytest.mark.parametrize("read", [store.wait, lambda key: store.get(key, 0.0)])
def test_a_lost_coordinator_is_named(use, read):
    use(Client({}, error="UNAVAILABLE: Socket closed"))
    with raises(RuntimeError, names="process 0", values="Socket closed", fix="start all processes"):
        read("key")


def test_an_error_that_ends_the_job_replaces_its_consequences_only(monkeypatch):
    ends = "Process 1 has failed: ValueError: row 3"
    monkeypatch.setattr(store, "stop", RuntimeError(ends))
    with pytest.raises(RuntimeError, match=ends):
        store.require_not_stopped(ValueError("Gloo all-reduce failed"))
    store.require_not_stopped(RuntimeError(ends))  # raised here, where the process has waited


def test_keys_are_relative_to_the_directory(use):
    use(Client({"mirror/a/0": "x", "mirror/a/text/0": "y", "mirror/ab/1": "z"}))
    assert store.get_all("a") == {"0": "x", "text/0": "y"}
    assert store.get_many("a", 1, 0.0, {}) == {0: "x"}
