"""Limits for the speed of `mirror`; benchmarks/README.md explains each of them."""

S1_PAIRED, S1_OWN, S1_LEAVES = (
    1.03,
    1.05,
    1.0,
)  # over the best by hand; the last: many leaves
S2_RATIO, S2_EXTRA_MS = 1.05, 0.5  # nnx objects over plain pytrees; on 602 variables
S3_STAGED, S3_ROWS = 1.4, 1.05
S4_LOWERED, S4_DEVICES = (
    1.2,
    1.3,
)  # time to lowered, over shard_map; most devices over fewest
C1_SECS = 3.0  # of a second start, up to the first step
S5_COPIES = 1.0
S6_RATIO = 1.0  # over TensorFlow, Keras, torch
S7_SLICES = 1.05  # over the best by hand
T1_FIT, T2_MANY_STEPS = 1.05, 0.7
MANY_LEAVES = ("leaves",)

_PLAIN_US, _PLAIN_US_PER_LEAF = 10.0, 0.1
_NNX_US, _NNX_US_PER_LEAF = 15.0, 0.2


def s1(model: str, general: float) -> float:
    """Returns the limit of a model: 1 with many small leaves, else `general`."""
    return S1_LEAVES if model in MANY_LEAVES else general


def dispatch_plain_us(leaves: int) -> float:
    """Returns the limit of the overhead of `run` over the dispatch of `jit`, for plain pytrees.

    For 100 leaves, 10 + 0.1 * 100 = 20 us.
    """
    return _PLAIN_US + _PLAIN_US_PER_LEAF * leaves


def dispatch_nnx_us(leaves: int) -> float:
    """Returns the limit for nnx objects. For 100 leaves, 15 + 0.2 * 100 = 35 us."""
    return _NNX_US + _NNX_US_PER_LEAF * leaves
