"""`Tracker`: a run of Weights & Biases, MLflow, Trackio, Aim or TensorBoard."""

import contextlib
import inspect
import operator
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, final

from mirror._src.base.errors import expected, nearest
from mirror._src.base.naming import warn_user
from mirror._src.base.optional import require
from mirror._src.base.public_names import set_module
from mirror._src.cluster.store import is_chief
from mirror._src.training.callbacks.callback import Callback
from mirror._src.training.callbacks.logs import Log
from mirror._src.training.loop import FitLoop
from mirror._src.training.paths import fetched, path_of_argument, shorten

Library: TypeAlias = Literal["wandb", "mlflow", "trackio", "aim", "tensorboard"]


class _Library(NamedTuple):
    """A library as `Tracker` calls it. Its functions receive the module and the run.

    Attributes:
        creator: Name of the function that starts a run and receives the options.
        known: The attribute by which a run is known later.
        option: The option of `creator` that continues a known run.
        again: Other options that continue one.
        configure: Logs the configuration of a new run; None if it is an option of `creator`.
        log: Logs metrics and the step.
        add: Stores a file or a directory.
        close: Ends the run, which is "FINISHED" or "FAILED".
    """

    creator: str
    known: str
    option: str
    again: dict[str, Any]
    configure: Callable[[Any, Any, dict[str, Any]], Any] | None
    log: Callable[[Any, Any, dict[str, float], int], Any]
    add: Callable[[Any, Any, Path], Any]
    close: Callable[[Any, Any, str], Any]


def _add_to_mlflow(library: Any, run: Any, path: Path) -> None:  # noqa: ARG001
    if path.is_dir():
        library.log_artifacts(str(path), artifact_path=path.name)
    else:
        library.log_artifact(str(path))


def _add_to_aim(library: Any, run: Any, path: Path) -> None:  # noqa: ARG001
    if run.artifacts_uri is None:
        run.set_artifacts_uri(f"file://{run.repo.path}/artifacts")
    add = run.log_artifacts if path.is_dir() else run.log_artifact
    add(str(path), name=path.name, block=True)


def _add_to_tensorboard(library: Any, run: Any, path: Path) -> None:  # noqa: ARG001
    raise ValueError(f"TensorBoard does not store files such as {path}")


_LIKE_WANDB: dict[str, Any] = {
    "again": {"resume": "allow"},
    "configure": None,
    "log": lambda _, run, metrics, step: run.log(metrics, step=step),
    "add": lambda _, run, path: run.log_artifact(str(path), name=path.name, type="file"),
}
_LIBRARIES: Mapping[str, _Library] = {
    "wandb": _Library(
        *("wandb.init", "id", "id"),
        **_LIKE_WANDB,
        close=lambda _, run, status: run.finish(exit_code=int(status == "FAILED")),
    ),
    "mlflow": _Library(
        *("mlflow.start_run", "info.run_id", "run_id", {}),
        configure=lambda library, _, config: library.log_params(config),
        log=lambda library, _, metrics, step: library.log_metrics(metrics, step=step),
        add=_add_to_mlflow,
        close=lambda library, _, status: library.end_run(status),
    ),
    "trackio": _Library(
        *("trackio.init", "name", "name"),
        **_LIKE_WANDB,
        close=lambda _, run, __: run.finish(),
    ),
    "aim": _Library(
        *("aim.Run", "hash", "run_hash", {}),
        configure=lambda _, run, config: operator.setitem(run, "config", config),
        log=lambda _, run, metrics, step: run.track(metrics, step=step),
        add=_add_to_aim,
        close=lambda _, run, __: run.close(),
    ),
    "tensorboard": _Library(
        *("tensorboardX.SummaryWriter", "logdir", "logdir", {}),
        configure=lambda _, run, config: run.add_text("config", f"```\n{config}\n```"),
        log=lambda _, run, metrics, step: [run.add_scalar(*each, step) for each in metrics.items()],
        add=_add_to_tensorboard,
        close=lambda _, run, __: run.close(),
    ),
}


