"""Replica programs as plain data, whose `repr` can be evaluated."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

NUM_REPLICAS = 4


class Kind(NamedTuple):
    """A dtype, or `"ref"`, and a shape."""

    dtype: str
    shape: tuple[Any, ...]


@dataclass(frozen=True)
class Block:
    """Statements that see the values around them, from inputs to outputs."""

    inputs: tuple[int, ...]
    body: "tuple[Statement, ...]"
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Statement:
    """One operation; values have numbers, each made once in a program."""

    op: str
    args: tuple[int, ...]
    outs: tuple[int, ...]
    kinds: tuple[Kind, ...]
    params: tuple[Any, ...] = ()
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Program:
    """A step: what it takes, which of that is per-replica, and what it does."""

    kinds: tuple[Kind, ...]
    per_replica: tuple[bool, ...]
    block: Block


def statements(block: Block) -> Iterator[Statement]:
    """All statements, at any depth."""
    for statement in block.body:
        yield statement
        for inner in statement.blocks:
            yield from statements(inner)


def rewritten(
    block: Block, change: Callable[[Statement], Statement | list[Statement] | None]
) -> Block:
    """The block with each statement replaced, the outer before the inner ones; `None` drops it."""
    body: list[Statement] = []
    for statement in block.body:
        new = change(statement)
        if new is statement:
            inner = tuple(rewritten(each, change) for each in statement.blocks)
            body.append(replace(statement, blocks=inner))
        elif isinstance(new, list):
            body += new
        elif new is not None:
            body.append(new)
    return replace(block, body=tuple(body))


def needed(program: Program) -> set[int]:
    """The numbers of the values that an output or an effect depends on; JAX may drop the rest."""
    reads: dict[int, list[int]] = {}
    every = list(statements(program.block))
    waiting = list(program.block.outputs)
    for statement in every:
        control, flows = _flows(statement)
        for out, inputs in flows:
            reads.setdefault(out, []).extend([*inputs, *control])
        if has_effects(statement):
            waiting += control if statement.blocks else statement.args
    found: set[int] = set()
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += reads.get(number, [])
    return found


def has_effects(statement: Statement) -> bool:
    """Whether it does something else than compute its results."""
    inner = (each for block in statement.blocks for each in statements(block))
    return any(each.op in ("set", "bump", "look") for each in (statement, *inner))


def _flows(statement: Statement) -> tuple[list[int], list[tuple[int, Sequence[int]]]]:
    """The values that decide how it runs; for each value that it makes or passes, its inputs."""
    op, args, outs, blocks = statement.op, statement.args, statement.outs, statement.blocks
    if not blocks:
        if op == "context_reduce":
            return [], [(out, [arg]) for out, arg in zip(outs, args, strict=True)]
        return [], [(out, args) for out in outs]
    control: list[int] = []
    if op in ("cond", "switch", "fori_to"):
        control, args = [args[0]], args[1:]
    if op == "while_loop":
        control = [blocks[0].outputs[0]]
    skip = 1 if op in ("fori", "fori_to", "while_loop") else 0
    flows: list[tuple[int, Sequence[int]]] = []
    for block in blocks:
        flows += [(number, [arg]) for number, arg in zip(block.inputs[skip:], args, strict=True)]
    for block in blocks[1:] if op == "while_loop" else blocks:
        flows += [(out, [made]) for out, made in zip(outs, block.outputs, strict=True)]
    if op in _LOOPS:
        (*_, body) = blocks
        num_carry = statement.params[0] if op == "scan" else len(args)
        for block in blocks:
            carried = block.inputs[skip : skip + num_carry]
            flows += [(number, [made]) for number, made in zip(carried, body.outputs, strict=False)]
        flows += [(out, [arg]) for out, arg in zip(outs, args[:num_carry], strict=False)]
    return control, flows


_LOOPS = frozenset({"scan", "fori", "fori_to", "while_loop"})


def listing(program: Program) -> str:
    """The program in lines that a person reads."""
    lines = [
        f"v{number}: {_kind(kind)} {'per-replica' if differs else 'mirrored'} input"
        for number, kind, differs in zip(
            program.block.inputs, program.kinds, program.per_replica, strict=True
        )
    ]
    return "\n".join([*lines, *_lines(program.block, "")])


def _lines(block: Block, indent: str) -> Iterator[str]:
    for each in block.body:
        made = ", ".join(
            f"v{out}: {_kind(kind)}" for out, kind in zip(each.outs, each.kinds, strict=True)
        )
        args = " ".join(f"v{arg}" for arg in each.args)
        params = " ".join(map(str, each.params))
        yield f"{indent}{made + ' = ' if made else ''}{each.op} {args} {params}".rstrip()
        for inner in each.blocks:
            yield f"{indent}  | {' '.join(f'v{number}' for number in inner.inputs)}"
            yield from _lines(inner, indent + "  | ")
    yield f"{indent}return {' '.join(f'v{number}' for number in block.outputs)}"


def _kind(kind: Kind) -> str:
    return f"{kind.dtype}[{','.join(map(str, kind.shape))}]"
