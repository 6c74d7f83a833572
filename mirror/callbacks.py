"""Callbacks for `Trainer.fit`.

Pass them as `trainer.fit(data, callbacks=[mirror.callbacks.Checkpoint("ckpt")])`. To write your
own, subclass `Callback` and override the hooks you need.
"""

from mirror._src.base.tracebacks import make_public as _make_public
from mirror._src.training.callbacks.callback import Callback as Callback
from mirror._src.training.callbacks.checkpoints import Checkpoint as Checkpoint
from mirror._src.training.callbacks.ema import EMA as EMA
from mirror._src.training.callbacks.logs import CSVLogger as CSVLogger
from mirror._src.training.callbacks.logs import LearningRate as LearningRate
from mirror._src.training.callbacks.logs import Log as Log
from mirror._src.training.callbacks.logs import Profiler as Profiler
from mirror._src.training.callbacks.logs import TensorBoard as TensorBoard
from mirror._src.training.callbacks.logs import Throughput as Throughput
from mirror._src.training.callbacks.progress_bar import ProgressBar as ProgressBar
from mirror._src.training.callbacks.stopping import EarlyStopping as EarlyStopping
from mirror._src.training.callbacks.stopping import NaNGuard as NaNGuard
from mirror._src.training.callbacks.trackers import Tracker as Tracker
from mirror._src.training.loop import FitLoop as FitLoop

_make_public("mirror.callbacks")