@set_module("mirror.callbacks")
@final
class Tracker(Callback):
    """Logs configuration, metrics and files to a run of an experiment tracker.

    `fit` starts the run and ends it. If the training resumes, from a checkpoint or after an
    interrupt, it continues the same run. An error of the tracker, such as a missing login or
    network, is a warning, and training continues without it.

    | library | passes options to |
    | --- | --- |
    | `"wandb"` | `wandb.init`, such as `project`, `name` and `mode` |
    | `"mlflow"` | `mlflow.start_run`; `mlflow.set_experiment` chooses the experiment |
    | `"trackio"` | `trackio.init`, such as `project` and `space_id` |
    | `"aim"` | `aim.Run`, such as `repo` and `experiment` |
    | `"tensorboard"` | `tensorboardX.SummaryWriter`, such as `logdir` |

    Args:
        library: Name of the library, which must be installed.
        config: Hyperparameters of the run by name.
        every_steps: Number of steps between additional entries, in which the names of metrics start
            with `step_`. 0 logs epochs only.
        options: Options of the library.

    Raises:
        ModuleNotFoundError: If the library is not installed.
        ValueError: If its name is unknown or `every_steps` is negative.
        TypeError: If the library does not have one of the options, or an argument has the wrong
            type.

    >>> tracker = Tracker("tensorboard", logdir="board", config={"rate": 0.1})
    >>> history = trainer.fit(data, callbacks=tracker, progress=False)
    """

    runs_on_chief_only: ClassVar[bool] = True

    def __init__(
        self,
        library: Library,
        *,
        config: Mapping[str, Any] | None = None,
        every_steps: int = 0,
        **options: Any,
    ) -> None:
        if library not in _LIBRARIES:
            fix = f"Choose from: {', '.join(_LIBRARIES)}.{nearest(str(library), [*_LIBRARIES])}"
            raise ValueError(expected("library", library, "the name of a tracker", fix))
        self._name, self._library = library, _LIBRARIES[library]
        if not isinstance(config, Mapping | None):
            raise TypeError(expected("config", config, "a dict of hyperparameters"))
        creator = self._library.creator
        module = creator.partition(".")[0]
        self._module = require(module, f"Tracker({library!r})", extra=None)
        self._create = operator.attrgetter(creator.removeprefix(f"{module}."))(self._module)
        try:
            inspect.signature(self._create).bind(**options)
        except TypeError as error:
            raise TypeError(f"{creator} cannot take these options: {error}.") from None
        self._options, self._config = options, dict(config or {})
        self._log = Log(
            lambda metrics, step: self._call(self._library.log, metrics, step),
            every_steps=every_steps,
        )
        self._known: str | None = None
        self._resumed: str | None = None
        self._run: Any = None

    def log_artifact(self, *paths: str | Path) -> None:
        """Adds files and directories to the run, such as checkpoints or an exported model.

        Call it in a callback or after `fit`, whose run it continues for this. TensorBoard does not
        store files.

        Args:
            paths: Local paths, or URLs of an object store.

        Raises:
            FileNotFoundError: If one does not exist.
            OSError: If a store cannot be read.
            RuntimeError: If `fit` has not started a run.
        """
        if not is_chief():
            return
        sources = [path_of_argument("path", path) for path in paths]
        for source in sources:
            if not source.exists():
                raise FileNotFoundError(f"{source} does not exist. Pass a file or a directory.")
        if self._known is None:
            raise RuntimeError(
                f"The {self._name} run has not started. Call log_artifact after trainer.fit(..., "
                "callbacks=tracker)."
            )
        was_open = self._run is not None
        if was_open or self._open():
            with tempfile.TemporaryDirectory() as folder:
                for source in sources:
                    self._call(self._library.add, fetched(source, folder))
            if not was_open:
                self._close("FINISHED")

    def on_fit_begin(self, fit: FitLoop) -> None:
        """Starts the run, or continues it if the training resumes."""
        self._known, self._resumed = self._resumed, None
        self._open()
        self._log.on_fit_begin(fit)

    def on_metrics(self, fit: FitLoop, step: int, logs: dict[str, float]) -> None:
        """Logs the metrics of a step, if they are due."""
        self._log.on_metrics(fit, step, logs)

    def on_epoch_end(self, fit: FitLoop, logs: dict[str, float]) -> None:
        """Logs the metrics of the epoch."""
        self._log.on_epoch_end(fit, logs)

    def on_fit_end(self, fit: FitLoop) -> None:
        """Ends the run."""
        self._close("FINISHED" if fit.is_complete else "FAILED")

    def to_dict(self) -> dict[str, Any]:
        """Returns how the run is known."""
        return {} if self._known is None else {"library": self._name, "run": self._known}

    def from_dict(self, state: dict[str, Any]) -> None:
        """Continues the run of a checkpoint."""
        if state["library"] == self._name:
            self._resumed = str(state["run"])

    def _open(self) -> bool:
        """Starts a run, or continues the known one; returns whether it could."""
        known, library, options = self._known, self._library, dict(self._options)
        if known is not None:
            options |= {library.option: known, **library.again}
        if library.configure is None:
            options["config"] = self._config

        def start() -> None:
            self._run = self._create(**options)
            self._known = str(operator.attrgetter(library.known)(self._run))
            if library.configure is not None and known is None and self._config:
                library.configure(self._module, self._run, self._config)

        self._attempt(start)
        return self._run is not None

    def _call(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function of the library if there is a run."""
        if self._run is not None:
            self._attempt(lambda: call(self._module, self._run, *arguments))

    def _attempt(self, call: Callable[[], Any]) -> None:
        """Makes an error a warning, and the end of the run."""
        try:
            call()
        except Exception as error:
            run, self._run = self._run, None
            if run is not None:
                with contextlib.suppress(Exception):
                    self._library.close(self._module, run, "FAILED")
            warn_user(f"{self._name} failed: {shorten(error)}. Training continues without it.")

    def _close(self, status: str) -> None:
        self._call(self._library.close, status)
        self._run = None
