"""Tables of training steps: own processes, paired, and contenders beyond JAX."""

from collections.abc import Sequence

from benchmarks import limits, plan
from benchmarks.record import Done
from benchmarks.report import NONE, Table, best_by_hand, by_model, compared, ms
from benchmarks.stats import Times, ratio, widest

_ALL_BY_HAND = (*plan.HAND_WRITTEN, plan.ONE_DEVICE)
_S1 = "S1: plain / best by hand at most {}, {} for many small leaves"


def own_summary(done: Sequence[Done]) -> Table:
    """Returns a table with a row per model and kind of state, a column per number of devices."""
    cells = {(name, n): part["times"] for name, n, part in by_model(done)}
    models = list(dict.fromkeys(name for name, _ in cells))
    counts = sorted({n for _, n in cells})
    rows = []
    for model in models:
        for name in (plan.MIRROR_PLAIN, plan.MIRROR_NNX):
            by_count = [cells.get((model, n), {}) for n in counts]
            over_best = [
                compared(times, ratio, name, best_by_hand(times, n))[0]
                for n, times in zip(counts, by_count, strict=True)
            ]
            rows.append([f"{model}, {name}", *over_best])
    title = "Own process: a training step compared with the best by hand"
    return Table(title, ["model", *(f"{n} device{'s' * (n > 1)}" for n in counts)], rows)


def own_table(done: Sequence[Done]) -> Table:
    """Returns the table of all contenders in JAX, each alone in its process."""
    parts = [(name, n, part["times"]) for name, n, part in by_model(done)]
    rule = _S1.format(limits.S1_OWN, limits.S1_LEAVES)
    title = f"Own process: a training step ({rule}; S2: nnx / plain at most {limits.S2_RATIO})"
    return _steps(title, parts, limits.S1_OWN)


def paired_table(done: Sequence[Done]) -> Table:
    """Returns the table of all contenders in JAX, taking turns in one process."""
    rule = _S1.format(limits.S1_PAIRED, limits.S1_LEAVES)
    title = f"Paired: a training step ({rule}; S2: nnx / plain at most {limits.S2_RATIO})"
    return _steps(title, by_model(done), limits.S1_PAIRED)


def _steps(title: str, parts: Sequence[tuple[str, int, Times]], limit: float) -> Table:
    rows = []
    for model, n, times in parts:
        best = best_by_hand(times, n)
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
    """Returns the table of contenders beyond JAX, compared with nnx objects, the slower kind."""
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
    """Returns the table of failed measurements with their reasons."""
    places_of: dict[tuple[str, str, str], list[str]] = {}
    for job_done in done:
        job = job_done.job
        where = " ".join(map(str, (*(job.names or job.leaves), "on", job.devices)))
        reasons = {"the job": job_done.lost} if job_done.lost else {}
        if job.kind == "own":
            reasons.update(*(cell["lost"] for cell in job_done.result.values()))
        for name, reason in reasons.items():
            places_of.setdefault((job.kind, name, " ".join(reason.split())), []).append(where)
    rows = [[*key[:2], ", ".join(places), key[2]] for key, places in places_of.items()]
    return Table("Not measured, or not completely", ["suite", "contender", "where", "reason"], rows)
