"""`mirror.History`: per-epoch metrics as a dict, a table and a plot."""

import json
import sys

import numpy as np
import pytest

import mirror
from tests.support.messages import raises


def history(*epochs):
    """Returns a history of epochs with these metrics."""
    found = mirror.History()
    for epoch, logs in enumerate(epochs):
        found.add(epoch, logs, 0.25)
    return found


@pytest.fixture
def three():
    """Three epochs, one with more and one with fewer metrics."""
    found = history({"loss": 2.0}, {"loss": 1.0, "val_loss": 1.5, "accuracy": 0.75})
    found.add(2, {"accuracy": 1.0}, 12.0)
    return found


def assert_same(got, wanted):
    assert list(got) == list(wanted)
    for name in wanted:
        np.testing.assert_array_equal(got[name], wanted[name])


def test_history_is_a_dict_of_one_number_per_epoch(three):
    nan = np.nan
    wanted = {"loss": [2, 1, nan], "val_loss": [nan, 1.5, nan], "accuracy": [nan, 0.75, 1]}
    assert_same(three, wanted)
    assert_same(dict(three), wanted)
    assert len(three) == 3
    assert "loss" in three
    assert "recall" not in three
    assert three.get("recall") is None
    assert three.epochs == [0, 1, 2]
    assert three.epoch_secs == [0.25, 0.25, 12.0]
    three.add_to_last({"learning_rate": 0.5, "accuracy": 0.5})
    assert three["accuracy"][-1] == 0.5
    np.testing.assert_array_equal(three["learning_rate"], [nan, nan, 0.5])


def test_history_names_its_metrics_in_errors(three):
    with raises(KeyError, names=["'recall'", "loss", "val_loss", "accuracy"]):
        three["recall"]
    with raises(KeyError, names="'loss'"):
        mirror.History()["loss"]


def test_history_prints_one_row_per_epoch(three):
    assert three.table.headings == ("epoch", "loss", "val_loss", "accuracy", "seconds")
    assert three.table.rows[1] == ("2", "1", "1.5", "0.75", "0.2")
    assert repr(three) == repr(three.table)
    assert repr(three).splitlines()[-1].split() == ["3", "nan", "nan", "1", "12.0"]
    assert repr(mirror.History()) == "History of no epochs"


def test_history_shows_table_and_curves_in_a_notebook(three, monkeypatch):
    shown = three._repr_html_()
    assert shown.startswith("<table>")
    assert shown.count("<svg") == 1
    assert shown.rstrip().endswith("</svg>")
    assert "<svg" not in history({"loss": 1.0})._repr_html_()
    assert mirror.History()._repr_html_() == "<p>History of no epochs</p>"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert three._repr_html_() == three.table._repr_html_()


def test_history_escapes_names_in_html():
    assert "<b>" not in history({"<b>": 1.0})._repr_html_()


def test_plot_draws_each_metric_with_its_validation(subtests, three, tmp_path_factory):
    for ending in ["png", "svg"]:
        with subtests.test(msg=ending):
            tmp_path = tmp_path_factory.mktemp("row")
            file = tmp_path / f"curves.{ending}"
            figure = three.plot(file)
            assert file.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
            loss, accuracy = figure.axes
            assert [axes.get_title() for axes in figure.axes] == ["loss", "accuracy"]
            assert [line.get_label() for line in loss.lines] == ["training", "validation"]
            assert [line.get_label() for line in accuracy.lines] == ["training"]
            np.testing.assert_array_equal(loss.lines[0].get_xdata(), [1, 2, 3])
            np.testing.assert_array_equal(loss.lines[0].get_ydata(), [2, 1, np.nan])


def test_plot_draws_validation_without_training():
    figure = history({"loss": 1.0, "val_recall": 0.5}).plot()
    assert figure._repr_png_().startswith(b"\x89PNG")  # as a notebook shows it
    assert [axes.get_title() for axes in figure.axes] == ["loss", "val_recall"]
    assert [len(axes.lines) for axes in figure.axes] == [1, 1]


def test_plot_rejects_an_empty_history():
    with raises(ValueError, names="History", fix="trainer.fit"):
        mirror.History().plot()


def test_plot_requires_matplotlib(three, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    install = 'pip install ".[train]"'
    with raises(ModuleNotFoundError, names="matplotlib", fix=install):
        three.plot()


def test_history_round_trips_through_json(three):
    text = json.dumps(three.to_dict())
    again = mirror.History.from_dict(json.loads(text))
    assert_same(again, three)
    assert (again.epochs, again.epoch_secs) == (three.epochs, three.epoch_secs)
    again.add(3, {"loss": 0.5}, 1.0)
    assert again["loss"][-1] == 0.5
    assert len(three["loss"]) == 3  # a copy


def test_history_of_keras_is_the_history():
    history = mirror.History()
    history.add(0, {"loss": 1.0, "accuracy": 0.5}, 1.0)
    with raises(AttributeError, fix="history['loss']"):
        _ = history.history
    with raises(KeyError, names="'accurac'", fix="'accuracy'"):
        history["accurac"]
