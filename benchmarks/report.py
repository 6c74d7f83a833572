"""From the measurements of all jobs to tables, with the limits that hold and those that do not."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import plan
from benchmarks.stats import Estimate, best_of, difference, estimate, ratio, spread

S1_RATIO, S2_RATIO, S2_EXTRA_MS = 1.05, 1.15, 1.5
S3_RATIO, S3_STAGED_RATIO, S4_RATIO, S5_COPIES = 1.05, 1.5, 1.5, 1.0
FIT_RATIO, MANY_STEPS_RATIO = 1.05, 0.7
_ROUNDING = 0.01  # a loss and a token are no copy of the state

Times = dict[str, list[float]]
Done = tuple[plan.Job, dict[str, Any]]


@dataclass(frozen=True)
class Table:
    """A titled table of strings."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """Aligned for a terminal."""
        widths = [max(map(len, column)) for column in zip(self.headers, *self.rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(pairs))
            for pairs in (list(zip(row, widths, strict=True)) for row in [self.headers, *self.rows])
        ]
        return "\n".join([self.title, lines[0], "-" * len(lines[0]), *lines[1:]])

    def markdown(self) -> str:
        """As Markdown has it."""
        rule = ["---", *["---:"] * (len(self.headers) - 1)]
        lines = ["| " + " | ".join(row) + " |" for row in [self.headers, rule, *self.rows]]
        return "\n".join([f"**{self.title}**", "", *lines])


def tables(done: Iterable[Done]) -> list[Table]:
    """The tables of all suites that were measured."""
    by_kind: dict[str, list[Done]] = {}
    for job, result in done:
        by_kind.setdefault(job.kind, []).append((job, result))
    makers = {
        "steps": steps_table,
        "dispatch": dispatch_table,
        "deep": deep_table,
        "rows": rows_table,
        "staged": staged_table,
        "trainer": trainer_table,
        "first": first_table,
        "memory": memory_table,
    }
    return [make(by_kind[kind]) for kind, make in makers.items() if kind in by_kind]


def _ms(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f}"


def _within(found: Estimate) -> str:
    return f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]"


def steps_table(done: Sequence[Done]) -> Table:
    """Training steps; S1 is judged on plain pytrees, which is what is written by hand too."""
    rows = []
    for name in dict.fromkeys(name for _, result in done for name in result):
        for job, result in done:
            if name in result:
                rows.append([name, str(job.devices), *_step_cells(result[name])])
    headers = ["model", "devices", "nnx ms", "plain ms", *(f"{n} ms" for n in plan.HAND_WRITTEN)]
    headers += ["best", "plain/best", "S1", "nnx/best", "nnx/plain", "S2", "spread"]
    title = f"A training step (S1: plain/best <= {S1_RATIO}; S2: nnx/plain <= {S2_RATIO})"
    return Table(title, headers, rows)


def _step_cells(times: Times) -> list[str]:
    best = best_of(times, plan.HAND_WRITTEN)
    plain = ratio(times, plan.MIRROR_PLAIN, best)
    objects = ratio(times, plan.MIRROR_NNX, plan.MIRROR_PLAIN)
    return [
        *(_ms(times[n]) for n in (plan.MIRROR_NNX, plan.MIRROR_PLAIN, *plan.HAND_WRITTEN)),
        best,
        _within(plain),
        plain.at_most(S1_RATIO),
        _within(ratio(times, plan.MIRROR_NNX, best)),
        _within(objects),
        objects.at_most(S2_RATIO),
        f"{max(map(spread, times.values())):.0%}",
    ]


def dispatch_table(done: Sequence[Done]) -> Table:
    """Microseconds for adding one to so many leaves."""
    names = (plan.MIRROR_PLAIN, *plan.HAND_WRITTEN)
    rows = []
    for job, result in done:
        for leaves, times in result.items():
            best = best_of(times, plan.HAND_WRITTEN)
            rows.append(
                [
                    leaves,
                    str(job.devices),
                    *(f"{statistics.median(times[n]) * 1e3:.0f}" for n in names),
                    best,
                    _within(ratio(times, plan.MIRROR_PLAIN, best)),
                    f"{difference(times, plan.MIRROR_PLAIN, best).median * 1e3:+.0f}",
                    f"{max(map(spread, times.values())):.0%}",
                ]
            )
    rows.sort(key=lambda row: int(row[0]))
    headers = ["leaves", "devices", *(f"{n} us" for n in names)]
    return Table(
        "Pure dispatch (no limit; what a step costs beyond its computation)",
        [*headers, "best", "mirror/best", "extra us", "spread"],
        rows,
    )


def deep_table(done: Sequence[Done]) -> Table:
    """The 100-layer MLP with Adam: 602 variables."""
    rows = []
    for job, result in done:
        times = result["deep"]
        extra = difference(times, plan.MIRROR_NNX, plan.MIRROR_PLAIN)
        alone = times.get(plan.NNX_JIT)
        saved = difference(times, plan.NNX_JIT, plan.MIRROR_NNX) if alone else None
        rows.append(
            [
                str(job.devices),
                _ms(times[plan.MIRROR_NNX]),
                _ms(times[plan.MIRROR_PLAIN]),
                _ms(alone) if alone else "",
                _within(extra),
                extra.at_most(S2_EXTRA_MS),
                _within(saved) if saved else "",
                f"{max(map(spread, times.values())):.0%}",
            ]
        )
    headers = ["devices", "nnx ms", "plain ms", "nnx.jit ms", "nnx - plain ms", "S2"]
    title = f"100 layers, 602 nnx variables (S2: nnx - plain <= {S2_EXTRA_MS} ms)"
    return Table(title, [*headers, "nnx.jit - nnx ms", "spread"], rows)


def rows_table(done: Sequence[Done]) -> Table:
    """Several replicas on one device against one with the whole batch."""
    one, *several = map(str, plan.ON_ONE_DEVICE)
    rows = []
    for _, result in done:
        for name, times in result.items():
            ratios = {count: ratio(times, count, one) for count in several}
            cells = [cell for r in ratios.values() for cell in (_within(r), r.at_most(S3_RATIO))]
            rows.append([name, _ms(times[one]), *cells, f"{max(map(spread, times.values())):.0%}"])
    headers = [header for count in several for header in (f"{count} replicas", "S3")]
    title = f"Several replicas on one device, over one with the whole batch (S3: <= {S3_RATIO})"
    return Table(title, ["model", "1 replica ms", *headers, "spread"], rows)


def staged_table(done: Sequence[Done]) -> Table:
    """Exchanges on the host against exchanges among the devices."""
    rows = []
    for job, result in done:
        for name, times in result.items():
            found = ratio(times, plan.STAGED, plan.MIRROR_PLAIN)
            cells = [_ms(times[plan.MIRROR_PLAIN]), _ms(times[plan.STAGED]), _within(found)]
            noise = f"{max(map(spread, times.values())):.0%}"
            rows.append([name, str(job.devices), *cells, found.at_most(S3_STAGED_RATIO), noise])
    headers = ["model", "devices", "pmap ms", "staged ms", "staged / pmap", "S3", "spread"]
    title = f"Exchanges on the host over those among the devices (S3: <= {S3_STAGED_RATIO})"
    return Table(title, headers, rows)


def trainer_table(done: Sequence[Done]) -> Table:
    """A step of an epoch, by hand, by the trainer, and by it with 16 steps in a launch."""
    rows = []
    for job, result in done:
        for name, times in result.items():
            fit, many = ratio(times, plan.FIT, plan.LOOP), ratio(times, plan.FIT_16, plan.FIT)
            cells = [_ms(times[n]) for n in (plan.LOOP, plan.FIT, plan.FIT_16)]
            judged = many.at_most(MANY_STEPS_RATIO) if name == "small" else ""
            cells += [_within(fit), fit.at_most(FIT_RATIO), _within(many), judged]
            rows.append([name, str(job.devices), *cells, f"{max(map(spread, times.values())):.0%}"])
    headers = ["model", "devices", "loop ms", "fit ms", "fit 16 ms", "fit / loop", "T1"]
    title = (
        f"A step of an epoch (T1: fit / loop <= {FIT_RATIO}; T2: 16 steps in a launch over one, of "
        f"many small layers <= {MANY_STEPS_RATIO})"
    )
    return Table(title, [*headers, "fit 16 / fit", "T2", "spread"], rows)


def first_table(done: Sequence[Done]) -> Table:
    """Seconds to the first step, each in a fresh process; the fewest of the repeats."""
    secs: dict[tuple[str, int], list[float]] = {}
    for job, result in done:
        secs.setdefault((job.names[0], job.devices), []).append(result[job.names[0]])
    counts = sorted({n for _, n in secs})
    ours = {n: min(secs[plan.MIRROR_NNX, n]) for n in counts}
    rows = []
    for n in counts:
        over = ours[n] / ours[counts[0]]
        by_hand = min(secs[plan.SHARD_MAP, n])
        verdict = estimate([over]).at_most(S4_RATIO) if n == counts[-1] else ""
        spent = spread(secs[plan.MIRROR_NNX, n])
        cells = [f"{ours[n]:.2f}", f"{by_hand:.2f}", f"{over:.2f}", verdict, f"{spent:.0%}"]
        rows.append([str(n), *cells])
    title = f"Time to the first step (S4: the last over the first <= {S4_RATIO})"
    headers = ["devices", "mirror nnx s", "shard_map s", f"over {counts[0]} devices"]
    return Table(title, [*headers, "S4", "spread"], rows)


def memory_table(done: Sequence[Done]) -> Table:
    """Copies of the state on the fullest device."""
    rows = []
    for job, result in done:
        for name, found in result.items():
            copies = found["copies"]
            held = max(copies) <= S5_COPIES + _ROUNDING and found["reused"] == 1
            rows.append(
                [
                    name,
                    str(job.devices),
                    f"{found['state_bytes'] / 1024:.0f}",
                    *(f"{c:.3f}" for c in copies),
                    f"{found['reused']:.0%}",
                    "holds" if held else "BROKEN",
                ]
            )
    headers = ["model", "devices", "state KiB", "copies before", "copies after", "reused", "S5"]
    return Table("Memory of the fullest device (S5: one copy; buffers reused)", headers, rows)
