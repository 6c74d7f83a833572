"""What a run of the benchmark measures. Imports no JAX: the parent process starts no backend."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

MODELS = ("narrow", "wide", "cnn", "leaves")
SUITES = ("steps", "dispatch", "deep", "rows", "staged", "trainer", "first", "memory")
TRAINER_MODELS = ("narrow", "leaves", "small")

MIRROR_NNX, MIRROR_PLAIN = "mirror nnx", "mirror plain"
PMAP, SHARD_MAP, JIT, NNX_JIT = "pmap", "shard_map", "jit", "nnx.jit"
STAGED = "staged"
FIT, FIT_16, LOOP = "fit", "fit 16", "loop"
HAND_WRITTEN = (PMAP, SHARD_MAP, JIT)
ON_ONE_DEVICE = (1, 2, 4, 8)  # replicas, in the suite `rows`


@dataclass(frozen=True)
class Timing:
    """How long to measure: `rounds` times, each contender at least `round_secs` in each round."""

    rounds: int = 30
    round_secs: float = 0.02


@dataclass(frozen=True)
class Job:
    """What one child process measures, on its own number of devices.

    Attributes:
        kind: which suite.
        devices: how many forced host devices.
        names: models of most suites; the one contender of `first`.
        leaves: how many leaves there are in the suite `dispatch`.
    """

    kind: Literal["steps", "dispatch", "deep", "rows", "staged", "trainer", "first", "memory"]
    devices: int
    names: tuple[str, ...] = ()
    leaves: tuple[int, ...] = ()
    timing: Timing = field(default_factory=Timing)

    def to_dict(self) -> dict[str, Any]:
        """The job as JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Job":
        """The job of what `to_dict` gave."""
        timing = Timing(**data["timing"])
        names, leaves = tuple(data["names"]), tuple(data["leaves"])
        return cls(**{**data, "names": names, "leaves": leaves, "timing": timing})


@dataclass(frozen=True)
class Settings:
    """What is asked for on the command line."""

    devices: tuple[int, ...] = (1, 2, 4, 8)
    models: tuple[str, ...] = MODELS
    suites: tuple[str, ...] = SUITES
    timing: Timing = field(default_factory=Timing)
    trainer_models: tuple[str, ...] = TRAINER_MODELS
    leaves: tuple[int, ...] = (1, 10, 100, 400)
    first_devices: tuple[int, ...] = (2, 8, 32, 64)
    first_repeats: int = 2

    def quick(self) -> "Settings":
        """A short look: less of each suite, and without `deep`, which compiles for long."""
        return replace(
            self,
            devices=(2,),
            models=("narrow",),
            trainer_models=("small",),
            suites=tuple(suite for suite in self.suites if suite != "deep"),
            timing=Timing(rounds=min(self.timing.rounds, 10), round_secs=0.01),
            leaves=(1, 100),
            first_devices=(2, 8),
            first_repeats=1,
        )

    def jobs(self) -> list[Job]:
        """The child processes, in the order in which they run."""
        made = []
        for n in self.devices:
            if "steps" in self.suites:
                made.append(Job("steps", n, names=self.models, timing=self.timing))
            if "dispatch" in self.suites:
                made.append(Job("dispatch", n, leaves=self.leaves, timing=self.timing))
            if "staged" in self.suites and n > 1:
                made.append(Job("staged", n, names=self.models, timing=self.timing))
            if "trainer" in self.suites:
                made.append(Job("trainer", n, names=self.trainer_models, timing=self.timing))
        if "deep" in self.suites:  # compiles for long; its overhead is the host's, on any count
            made.append(Job("deep", min(self.devices), timing=self.timing))
        if "rows" in self.suites:
            made.append(Job("rows", 1, names=self.models, timing=self.timing))
        if "memory" in self.suites:
            made.append(Job("memory", max(self.devices), names=self.models))
        if "first" in self.suites:
            made += self._first_jobs()
        return made

    def _first_jobs(self) -> list[Job]:
        """Repeats are apart in time, so that a busy minute does not meet one count only."""
        counts = self.first_devices
        by_hand = [Job("first", n, names=(SHARD_MAP,)) for n in counts]
        ours = [Job("first", n, names=(MIRROR_NNX,)) for n in counts]
        return by_hand + ours * self.first_repeats
