"""Before a program first runs on several processes, all of them must have proved the same."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax

from mirror._src.base.errors import (
    ProgramMismatchError,
    ReplicaDivergenceError,
    counted,
    describe,
    first_line,
    listing,
)
from mirror._src.cluster import agreement
from mirror._src.cluster.ledger import FIRST
from mirror._src.cluster.start import agreement_secs
from mirror._src.devices.device_checks import digest_of
from mirror._src.engine.arguments import Call
from mirror._src.engine.executor import Executor, ReplicaProgram
from mirror._src.jaxprs.text import HEAD, Line, checksum, lines_of
from mirror._src.passes import lower

_SHOWN = 3
_WIDTH = 160
_VALUE = "value of "


def require_agreement(
    call: Call, program: ReplicaProgram, executor: Executor, inputs: Sequence[Any]
) -> str:
    """Compares a program and the values of its mirrored inputs with the other processes.

    Args:
        call: The call that runs it.
        program: What the executor has compiled.
        executor: The executor.
        inputs: The inputs of the program.

    Returns:
        A text for the program, equal in all processes.

    Raises:
        ProgramMismatchError: If the programs differ, or a process does not arrive in time.
        ReplicaDivergenceError: If only the values differ.
    """
    declared = _declared(call, program, inputs)
    lines = [
        *_settings(program, executor),
        *declared,
        *(line for jaxpr in program.jaxprs for line in lines_of(jaxpr)),
    ]
    identity = hashlib.sha256("\n".join(line.text for line in lines).encode()).hexdigest()[:12]
    lines += _values(call, program, inputs)
    own = [line.text for line, kind in zip(declared, program.inputs, strict=True) if kind.is_own]
    where = f"({program.line}) " if program.line else ""  # as in the label of later launches
    _compare(
        agreement.Program(
            program.name, [line.text for line in lines], lambda: [line.location for line in lines]
        ),
        ", ".join([f"{where}{FIRST}", *own[:_SHOWN]]),
    )
    return identity


def require_same_launch(identity: str, label: str) -> None:
    """Compares a program that has run before, because it follows another one.

    Args:
        identity: What `require_agreement` returned.
        label: Name and line of the step.

    Raises:
        ProgramMismatchError: If the programs differ, or a process does not arrive in time.
    """
    _compare(agreement.Program(label, [f"program {identity} of {label}"], lambda: [""]), "again")


def require_same_call(name: str, settings: Sequence[str]) -> None:
    """Compares the settings of a call that decide how often it launches programs.

    Args:
        name: Name of the call.
        settings: The settings, one line each.

    Raises:
        ProgramMismatchError: If they differ, or a process does not arrive in time.
    """
    _compare(agreement.Program(name, settings, lambda: [""] * len(settings)))


def require_no_failure(name: str, error: BaseException | None) -> None:
    """Compares what the host callbacks of a launch have raised, after its end.

    A callback that fails contributes zeros to the results of all processes, which none may use.

    Args:
        name: Name of the step.
        error: The exception of this process, which the caller raises, or None.

    Raises:
        RuntimeError: If a callback has failed in another process only.
        ProgramMismatchError: If a process does not arrive in time.
    """
    text = "" if error is None else f"{type(error).__name__}: {first_line(error)}"
    said = agreement.Program(name, [text], lambda: [""])
    difference = agreement.find_difference(said, agreement_secs())
    if difference is not None and error is None:
        theirs = "".join(other for _, (other, _) in difference.lines)
        raise RuntimeError(
            f"A host callback of {name} has failed in process {difference.other}: {theirs}. The "
            "results of this step are wrong, and it has changed nothing in any process."
        )


def _compare(program: agreement.Program, when: str = FIRST) -> None:
    difference = agreement.find_difference(program, agreement_secs(), when)
    if difference is not None:
        raise _error(difference)


def _settings(program: ReplicaProgram, executor: Executor) -> list[Line]:
    replicas = executor.replicas
    return [
        Line(f"step {program.name}"),
        Line(f"{len(replicas)} replicas, {replicas.replicas_per_device} per device"),
        Line(f"executor {executor.name}, pack_bytes={executor.settings.pack_bytes}"),
        Line(f"{lower.VARIABLE}={lower.setting()}"),
        Line(f"donated inputs {list(program.donated)}"),
        *(
            [Line(f"devices that compute the bits {digest_of(replicas.local_devices)}")]
            if replicas.in_turn  # only a fixed number of replicas depends on it
            else []
        ),
        Line(f"outputs {[kind.is_own for kind in program.outputs]}"),
    ]


def _declared(call: Call, program: ReplicaProgram, inputs: Sequence[Any]) -> list[Line]:
    pairs = zip(program.inputs, inputs, strict=True)
    rows = [jax.ShapeDtypeStruct(x.shape[kind.is_own :], x.dtype) for kind, x in pairs]
    return [
        Line(f"input {name}: {describe(row)}{' per replica' if kind.is_own else ''}")
        for name, kind, row in zip(call.input_names, program.inputs, rows, strict=True)
    ]


def _values(call: Call, program: ReplicaProgram, inputs: Sequence[Any]) -> list[Line]:
    return [
        Line(f"{_VALUE}{name}: {checksum(leaf):08x}")
        for name, kind, leaf in zip(call.input_names, program.inputs, inputs, strict=True)
        if not kind.is_own
    ]


def _error(difference: agreement.Difference) -> Exception:
    me, other = f"process {difference.me}", f"process {difference.other}"
    texts = [a[0] or b[0] for a, b in difference.lines]
    if texts and all(text.startswith(_VALUE) for text in texts):
        names = [text.removeprefix(_VALUE).rpartition(":")[0] for text in texts]
        return ReplicaDivergenceError(
            f"{difference.name} has not run, because {counted(len(names), 'mirrored input')} of "
            f"{me} and {other} differ:\n{listing(names)}\nCreate them from the same seed and data "
            "on every process, for example nnx.Rngs(0), or restore the same checkpoint."
        )
    # Inputs and operations say more than the types of all inputs together.
    telling = [pair for pair in difference.lines if not pair[0][0].lstrip().startswith(HEAD)]
    pairs = telling or difference.lines
    shown = []
    for mine, theirs in pairs[:_SHOWN]:
        shown += [f"  {me}: {_shown(*mine)}", f"  {other}: {_shown(*theirs)}"]
    more = len(pairs) - _SHOWN
    shown += [f"  ... and {more} more lines"] if more > 0 else []
    steps = f"{difference.name} on {me}"
    if difference.name != difference.other_name:
        steps = f"{steps}, {difference.other_name} on {other}"
    text = "\n".join(shown)
    return ProgramMismatchError(
        f"The processes are about to run different programs, as number {difference.number}: "
        f"{steps}. Nothing has run. They first differ in\n{text}\nGive all processes the same "
        "code, configuration and batch shape, and make the same calls of the strategy in the same "
        "order."
    )


def _shown(text: str, location: str) -> str:
    text = text.strip() or "(nothing)"
    text = text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
    return f"{text}  ({location})" if location else text
