"""The cluster of the tests that run on Ray."""

import pytest

from mirror._src.ps.ray_cluster import Connection


@pytest.fixture(scope="module")
def ray_cluster():
    """A cluster of Ray on this machine, which the strategies of one module share."""
    connection = Connection(None)
    yield
    connection.close()
