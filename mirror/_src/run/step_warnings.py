"""Warnings of steps that are right and rarely meant, each given once."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from mirror._src.program.marks import Mark
from mirror._src.program.proof import Notes
from mirror._src.run.call import Call
from mirror._src.utils.naming import code_of, depth_of_user, is_our_module, name_of
from mirror._src.utils.types import StepFunction

FRESH_FUNCTIONS = 3


class StepWarnings:
    """Warns of steps, of each once."""

    def __init__(self) -> None:
        self._warned: set[Any] = set()

    def of_proof(self, call: Call, notes: Notes, marks: Sequence[Mark], num_replicas: int) -> None:
        """Warns, once for each function, of what is right for the proof and rarely meant."""
        if is_our_module(getattr(call.fn, "__module__", None)) or num_replicas == 1:
            return
        name, texts = name_of(call.fn), {}
        is_data = [np.ndim(leaf) > 0 for leaf in call.layout.dynamic_leaves(call.leaves)]
        if notes.idle_collectives and any(is_data):
            texts["undistributed"] = (
                f"{name} computes the same on all {num_replicas} replicas: the collective at "
                f"{notes.idle_collectives[0]} reduces values that are equal already. Pass batches "
                "from strategy.distribute_dataset(dataset), which gives each replica its own part."
            )
        if notes.shared_noise:
            texts["noise"] = (
                f"{name} applies the same random numbers on all {num_replicas} replicas, "
                f"drawn at {', '.join(dict.fromkeys(notes.shared_noise))}. For noise that differs "
                "between replicas, draw with mirror.get_replica_context().fold_in(key)."
            )
        assumed = sorted({line for mark in marks if not mark.per_replica for line in mark.assumed})
        if assumed:
            texts["pure"] = (
                f"{name} takes what {', '.join(assumed)} returns to be the same on all replicas, "
                "because it is declared to be pure. If it is not, replicas drift apart: reduce it, "
                'mirror.get_replica_context().all_reduce("mean", y).'
            )
        for kind, text in texts.items():
            if (call.fn, kind) not in self._warned:
                self._warned.add((call.fn, kind))
                warnings.warn(text, stacklevel=depth_of_user())

    def of_fresh_functions(self, fn: StepFunction) -> None:
        """Warns of a step that is a new function object each time."""
        code = code_of(fn)
        if code is not None and code not in self._warned:
            self._warned.add(code)
            warnings.warn(
                f"{name_of(fn)} ({code.co_filename}:{code.co_firstlineno}) was compiled "
                f"{FRESH_FUNCTIONS} times in a row, each time as a new function object that ran "
                "once. Define it once, outside the loop, and pass what changes as an argument.",
                stacklevel=depth_of_user(),
            )

    def clear(self) -> None:
        """Forgets what it has warned of."""
        self._warned.clear()
