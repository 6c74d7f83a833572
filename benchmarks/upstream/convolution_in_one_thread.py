"""XLA:CPU's library YNN computes a large convolution in one thread; Eigen uses all of them."""

import time

from timed import compare, conv

_OPTION = "xla_cpu_experimental_ynn_fusion_type"
_OTHERS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"

compare(
    "a 3x3 convolution, elapsed",
    {"by YNN": conv, "by Eigen": lambda x, w: conv(x, w)},
    (64, 28, 28, 32),
    (3, 3, 32, 64),
    options=[{}, {_OPTION: _OTHERS}],
    clock=time.perf_counter,
)
