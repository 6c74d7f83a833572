"""The cluster of the tests that run on Ray."""

import pytest

from tests.support import inside


@pytest.fixture(scope="package")
def ray_cluster():
    """The cluster of Ray on this machine, which all strategies of this folder share."""
    connection = inside.connection_to_ray()
    yield
    connection.close()
