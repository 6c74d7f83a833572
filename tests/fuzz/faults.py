"""Faults to plant in mirror, by the text of a function, which the search must find."""

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
        owner: the module or class that has the function.
        name: the function's name.
        text: what stands there.
        planted: what stands there instead.
        profile: programs of which profile show it.
        law: which law they break, or how its name begins.
        executor: who must run them, where the proof alone does not show it.
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
_AGAIN = "_, test_after = self.closed(test, [*test_consts, *carry])"

FAULTS = {
    "a Ref that a while's test writes": Fault(_PROOF, "while_loop", _AGAIN, "pass"),
    "a Ref that is written under control": Fault(
        _PROOF, "written", "value.join(Mark(self.control))", "value"
    ),
    "a Ref that is written": Fault(_PROOF, "written", "mark.join(value) if", "mark if"),
    "a collective under control": Fault(
        _PROOF,
        "equation",
        "if self.control is not None and is_collective",
        "if False and is_collective",
        law="hang",
    ),
    "a collective of groups": Fault(
        proof, "_spans_whole_axis", 'eqn.params.get("axis_index_groups") is None', "True"
    ),
    "a permutation": Fault(proof, "_gives_all_the_same", "and not operands.per_replica", ""),
    "a permutation that leaves replicas out": Fault(
        proof, "_gives_all_the_same", "== num_replicas", "> 0"
    ),
    "a branch that replicas choose": Fault(
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
        "packed",
        "and step.outputs[0] not in read_inside",
        "",
        profile="staged",
        law="staged raises",
        executor="staged",
    ),
    "groups, on the host": Fault(
        staged,
        "carry_out",
        'collective.params.get("axis_index_groups") or',
        "",
        profile="collective",
        law="staged",
        executor="staged",
    ),
    "a permutation that leaves replicas out, in rows": Fault(
        collectives.RowCollectives,
        "_ppermute",
        "if len(source) == self._num_replicas",
        "if True",
        profile="collective",
        law="vmap computes",
        executor="vmap",
    ),
}
