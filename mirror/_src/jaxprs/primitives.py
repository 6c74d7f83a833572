"""The table of JAX's primitives, and the axes that they move.

A new JAX release that adds a primitive adds it here, and only here.
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn


class Kind(enum.Flag):
    """Kinds of primitives, by what they do. A primitive may be of several kinds."""

    ELEMENTWISE = enum.auto()  # result[i] is computed from operand[i] of each operand
    ADDITION = enum.auto()  # adds or subtracts its operands
    LINEAR = enum.auto()  # linear in its only operand
    CASTING = enum.auto()  # changes the dtype or the precision
    PASSING = enum.auto()  # each result is the operand at its position
    SHAPING = enum.auto()  # the result consists of elements of its only operand
    PICKING = enum.auto()  # the result consists of elements of the first operand; the others choose
    JOINING = enum.auto()  # the result consists of elements of all operands
    REDUCTION = enum.auto()  # reduces the axes `axes`
    SCATTER = enum.auto()
    RACING = enum.auto()  # may be computed in another order in each run on a GPU
    GENERAL = enum.auto()  # any other pure function
    SAMPLER = enum.auto()  # samples random numbers with a key
    KEY = enum.auto()  # computes with keys
    REF_READ = enum.auto()  # reads a `Ref`
    REF_WRITE = enum.auto()  # creates, writes or frees a `Ref`
    CALLBACK = enum.auto()  # runs Python on the host
    STATEFUL = enum.auto()  # reads, or changes what others read, outside its operands and results
    COLLECTIVE = enum.auto()
    AXIS = enum.auto()  # differs between replicas, without communication
    CALL = enum.auto()  # evaluates its only inner program
    CONTROL = enum.auto()  # evaluates its inner programs in a way that `Interpreter` knows
    MAPPING = enum.auto()  # maps over devices


class Primitive(NamedTuple):
    """A row of the table.

    Attributes:
        kinds: All that it does.
        op: The operation that combines entries: entries that are neutral in it do not count. The
            reduction of a collective. Empty if it combines none, or in another way.
        collective: For a collective, its name in reports and messages.
        is_mirrored: Whether the proof relies on all replicas getting the same result if the
            collective spans the whole axis.
        runs_on_host: Whether the staged executor implements the collective.
    """

    kinds: Kind
    op: str = ""
    collective: str = ""
    is_mirrored: bool = False
    runs_on_host: bool = True


ALL_REDUCE = "all-reduce"
_ELEMENTWISE = """
abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
clamp clz complex cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igamma_grad_a igammac integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min
mul mulhi ne nextafter not one_minus_square or polygamma polynomial population_count pow reciprocal
regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square tan tanh xor zeta
"""
_SHAPING = "broadcast_in_dim broadcast_to reshape rev slice split squeeze tile transpose unstack"
_GENERAL = """
after_all cholesky cholesky_update create_token custom_lin dynamic_update_slice eig
empty empty2 ffi_call fft geqp3 geqrf hessenberg householder_product iota iota_2x32_shape lu
lu_pivots_to_permutation ormqr platform_index qr ragged_dot_general reduce reduce_window scaled_dot
schur select_and_gather_add select_and_scatter symmetric_product triangular_solve tridiagonal
tridiagonal_solve
"""
_KEYS = """
philox2x32 philox4x32 random_clone random_fold_in random_seed random_split random_unwrap random_wrap
threefry2x32 threefry4x32
"""
_CALLS = """
call call_hi_primitive closed_call composite compute_on custom_jvp_call custom_partitioning
custom_vjp_call custom_vmap_call eval_jaxpr jit linear_call remat2 remat_opt xla_metadata_call
"""
_PASSING = """
device_put ensure_mirrored layout_constraint optimization_barrier pvary reshard sharding_constraint
with_memory_space_constraint
"""
_REDUCTIONS = ("max", "min", "or", "and", "prod", "xor")
_ROWS = (
    (_ELEMENTWISE, Primitive(Kind.ELEMENTWISE)),
    ("add add_any sub", Primitive(Kind.ELEMENTWISE | Kind.ADDITION)),
    ("conj imag neg real", Primitive(Kind.ELEMENTWISE | Kind.LINEAR)),
    ("convert_element_type", Primitive(Kind.ELEMENTWISE | Kind.CASTING)),
    ("reduce_precision", Primitive(Kind.ELEMENTWISE | Kind.CASTING | Kind.LINEAR)),
    ("copy name stop_gradient", Primitive(Kind.ELEMENTWISE | Kind.PASSING)),
    (_PASSING, Primitive(Kind.PASSING)),
    (_SHAPING, Primitive(Kind.SHAPING)),
    ("dynamic_slice gather", Primitive(Kind.PICKING)),
    ("concatenate pad stack", Primitive(Kind.JOINING)),
    ("reduce_sum", Primitive(Kind.REDUCTION | Kind.LINEAR, "sum")),
    *((f"reduce_{op}", Primitive(Kind.REDUCTION, op)) for op in _REDUCTIONS),
    *((name, Primitive(Kind.REDUCTION, name)) for name in ("argmax", "argmin")),
    ("scatter", Primitive(Kind.SCATTER | Kind.RACING)),
    ("scatter-add scatter-sub", Primitive(Kind.SCATTER | Kind.RACING, "sum")),
    ("scatter-mul", Primitive(Kind.SCATTER | Kind.RACING, "prod")),
    ("scatter-max", Primitive(Kind.SCATTER, "max")),
    ("scatter-min", Primitive(Kind.SCATTER, "min")),
    ("conv_general_dilated select_and_scatter_add", Primitive(Kind.GENERAL | Kind.RACING)),
    ("cumsum reduce_window_sum", Primitive(Kind.GENERAL | Kind.LINEAR, "sum")),
    ("dot_general eigh svd", Primitive(Kind.GENERAL, "sum")),
    ("cumprod", Primitive(Kind.GENERAL, "prod")),
    ("approx_top_k cumlogsumexp cummax reduce_window_max top_k", Primitive(Kind.GENERAL, "max")),
    ("cummin reduce_window_min sort", Primitive(Kind.GENERAL, "min")),
    (_GENERAL, Primitive(Kind.GENERAL)),
    ("random_bits random_gamma rng_bit_generator", Primitive(Kind.SAMPLER)),
    (_KEYS, Primitive(Kind.KEY)),
    ("rng_uniform", Primitive(Kind.STATEFUL)),
    ("freeze get", Primitive(Kind.REF_READ)),
    ("accum_grad_in_ref addupdate empty_ref free_ref new_ref swap", Primitive(Kind.REF_WRITE)),
    ("debug_print pure_callback", Primitive(Kind.CALLBACK)),
    ("debug_callback io_callback", Primitive(Kind.CALLBACK | Kind.STATEFUL)),
    ("axis_index", Primitive(Kind.AXIS)),
    ("psum", Primitive(Kind.COLLECTIVE, "sum", ALL_REDUCE, is_mirrored=True)),
    ("pmax", Primitive(Kind.COLLECTIVE, "max", ALL_REDUCE, is_mirrored=True)),
    ("pmin", Primitive(Kind.COLLECTIVE, "min", ALL_REDUCE, is_mirrored=True)),
    ("all_gather", Primitive(Kind.COLLECTIVE, "", "all-gather", is_mirrored=True)),
    ("reduce_scatter", Primitive(Kind.COLLECTIVE, "sum", "reduce-scatter")),
    ("all_to_all", Primitive(Kind.COLLECTIVE, "", "all-to-all")),
    ("ragged_all_to_all", Primitive(Kind.COLLECTIVE, "", "ragged all-to-all", runs_on_host=False)),
    ("ppermute", Primitive(Kind.COLLECTIVE, "", "ppermute")),
    ("pbroadcast", Primitive(Kind.COLLECTIVE, "", "pbroadcast")),
    (_CALLS, Primitive(Kind.CALL)),
    ("cond custom_linear_solve scan while", Primitive(Kind.CONTROL)),
    ("shard_map xla_pmap", Primitive(Kind.MAPPING)),
)
_OF_BOOLEANS = {"or": "max", "and": "min"}
PRIMITIVES = {name: primitive for names, primitive in _ROWS for name in names.split()}


def of_kind(kind: Kind) -> frozenset[str]:
    """Returns the names of the primitives that are of any of these kinds."""
    return frozenset(name for name, primitive in PRIMITIVES.items() if primitive.kinds & kind)


ELEMENTWISE = of_kind(Kind.ELEMENTWISE)
ADDITION = of_kind(Kind.ADDITION)
LINEAR = of_kind(Kind.LINEAR)
CASTING = of_kind(Kind.CASTING)
PASSING = of_kind(Kind.PASSING)
SILENT = of_kind(Kind.PASSING | Kind.AXIS)  # may name an axis without communicating
SHAPING = of_kind(Kind.SHAPING)
PICKING = of_kind(Kind.PICKING)
JOINING = of_kind(Kind.JOINING)
REDUCTION = of_kind(Kind.REDUCTION)
SCATTER = of_kind(Kind.SCATTER)
RACING = of_kind(Kind.RACING)
SAMPLER = of_kind(Kind.SAMPLER)
KEY = of_kind(Kind.KEY)
REF_READ = of_kind(Kind.REF_READ)
CALLBACK = of_kind(Kind.CALLBACK)
STATEFUL = of_kind(Kind.STATEFUL)
CUSTOM_VJP = "custom_vjp_call"
GENERAL = of_kind(Kind.GENERAL)
CONTROL = of_kind(Kind.CONTROL)
CALL = of_kind(Kind.CALL)
MAPPING = of_kind(Kind.MAPPING)
SIMPLE = (ELEMENTWISE | SHAPING | PICKING | JOINING | REDUCTION | {"dot_general"}) - PASSING
"""Names of pure functions of arrays without inner programs, which most operations are."""


def shape_of(atom: Any) -> tuple[int, ...]:
    """Returns the shape of a value."""
    return tuple(atom.aval.shape)


def dtype_of(atom: Any) -> Any:
    """Returns the dtype of a value."""
    return atom.aval.dtype


def op_of(name: str, dtype: Any = None) -> str:
    """Returns the operation of a primitive; empty for one that has none or that is not known.

    It is `sum` for a mean of replicas too, which JAX divides after the all-reduce. For booleans,
    whose dtype is passed, `or` and `and` are `max` and `min`; for integers, they combine bits.
    """
    op = PRIMITIVES[name].op if name in PRIMITIVES else ""
    return _OF_BOOLEANS.get(op, op) if dtype == jnp.bool_ else op


MOVES = frozenset({"rev", "split", "squeeze", "tile", "transpose", "unstack"})


def axis_after(eqn: JaxprEqn, axis: int) -> int | None:
    """Returns where an axis is after an operation; `None` if it is mixed or removed.

    Args:
        eqn: An operation of `MOVES`, a `broadcast_in_dim`, a reduction, or an all-reduce, which may
            reduce axes of its operand, too.
        axis: The axis of its operand.
    """
    params, name = eqn.params, eqn.primitive.name
    if name == "broadcast_in_dim":
        return int(params["broadcast_dimensions"][axis])
    if name == "transpose":
        return list(params["permutation"]).index(axis)
    if name == "tile":
        return axis if params["reps"][axis] == 1 else None
    axes = next(params[each] for each in ("axes", "dimensions", "axis") if each in params)
    axes = axes if isinstance(axes, tuple) else (axes,)
    if axis in axes:
        return None
    if name in ("rev", "split"):
        return axis
    # Under `jax.vmap`, JAX passes axes as `np.int64`; names are axes of replicas.
    return axis - sum(not isinstance(each, str) and each < axis for each in axes)


_MATRICES = """
cholesky eig eigh householder_product lu qr schur svd triangular_solve tridiagonal_solve
"""
_WINDOWS = """
reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
"""
_ALONG = "approx_top_k cumlogsumexp cummax cummin cumprod cumsum fft rev sort top_k"
COMBINING = frozenset(f"{_ALONG} {_MATRICES} {_WINDOWS}".split())


def combined_axes(eqn: JaxprEqn) -> set[int]:
    """Returns the axes along which an operation of `COMBINING` combines or moves entries."""
    params, name = eqn.params, eqn.primitive.name
    ndim = min(len(shape_of(atom)) for atom in eqn.invars)
    if "window_dimensions" in params:
        names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
        sizes = zip(*(params[each] for each in names if each in params), strict=True)
        pairs = enumerate(zip(sizes, params["padding"], strict=True))
        return {i for i, (each, padding) in pairs if {*each} != {1} or any(padding)}
    if name in _MATRICES.split():
        return set(range(ndim - 2, ndim))
    if name == "fft":
        return set(range(ndim - len(params["fft_lengths"]), ndim))
    names = ("axis", "dimension", "dimensions", "reduction_dimension")
    axes = next((params[each] for each in names if each in params), -1)
    return {axis % ndim for axis in (axes if isinstance(axes, tuple) else (axes,))}


def samples_jointly(eqn: JaxprEqn) -> bool:
    """Whether the numbers of a key depend on the other keys of its array, as of `rbg` keys."""
    kinds = {str(dtype_of(atom)) for atom in (*eqn.invars, *eqn.outvars)}
    return any(kind.startswith("key<") and kind != "key<fry>" for kind in kinds)


def _kept(ndim: int, *removed: Sequence[int]) -> list[int]:
    """Returns the axes that are not among others."""
    return sorted({*range(ndim)}.difference(*removed))


def dot_axes(eqn: JaxprEqn) -> list[dict[int, int]]:
    """Returns where the axes of both operands of a `dot_general` are that it does not contract."""
    contracted, batch = eqn.params["dimension_numbers"]
    found, start = [], len(batch[0])
    for i, atom in enumerate(eqn.invars):
        free = _kept(len(shape_of(atom)), contracted[i], batch[i])
        found.append({axis: k for k, axis in enumerate(batch[i])})
        found[i] |= {axis: start + k for k, axis in enumerate(free)}
        start += len(free)
    return found


def gather_axes(eqn: JaxprEqn) -> tuple[list[int], dict[int, int]]:
    """Returns the axes of the result that the indices have, and where axes of slices are."""
    dims, ndim = eqn.params["dimension_numbers"], len(shape_of(eqn.invars[0]))
    kept = _kept(ndim, dims.collapsed_slice_dims, dims.operand_batching_dims)
    batch = _kept(len(shape_of(eqn.outvars[0])), dims.offset_dims)
    return batch, dict(zip(kept, dims.offset_dims, strict=True))


def scatter_axes(eqn: JaxprEqn) -> tuple[list[int], dict[int, int]]:
    """Returns the axes of the updates that the indices have, and where axes of slices are."""
    dims, ndim = eqn.params["dimension_numbers"], len(shape_of(eqn.invars[0]))
    kept = _kept(ndim, dims.inserted_window_dims, dims.operand_batching_dims)
    batch = _kept(len(shape_of(eqn.invars[2])), dims.update_window_dims)
    return batch, dict(zip(sorted(dims.update_window_dims), kept, strict=True))
