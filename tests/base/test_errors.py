"""`require_secs`: one check for every argument that is a number of seconds."""

import functools

import numpy as np

import mirror
from mirror._src.base.errors import require_secs
from tests.support.messages import raises

INITIALIZE = ("heartbeat_secs", "shutdown_secs", "initialization_secs", "agreement_secs")


def initialize(name, secs):
    mirror.distributed.initialize(**{name: secs})


USERS = {
    "watch": ("secs", lambda secs: mirror.debugging.watch(secs)),
    "Checkpoint": ("grace_secs", lambda secs: mirror.callbacks.Checkpoint("x", grace_secs=secs)),
    "barrier": ("timeout_secs", lambda secs: mirror.distributed.barrier("x", secs)),
    **{name: (name, functools.partial(initialize, name)) for name in INITIALIZE},
}
REJECTED = [
    (0, ValueError),
    (-1.5, ValueError),
    (float("nan"), ValueError),
    (float("inf"), ValueError),
    (1e300, ValueError),
    (True, TypeError),
    ("60", TypeError),
    (None, TypeError),
]


def test_numbers_of_seconds_are_checked_alike(subtests):
    for secs, error in REJECTED:
        for user in USERS:
            with subtests.test(msg=f"{secs}, {error}, {user}"):
                name, call = USERS[user]
                with raises(error, names=f"`{name}`", values=repr(secs), fix=f"{name}="):
                    call(secs)


def test_numbers_of_seconds_become_floats(subtests):
    for secs in [3, 0.5, np.int64(3), np.float32(0.5)]:
        with subtests.test(msg=str(type(secs))):
            assert type(require_secs("secs", secs)) is float
            assert require_secs("secs", secs) == secs
