"""What XLA's GPU compiler made of a step, and how two programs differ, in words."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_COLLECTIVES = (
    *("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*)$")
_SHAPE = re.compile(r"\b(pred|(?:bf|f|s|u|c)\d+\w*)\[([\d,]*)\]")
_ROUNDING = (
    *("dot", "convolution", "custom-call", "reduce", "divide"),
    *("exponential", "log", "tanh", "sqrt", "rsqrt"),
)
_NAMES = re.compile(
    r",? metadata=\{[^}]*\}|, backend_config=.*|, (?:calls|to_apply)=%\S+"
    r"|, control-predecessors=\{[^}]*\}"
)
_NO_KERNEL = ("parameter", "bitcast", "get-tuple-element", "tuple", "constant", "copy-done")


class Collective(NamedTuple):
    """A collective of a program.

    Attributes:
        kind: Its opcode, without `-start` or `-done`.
        types: The dtypes of its results.
        bytes: Bytes of its results on one GPU.
        kernel: XLA's kernel for it, such as `TRITON_ONE_SHOT`; `DEFAULT` is NCCL.
        overlap: Number of kernels that are scheduled while it runs.
    """

    kind: str
    types: tuple[str, ...]
    bytes: int
    kernel: str
    overlap: int

    def __str__(self) -> str:
        what = f"{self.kind} of {self.bytes} B {'+'.join(self.types)} by {self.kernel}"
        return f"{what} during {self.overlap} kernels"


class GpuProgram(NamedTuple):
    """A compiled program, with bytes per GPU.

    Attributes:
        collectives: Its collectives, as they are scheduled.
        donated: Number of arguments whose memory the results use.
        arguments: Bytes of the arguments.
        results: Bytes of the results that do not use the memory of an argument.
        temporaries: Bytes that it needs while it runs.
        additions: Float scatters with indices that may repeat, which GPUs add by atomics in any
            order.
        calls: Functions of the host that it calls.
    """

    collectives: tuple[Collective, ...]
    donated: int
    arguments: int
    results: int
    temporaries: int
    additions: tuple[str, ...]
    calls: tuple[str, ...]


def examine(compiled: Any) -> GpuProgram:
    """Reads a program that was compiled for GPUs."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return GpuProgram(
        collectives=tuple(_collectives(text)),
        donated=len(re.findall(r"(?:may|must)-alias", text.partition("\n")[0])),
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        additions=tuple(_additions(text)),
        calls=tuple(re.findall(r'custom_call_target="(\w*callback\w*)"', text)),
    )


def operations(compiled: Any) -> Counter[tuple[str, ...]]:
    """Returns the operations that may round, with shapes, layouts and options, without names.

    Additions are not among them: those of the replicas depend on the number of devices.
    """
    found: Counter[tuple[str, ...]] = Counter()
    for line in compiled.as_text().splitlines():
        match = _INSTRUCTION.match(line)
        if match is not None and match[3] in _ROUNDING:
            options = _NAMES.sub("", match[4].partition(")")[2])
            found[match[2], match[3], options] += 1
    return found


def differences(program: GpuProgram, by_hand: GpuProgram) -> list[str]:
    """Returns in words how a program differs from the one that was written by hand.

    More kernels during a collective are no difference.
    """
    sentences = []
    found, wanted = program.collectives, by_hand.collectives
    if len(found) != len(wanted):
        sentences.append(
            f"{len(found)} collectives instead of {len(wanted)}: {_listed(found)} instead of "
            f"{_listed(wanted)}"
        )
    else:
        for i, (one, other) in enumerate(zip(found, wanted, strict=True), start=1):
            if one[:4] != other[:4] or one.overlap < other.overlap:
                sentences.append(f"collective {i} is {one} instead of {other}")
    labels = {
        "donated": "donated arguments",
        "arguments": "bytes of arguments",
        "results": "bytes of results beside donated arguments",
        "temporaries": "bytes of temporaries",
    }
    for field, label in labels.items():
        one, other = getattr(program, field), getattr(by_hand, field)
        if one != other:
            sentences.append(f"{one} {label} instead of {other}")
    for field, label in {"additions": "additions by atomics", "calls": "host callbacks"}.items():
        one, other = getattr(program, field), getattr(by_hand, field)
        if len(one) != len(other):
            sentences.append(f"{len(one)} {label} instead of {len(other)}: {', '.join(one)}")
    return sentences


def _listed(collectives: Sequence[Collective]) -> str:
    return "; ".join(map(str, collectives)) or "none"


def _collectives(text: str) -> Iterator[Collective]:
    """Yields the collectives; an asynchronous one where it ends."""
    running: dict[str, int] = {}  # its name, and the kernels since it started
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, shape, opcode, rest = match.groups()
        kind = opcode.removesuffix("-start").removesuffix("-done")
        if kind in _COLLECTIVES:
            if opcode.endswith("-start"):
                running[name] = 0
                continue
            start = re.search(r"%([\w.-]+)", rest)
            assert start is not None, line
            kernel = re.search(r'"kernel_strategy":"KERNEL_STRATEGY_(\w+)"', rest)
            strategy = kernel[1] if kernel else "DEFAULT"
            yield Collective(kind, *_size(shape), strategy, running.pop(start[1], 0))
        elif opcode not in _NO_KERNEL:
            running = {each: count + 1 for each, count in running.items()}


def _size(shape: str) -> tuple[tuple[str, ...], int]:
    """Returns the dtypes in a shape, and its bytes."""
    types, count = [], 0
    for dtype, axes in _SHAPE.findall(shape):
        elements = 1
        for axis in filter(None, axes.split(",")):
            elements *= int(axis)
        bits = re.search(r"\d+", dtype)
        types.append(dtype)
        count += elements * (int(bits[0]) if bits else 8) // 8
    return tuple(sorted(set(types))), count


def _additions(text: str) -> Iterator[str]:
    """Yields the float scatters whose indices may repeat."""
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None or match[3] not in ("scatter", "select-and-scatter"):
            continue
        if re.search(r"\b(bf|f|c)\d+", match[2]) and "unique_indices=true" not in line:
            yield f"{match[3]} %{match[1]}"


# Programs by hand


def mesh_of(gpus: Sequence[jax.Device]) -> Mesh:
    """Returns a mesh with one axis, `gpus`."""
    return Mesh(np.asarray(gpus), ("gpus",))


def typed(tree: Any, mesh: Mesh, *axes: str | None) -> Any:
    """Returns the types of a tree of arrays that are split along these axes of a mesh."""
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def by_hand(
    step: Any,
    gpus: Sequence[jax.Device],
    init: Any,
    batch: Any,
    *,
    donates: bool = True,
    splits: bool = True,
) -> GpuProgram:
    """Compiles `jit(shard_map)` of a step whose state is donated and whose batch is split.

    Args:
        step: Function of the state and the batch that returns the new state and a loss.
        gpus: The devices.
        init: Makes the state.
        batch: The global batch.
        donates: Whether the state is donated.
        splits: Whether the batch is split.
    """
    mesh, whole = mesh_of(gpus), PartitionSpec()
    axes = ("gpus",) if splits else ()
    specs = (whole, PartitionSpec(*axes))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(whole, whole), check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=(0,) if donates else ())
    state = typed(jax.eval_shape(init), mesh)
    return examine(compiled.lower(state, typed(batch, mesh, *axes)).compile())
