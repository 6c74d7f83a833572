"""A `ParameterServerStrategy` says what replaces the methods of the other strategies."""

import mirror
from tests.support import inside
from tests.support.messages import raises

ELSEWHERE, ADVICE = inside.replacements()
SERVED = mirror.ps.ParameterServerStrategy
OTHERS = (mirror.MirroredStrategy, mirror.OneDeviceStrategy, mirror.MultiWorkerMirroredStrategy)


def test_every_method_of_other_strategies_has_a_replacement():
    names = {name for kind in OTHERS for name in dir(kind) if name[0] != "_"}
    names |= {name for owner, name in ADVICE if owner == "strategy"}
    lacking = {name for name in names if not hasattr(SERVED, name)} - ELSEWHERE.keys()
    assert lacking == {"configure", "extended", "update_config_proto"}  # of no strategy
    assert not [name for name in ELSEWHERE if hasattr(SERVED, name)]


def test_error_names_the_replacement(subtests):
    for name in ELSEWHERE:
        with subtests.test(msg=name):
            strategy = object.__new__(SERVED)
            with raises(
                AttributeError, names=["ParameterServerStrategy", name], fix=ELSEWHERE[name]
            ):
                getattr(strategy, name)


def test_misspelled_names_are_corrected():
    with raises(AttributeError, names="scop", fix="strategy.scope"):
        object.__new__(SERVED).scop  # noqa: B018 - the error is what is tested


def test_names_in_the_texts_exist():
    for text in ELSEWHERE.values():
        for owner, kind in (
            ("strategy.", SERVED),
            ("coordinator.", mirror.ps.ClusterCoordinator),
            ("trainer.", mirror.Trainer),
            ("mirror.", mirror),
        ):
            for part in text.split(owner)[1:]:
                name = part.split("(")[0].split(",")[0].split(".")[0].split(":")[0].split(" ")[0]
                assert hasattr(kind, name), text
