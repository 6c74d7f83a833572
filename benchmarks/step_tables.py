"""The tables of training steps: own process, paired, and against what is not JAX."""

from collections.abc import Sequence

from benchmarks import limits, plan
from benchmarks.record import Done
from benchmarks.report import NONE, Table, by_model, compared, measured, ms
from benchmarks.stats import Times, best_of, ratio, widest

_ALL_BY_HAND = (*plan.HAND_WRITTEN, plan.ONE_DEVICE)
_S1 = "S1: plain / best by hand at most {}, {} for many small leaves"


def _best(times: Times, num_devices: int) -> str:
    """The best by hand; empty where none was measured."""
    names = [name for name in plan.by_hand(num_devices) if measured(times, name)]
    return best_of(times, names) if names else ""


def own_summary(done: Sequence[Done]) -> Table:
    """Returns a line per model and spelling, a column per number of devices."""
    cells = {(name, n): part["times"] for name, n, part in by_model(done)}
    models = list(dict.fromkeys(name for name, _ in cells))
    counts = sorted({n for _, n in cells})
    rows = []
    for model in models:
        for name in (plan.MIRROR_PLAIN, plan.MIRROR_NNX):
            found = [cells.get((model, n), {}) for n in counts]
            over_best = [
                compared(times, ratio, name, _best(times, n))[0]
                for n, times in zip(counts, found, strict=True)
            ]
            rows.append([f"{model}, {name}", *over_best])
    title = "Own process: a training step over the best by hand"
    return Table(title, ["model", *(f"{n} device{'s' * (n > 1)}" for n in counts)], rows)


def own_table(done: Sequence[Done]) -> Table:
    """Returns all contenders in JAX, each alone in its process."""
    parts = [(name, n, part["times"]) for name, n, part in by_model(done)]
    rule = _S1.format(limits.S1_OWN, limits.S1_LEAVES)
    title = f"Own process: a training step ({rule}; S2: nnx / plain at most {limits.S2_RATIO})"
    return _steps(title, parts, limits.S1_OWN)


def paired_table(done: Sequence[Done]) -> Table:
    """Returns all contenders in JAX, taking turns in one process."""
    rule = _S1.format(limits.S1_PAIRED, limits.S1_LEAVES)
    title = f"Paired: a training step ({rule}; S2: nnx / plain at most {limits.S2_RATIO})"
    return _steps(title, by_model(done), limits.S1_PAIRED)


def _steps(title: str, parts: Sequence[tuple[str, int, Times]], limit: float) -> Table:
    rows = []
    for model, n, times in parts:
        best = _best(times, n)
        rows.append(
            [
                *(model, str(n)),
                *(ms(times, c) for c in (plan.MIRROR_NNX, plan.MIRROR_PLAIN, *_ALL_BY_HAND)),
                best or NONE,
                *compared(times, ratio, plan.MIRROR_PLAIN, best, limits.s1(model, limit)),
                *compared(times, ratio, plan.MIRROR_NNX, best),
                *compared(times, ratio, plan.MIRROR_NNX, plan.MIRROR_PLAIN, limits.S2_RATIO),
                f"{widest(times):.0%}",
            ]
        )
    headers = ["model", "devices", "nnx ms", "plain ms", *(f"{n} ms" for n in _ALL_BY_HAND)]
    headers += ["best", "plain/best", "S1", "nnx/best", "nnx/plain", "S2", "spread"]
    return Table(title, headers, rows)


def rivals_table(done: Sequence[Done]) -> Table:
    """Returns the contenders beyond JAX; judged are nnx objects, the dearer spelling."""
    rows = []
    for model, n, part in by_model(done):
        times = part["times"]
        rows.append([model, str(n), ms(times, plan.MIRROR_NNX)])
        for rival in plan.RIVALS:
            cells = compared(times, ratio, plan.MIRROR_NNX, rival, limits.S6_RATIO)
            rows[-1] += [ms(times, rival), *cells]
    headers = ["model", "devices", "nnx ms"]
    for rival in plan.RIVALS:
        headers += [f"{rival} ms", f"nnx/{rival}", "S6"]
    title = f"Own process: beyond JAX (S6: nnx / each at most {limits.S6_RATIO})"
    return Table(title, headers, rows)


def lost_table(done: Sequence[Done]) -> Table:
    """Returns what was not measured, or not to the end, and why."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for each in done:
        job = each.job
        where = " ".join(map(str, (*(job.names or job.leaves), "on", job.devices)))
        reasons = {"the job": each.lost} if each.lost else {}
        if job.kind == "own":
            reasons.update(*(cell["lost"] for cell in each.result.values()))
        for name, reason in reasons.items():
            found.setdefault((job.kind, name, " ".join(reason.split())), []).append(where)
    rows = [[*key[:2], ", ".join(places), key[2]] for key, places in found.items()]
    return Table("Not measured, or not to the end", ["suite", "contender", "where", "why"], rows)
