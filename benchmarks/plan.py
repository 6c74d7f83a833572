"""Jobs and names of the benchmark. Does not import JAX, because the parent process uses it."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

MODELS = ("narrow", "wide", "cnn", "golbin", "mobile", "leaves")
TRAINER_MODELS = ("narrow", "leaves", "small")
GPU, GPU_MODELS = "gpu", ("narrow", "large", "cnn")  # the suite, and its models
SUITES = ("own", "steps", "dispatch", "deep", "rows", "staged", "trainer", "first", "memory")

MIRROR_NNX, MIRROR_PLAIN = "mirror nnx", "mirror plain"
PMAP, SHARD_MAP, JIT, ONE_DEVICE, NNX_JIT = "pmap", "shard_map", "jit", "jit alone", "nnx.jit"
TENSORFLOW, KERAS, TORCH = "tensorflow", "keras", "torch"
STAGED = "staged"
FIT, FIT_16, LOOP, JIT_LOOP = "fit", "fit 16", "loop", "jit loop"
HAND_WRITTEN = (PMAP, SHARD_MAP, JIT)
RIVALS = (TENSORFLOW, KERAS, TORCH)
OWN_PROCESS = (MIRROR_NNX, MIRROR_PLAIN, *HAND_WRITTEN, ONE_DEVICE, *RIVALS)
FIRST = (MIRROR_NNX, MIRROR_PLAIN, SHARD_MAP)
START_MODELS = ("narrow", "cnn")
ON_ONE_DEVICE = (1, 2, 4, 8)  # replicas, in the suite `rows`
SLICED_MODELS = ("mlp", "transformer")
MIRRORED, SLICED_STATE, SLICED = "mirrored", 'shard="optimizer"', 'shard="model"'
JIT_BY_HAND, SHARD_MAP_BY_HAND = SLICED_BY_HAND = ("jit, by hand", "shard_map, by hand")
STORED = (MIRRORED, SLICED_STATE, SLICED, *SLICED_BY_HAND)

Kind = Literal[
    "own",
    "steps",
    "dispatch",
    "deep",
    "rows",
    "staged",
    "trainer",
    "first",
    "starts",
    "memory",
    "slices",
]


def by_hand(num_devices: int) -> tuple[str, ...]:
    """Returns the names of the hand-written contenders.

    On one device, `jit` without shardings is the best of them.
    """
    return HAND_WRITTEN if num_devices > 1 else (*HAND_WRITTEN, ONE_DEVICE)


@dataclass(frozen=True)
class Timing:
    """Number and duration of the measurements.

    Attributes:
        rounds: Number of turns of each contender; in the suite `own`, per start.
        round_secs: Least duration of a turn.
        starts: Number of starts of the processes in the suite `own`. The rivals, which take longest
            to start, are started once.
    """

    rounds: int = 20
    round_secs: float = 0.02
    starts: int = 1


@dataclass(frozen=True)
class Job:
    """Measurements of one suite on one number of devices.

    Attributes:
        kind: The suite; `starts` belongs to the suite `first`.
        devices: Number of devices.
        names: Models in most suites; the contender in `first`.
        leaves: Numbers of leaves, in the suite `dispatch`.
        contenders: Contenders in the suite `own`; the way to store the state in `slices`.
        timing: Number and duration of the measurements.
        on_host: Whether the devices are host devices, not JAX's default ones.
    """

    kind: Kind
    devices: int
    names: tuple[str, ...] = ()
    leaves: tuple[int, ...] = ()
    contenders: tuple[str, ...] = ()
    timing: Timing = field(default_factory=Timing)
    on_host: bool = True

    def __str__(self) -> str:
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        devices += "" if self.on_host else " of JAX's choice"
        return " ".join([f"{self.kind} on {devices}:", *map(str, self.names or self.leaves)])

    def to_dict(self) -> dict[str, Any]:
        """Returns the job as a dict for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Job":
        """Returns the job for a dict made by `to_dict`."""
        tuples = {name: tuple(data[name]) for name in ("names", "leaves", "contenders")}
        return cls(**{**data, **tuples, "timing": Timing(**data["timing"])})


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    devices: tuple[int, ...] = (1, 2, 4, 8)
    models: tuple[str, ...] = MODELS
    suites: tuple[str, ...] = SUITES
    contenders: tuple[str, ...] = OWN_PROCESS
    timing: Timing = field(default_factory=Timing)
    own_timing: Timing = field(default_factory=lambda: Timing(rounds=8, round_secs=0.08))
    trainer_models: tuple[str, ...] = TRAINER_MODELS
    gpu_models: tuple[str, ...] = GPU_MODELS
    leaves: tuple[int, ...] = (1, 10, 100, 400)
    first_devices: tuple[int, ...] = (2, 8, 32, 64)
    first_repeats: int = 2
    sliced_models: tuple[str, ...] = SLICED_MODELS
    sliced_repeats: int = 3

    def quick(self) -> "Settings":
        """Returns settings for a short run: fewer measurements, without `deep`."""
        return replace(
            self,
            devices=(2,),
            models=("narrow",),
            trainer_models=("small",),
            gpu_models=("narrow",),
            suites=tuple(suite for suite in self.suites if suite != "deep"),
            timing=Timing(rounds=min(self.timing.rounds, 10), round_secs=0.01),
            own_timing=Timing(rounds=min(self.own_timing.rounds, 4), round_secs=0.03),
            leaves=(1, 100),
            first_devices=(2, 8),
            first_repeats=1,
            sliced_models=(),
        )

    def jobs(self) -> list[Job]:
        """Returns all jobs in order."""
        jobs = [job for n in self.devices for job in self._jobs_on(n)]
        if "deep" in self.suites:  # once: it compiles long, and measures overhead on the host only
            jobs.append(Job("deep", min(self.devices), timing=self.timing))
        if "rows" in self.suites:
            jobs.append(Job("rows", 1, names=self.models, timing=self.timing))
        if "memory" in self.suites:
            jobs.append(Job("memory", max(self.devices), names=self.models))
            jobs += self._slices_jobs()
        if "first" in self.suites:
            jobs += self._first_jobs()
        if GPU in self.suites:
            jobs += self._gpu_jobs()
        return jobs

    def _gpu_jobs(self) -> list[Job]:
        """Returns what one GPU can show, in five minutes at most."""
        jobs = [
            Job("steps", 1, self.gpu_models, timing=self.timing),
            Job("dispatch", 1, leaves=self.leaves[:3], timing=self.timing),
            Job("trainer", 1, self.gpu_models[:1], timing=self.timing),
            Job("memory", 1, self.gpu_models),
            *(Job("first", 1, (name,)) for name in FIRST),
            Job("starts", 1, START_MODELS),
        ]
        return [replace(job, on_host=False) for job in jobs]

    def _jobs_on(self, n: int) -> list[Job]:
        jobs = []
        if "own" in self.suites:
            present = [c for c in self.contenders if c != ONE_DEVICE or n == 1]
            jobs += [
                Job("own", n, (model,), contenders=tuple(present), timing=self.own_timing)
                for model in self.models
            ]
        if "steps" in self.suites:
            jobs.append(Job("steps", n, names=self.models, timing=self.timing))
        if "dispatch" in self.suites:
            jobs.append(Job("dispatch", n, leaves=self.leaves, timing=self.timing))
        if "staged" in self.suites and n > 1:
            jobs.append(Job("staged", n, names=self.models, timing=self.timing))
        if "trainer" in self.suites:
            jobs.append(Job("trainer", n, names=self.trainer_models, timing=self.timing))
        return jobs

    def _slices_jobs(self) -> list[Job]:
        """Repeats the whole sequence: the processes take turns."""
        n = max(self.devices)
        ways = [(model, way) for model in self.sliced_models for way in STORED if n > 1]
        return [Job("slices", n, (m,), contenders=(w,)) for m, w in ways] * self.sliced_repeats

    def _first_jobs(self) -> list[Job]:
        """Repeats the whole sequence, so that background load does not affect one count only."""
        once = [Job("first", n, names=(name,)) for n in self.first_devices for name in FIRST]
        once += [Job("starts", n, names=START_MODELS) for n in self.first_devices[:2]]
        return once * self.first_repeats
