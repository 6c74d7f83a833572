"""Faults that the search must find, as replacements in the source of mirror."""

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest

from mirror._src.executors import collectives
from mirror._src.executors.staged import program as staged
from mirror._src.program import match, proof
from mirror._src.program.staging import flatten


@dataclass(frozen=True)
class Fault:
    """A change of a function's text.

    Attributes:
        owner: The module or class that has the function.
        name: The name of the function.
        text: The text to replace.
        planted: The replacement.
        profile: The profile of the programs that show the fault.
        law: The law that they violate, or a prefix of its name.
        executor: The executor that shows the fault, if the proof alone does not.
    """

    owner: Any
    name: str
    text: str
    planted: str
    profile: str = "general"
    law: str = "soundness"
    executor: str | None = None

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces the function until the test ends."""
        function = getattr(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.text) == 1, f"{self.text!r} is not once in {self.name}"
        found: dict[str, Any] = {}
        code = "from __future__ import annotations\n" + source.replace(self.text, self.planted)
        exec(code, function.__globals__, found)
        monkeypatch.setattr(self.owner, self.name, found[self.name])


_PROOF = proof._Pass
_AGAIN = "_, test_after = self.walk(test, [*test_consts, *carry])"

FAULTS = {
    "a Ref that a while's test writes": Fault(_PROOF, "while_loop", _AGAIN, "pass"),
    "a Ref that is written under control": Fault(
        _PROOF, "write", "value.join(Mark(self.control))", "value"
    ),
    "a Ref that is written": Fault(_PROOF, "write", "mark.join(value) if", "mark if"),
    "a collective under control": Fault(
        _PROOF,
        "equation",
        "if self.control is not None and is_collective",
        "if False and is_collective",
        law="hang",
    ),
    "a collective of groups": Fault(
        proof, "spans_whole_axis", 'eqn.params.get("axis_index_groups") is None', "True"
    ),
    "a permutation": Fault(proof, "_is_mirrored", "and not operands.per_replica", ""),
    "a permutation that omits replicas": Fault(proof, "_is_mirrored", "== num_replicas", "> 0"),
    "a branch chosen per replica": Fault(
        proof, "chosen", "else mark.join(predicate.of(None))", "else mark"
    ),
    "a carry after the first round": Fault(_PROOF, "scan", "if joined == marks", "if True"),
    "a callback in a loop, lengths apart": Fault(
        match._Numbering,
        "form",
        "return type(value), value",
        "return type(value), None if callable(value) else value",
        profile="ragged",
    ),
    "a ring of lengths": Fault(
        match._Numbering,
        "equation",
        "() if eqn.primitive.name in MIRRORING else tuple(inputs)",
        "()",
        profile="ragged",
    ),
    "a Ref that holds a length": Fault(
        match._Numbering,
        "equation",
        'any(hasattr(atom.aval, "inner_aval") for atom in (*eqn.invars, *eqn.outvars))',
        "False",
        profile="ragged",
    ),
    "small all-reduces read in a loop": Fault(
        flatten,
        "pack_collectives",
        "and step.outputs[0] not in read_inside",
        "",
        profile="staged",
        law="staged raises",
        executor="staged",
    ),
    "groups, on the host": Fault(
        staged,
        "run_on_host",
        'collective.params.get("axis_index_groups") or',
        "",
        profile="collective",
        law="staged",
        executor="staged",
    ),
    "a permutation that omits replicas, in rows": Fault(
        collectives.VmapCollectives,
        "_ppermute",
        "if len(source) == self._num_replicas",
        "if True",
        profile="collective",
        law="vmap computes",
        executor="vmap",
    ),
}
