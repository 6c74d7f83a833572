"""The cluster of the tests that run on Ray, and its strategy."""

import pytest

import mirror
from tests.ps.trained import SMALL
from tests.support import fast, inside


def _connection():
    """Connects to a new cluster; again if the machine is so busy that Ray gives it 30 s in vain."""
    for _ in range(4):
        try:
            return inside.connection_to_ray()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return inside.connection_to_ray()


@pytest.fixture(scope="package")
def ray_cluster():
    """The cluster of Ray on this machine, which all strategies of this folder share."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fast.ENVIRONMENT.items():  # the processes of Ray inherit it
            patch.setenv(name, value)
        connection = _connection()
    yield
    connection.close()


@pytest.fixture(scope="package")
def on_ray(ray_cluster):
    """Two servers and two workers, which files share: each process takes seconds to start."""
    options = {"ps": 2, "workers": 2, "partitioner": SMALL, "snapshot_every": 7}
    with mirror.ps.ParameterServerStrategy(**options) as strategy:
        yield strategy


@pytest.fixture(scope="package")
def one_worker(ray_cluster):
    """Two servers and one worker, whose asynchronous steps run one after the other."""
    options = {"ps": 2, "workers": 1, "partitioner": SMALL, "staleness": None}
    with mirror.ps.ParameterServerStrategy(**options) as strategy:
        yield strategy
