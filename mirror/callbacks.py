"""What happens beside a training.

`trainer.fit(data, callbacks=[mirror.callbacks.Checkpoint("ckpt")])`. Derive your own from
`Callback`, and override what you need.
"""

from mirror.training.callbacks.checkpoints import Checkpoint as Checkpoint
from mirror.training.callbacks.logs import CSVLogger as CSVLogger
from mirror.training.callbacks.logs import LearningRate as LearningRate
from mirror.training.callbacks.logs import TensorBoard as TensorBoard
from mirror.training.callbacks.profiling import Profiler as Profiler
from mirror.training.callbacks.progress import ProgressBar as ProgressBar
from mirror.training.callbacks.stopping import EarlyStopping as EarlyStopping
from mirror.training.callbacks.stopping import NaNGuard as NaNGuard
from mirror.training.fit import Callback as Callback
from mirror.training.fit import Fit as Fit
