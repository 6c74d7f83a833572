"""Programs as text and arrays as hashes, equal in all processes that trace and hold the same.

JAX prints addresses of functions, orders of sets and the like, which differ between processes that
run the same program. Only what determines the computation is printed here: anything else is printed
as its type.
"""

import dataclasses
import enum
import functools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding

from mirror._src.base.types import Array
from mirror._src.devices.transfer import NoMesh, local_copy
from mirror._src.jaxprs.equations import jaxpr_of, line_within


def fingerprint(leaf: Array) -> Array:
    """Returns two uint32 hashes of an array's bits; changing one element changes the first hash.

    The first hash is the sum of all elements' bits, each multiplied by an odd number that depends
    on its position. Multiplication by an odd number is invertible modulo 2**32, so no change of a
    single element is lost.
    """
    bits = _bits(leaf).ravel()
    position = jax.lax.iota(jnp.uint32, bits.size)
    weight = (position * jnp.uint32(0x9E3779B1)) | jnp.uint32(1)
    mixed = (bits ^ (bits >> 15)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * (weight ^ jnp.uint32(0x27D4EB2E))
    return jnp.stack([jnp.sum(bits * weight), jnp.sum(mixed ^ (mixed >> 16))])


SMALL_INTEGERS = ("int2", "uint2", "int4", "uint4")


def _bits(leaf: Array) -> Array:
    """Returns the bits of an array as uint32."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.bool_ or leaf.dtype.name in SMALL_INTEGERS:
        return leaf.astype(jnp.int32).astype(jnp.uint32)
    if leaf.dtype.name == "float4_e2m1fn":  # two elements share a byte, so there is no bitcast
        leaf = leaf.astype(jnp.float32)
    if leaf.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    unsigned = jnp.dtype(f"uint{leaf.dtype.itemsize * 8}")
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


_ADDRESS = re.compile(r"0x[0-9a-f]+")
_LARGE = 2**24  # bytes: of larger arrays, the device computes a fingerprint
_fingerprint_of = jax.jit(fingerprint)
HEAD = "program of "
"""Start of the line with the types of a program's inputs."""


class Line(NamedTuple):
    """One line of a program.

    Attributes:
        text: What is compared.
        eqn: The operation, to find the user's line.
        around: The operations that contain it.
    """

    text: str
    eqn: JaxprEqn | None = None
    around: Sequence[JaxprEqn] = ()

    @property
    def location(self) -> str:
        """The user's line; empty for a line that is not an operation."""
        return "" if self.eqn is None else line_within(self.eqn, self.around)


def lines_of(program: ClosedJaxpr) -> list[Line]:
    """Returns the operations of a program, and of the programs inside them."""
    return list(_lines(program, (), ""))


def _lines(program: ClosedJaxpr | Jaxpr, around: Sequence[JaxprEqn], indent: str) -> Iterator[Line]:
    jaxpr = jaxpr_of(program)
    consts = program.consts if isinstance(program, ClosedJaxpr) else ()
    names: dict[Any, str] = {}

    def name(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{_form(atom.val)}:{_type(atom.aval)}"
        found = names.get(atom)
        if found is None:
            found = names[atom] = f"v{len(names)}"
        return found

    def declared(atoms: Sequence[Any]) -> str:
        return " ".join([f"{name(atom)}:{_type(atom.aval)}" for atom in atoms])

    yield Line(f"{indent}{HEAD}{declared(jaxpr.invars)}", None, around)
    for var, const in zip(jaxpr.constvars, consts, strict=False):
        yield Line(f"{indent}constant {declared([var])} = {_form(const)}")
    for eqn in jaxpr.eqns:
        inner: list[ClosedJaxpr | Jaxpr] = []

        def number(found: ClosedJaxpr | Jaxpr, inner: list[Any] = inner) -> str:
            inner.append(found)
            return f"program {len(inner)}"

        params = eqn.params
        text = f"{indent}{declared(eqn.outvars)} = {eqn.primitive.name} "
        text += " ".join(map(name, eqn.invars))
        settings = [
            f"{key}={_form(params[key], number)}"
            for key in sorted(params)
            if key != "name" and params[key] is not None  # names may be numbered as created
        ]
        yield Line(f"{text} [{' '.join(settings)}]" if settings else text, eqn, around)
        for each in inner:
            yield from _lines(each, (*around, eqn), indent + "  ")
    yield Line(f"{indent}results {' '.join(map(name, jaxpr.outvars))}", None, around)


def _type(aval: Any) -> str:
    if not hasattr(aval, "dtype") or not hasattr(aval, "shape"):
        return type(aval).__name__
    return _type_of(aval.dtype, aval.shape, bool(getattr(aval, "weak_type", False)))


@functools.lru_cache(4096)  # NumPy needs several microseconds for the name of a dtype
def _type_of(dtype: Any, shape: tuple[Any, ...], is_weak: bool) -> str:
    return f"{'~' if is_weak else ''}{dtype}[{','.join(map(str, shape))}]"


@functools.lru_cache(256)
def _form_of_dtype(dtype: "np.dtype[Any]") -> str:
    return repr(dtype)


def _form(value: Any, program: Callable[[Any], str] = lambda found: type(found).__name__) -> str:
    """Returns a text that is equal for parameters of the same meaning, in all processes."""
    if value is None or isinstance(value, int | float | complex):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join([_form(each, program) for each in value])})"
    if isinstance(value, ClosedJaxpr | Jaxpr):
        return program(value)
    if isinstance(value, np.dtype):
        return _form_of_dtype(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, str | bytes):
        return repr(_ADDRESS.sub("", value) if isinstance(value, str) else value)
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _form_of_array(value)
    if isinstance(value, Mapping):
        pairs = (f"{_form(k, program)}: {_form(v, program)}" for k, v in value.items())
        return f"{{{', '.join(sorted(pairs))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_form(each, program) for each in value))}}}"
    if isinstance(value, NamedSharding):
        return f"NamedSharding({value.spec})"
    if dataclasses.is_dataclass(value):
        fields = (
            f"{field.name}={_form(getattr(value, field.name, None), program)}"
            for field in dataclasses.fields(value)
        )
        return f"{type(value).__name__}({', '.join(fields)})"
    return type(value).__name__


def _form_of_array(value: Any) -> str:
    if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
        return type(value).__name__
    if np.ndim(value) == 0 and not isinstance(value, jax.Array):
        return repr(value.item()) if hasattr(value, "item") else str(value)
    return f"{value.dtype}[{','.join(map(str, value.shape))}]#{checksum(value):08x}"


def checksum(array: Any) -> int:
    """Returns a checksum of this process's copy of an array; 0 if it is split across processes."""
    if isinstance(array, jax.Array):
        if not array.is_fully_addressable and not array.is_fully_replicated:
            return 0
        array = local_copy(array)
        if array.nbytes > _LARGE:
            with NoMesh():
                high, low = map(int, _fingerprint_of(array))
            return high << 32 | low
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            with NoMesh():
                array = jax.random.key_data(array)
    data = np.ascontiguousarray(np.asarray(array)).reshape(-1)  # host sync, before a first run
    return zlib.crc32(data.view(np.uint8).data) if data.size else 0
