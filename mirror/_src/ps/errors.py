"""The errors of the scheduler, with their messages."""

from mirror._src.base.modules import set_module


@set_module("mirror.ps")
class ParameterServerLostError(RuntimeError):
    """Raised when the values on a parameter server are lost and no snapshot can replace them.

    Model and optimizer have the values of the last `join` or checkpoint, from which training can
    continue.

    >>> issubclass(mirror.ps.ParameterServerLostError, RuntimeError)
    True
    """


def no_snapshot(server: int | None, progress: str) -> str:
    """Returns the message for a lost server without snapshots."""
    return (
        f"{_name(server)} was lost after {progress}, and there is no snapshot of its values."
        " Restore a checkpoint, or pass `snapshot_every=100` to recover from snapshots."
    )


def lost_again(server: int | None, progress: str, num_losses: int) -> str:
    """Returns the message for servers that are lost again and again."""
    return (
        f"{_name(server)} was lost after {progress}: {num_losses} losses without a new result."
        " Check the memory of the parameter servers, then restore a checkpoint."
    )


def workers_gone(num_workers: int) -> RuntimeError:
    """Returns the error for tasks that no worker is left for."""
    return RuntimeError(
        f"All {num_workers} workers are lost and will not be restarted, so scheduled functions"
        " cannot run. Check the log of Ray, and the number of machines."
    )


def worker_lost_again(task: int, num_losses: int) -> RuntimeError:
    """Returns the error for a task whose workers are lost again and again."""
    return RuntimeError(
        f"{num_losses} workers were lost while they ran scheduled function {task}. Check what it"
        " does to its process: for example, how much memory it takes."
    )


def _name(server: int | None) -> str:
    return "A parameter server" if server is None else f"Parameter server {server}"
