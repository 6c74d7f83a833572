"""Tables of all other suites."""

from collections.abc import Sequence

from benchmarks import limits, plan
from benchmarks.record import Done
from benchmarks.report import NONE, Table, by_model, compared, ms
from benchmarks.stats import Estimate, best_of, difference, estimate, median, ratio, spread, widest

_ROUNDING = 0.01  # allows for a loss and a token beside the state


def dispatch_table(done: Sequence[Done]) -> Table:
    """Returns the table of microseconds for adding one to each leaf."""
    names = (plan.MIRROR_PLAIN, plan.MIRROR_NNX, *plan.HAND_WRITTEN)
    rows = []
    for leaves, n, times in sorted(by_model(done), key=lambda part: int(part[0])):
        goals = {
            plan.MIRROR_PLAIN: limits.dispatch_plain_us(int(leaves)),
            plan.MIRROR_NNX: limits.dispatch_nnx_us(int(leaves)),
        }
        rows.append([leaves, str(n), *(f"{median(times[c]) * 1e3:.0f}" for c in names)])
        for name, goal in goals.items():
            extra = difference(times, name, plan.JIT)
            us = Estimate(*(1e3 * x for x in (extra.median, extra.low, extra.high)))
            cell = f"{us.median:+.0f} [{us.low:+.0f}, {us.high:+.0f}]"
            rows[-1] += [cell, f"{goal:.0f}", us.at_most(goal)]
        rows[-1].append(f"{widest(times):.0%}")
    headers = ["leaves", "devices", *(f"{n} us" for n in names)]
    headers += ["plain - jit", "goal", "D1", "nnx - jit", "goal", "D2", "spread"]
    title = (
        "Pure dispatch (overhead over jit: D1, plain pytrees, at most 10 us + 0.1 us per leaf; "
        "D2, nnx, 15 us + 0.2 us per leaf)"
    )
    return Table(title, headers, rows)


def deep_table(done: Sequence[Done]) -> Table:
    """Returns the table of the 100-layer MLP with Adam: 602 variables."""
    names = (plan.MIRROR_NNX, plan.MIRROR_PLAIN, plan.NNX_JIT)
    rows = [
        [
            str(n),
            *(ms(times, name) for name in names),
            *compared(times, difference, *names[:2], limits.S2_EXTRA_MS),
            *compared(times, difference, plan.NNX_JIT, plan.MIRROR_NNX),
            f"{widest(times):.0%}",
        ]
        for _, n, times in by_model(done)
    ]
    headers = ["devices", "nnx ms", "plain ms", "nnx.jit ms", "nnx - plain ms", "S2"]
    title = f"100 layers, 602 nnx variables (S2: nnx - plain at most {limits.S2_EXTRA_MS} ms)"
    return Table(title, [*headers, "nnx.jit - nnx ms", "spread"], rows)


def rows_table(done: Sequence[Done]) -> Table:
    """Returns the table of several replicas on one device."""
    one, *several = map(str, plan.ON_ONE_DEVICE)
    rows = []
    for name, _, times in by_model(done):
        cells = [
            cell for count in several for cell in compared(times, ratio, count, one, limits.S3_ROWS)
        ]
        rows.append([name, ms(times, one), *cells, f"{widest(times):.0%}"])
    headers = [header for count in several for header in (f"{count} replicas", "S3")]
    title = (
        "Several replicas on one device, compared with one on the whole batch "
        f"(S3: at most {limits.S3_ROWS})"
    )
    return Table(title, ["model", "1 replica ms", *headers, "spread"], rows)


def staged_table(done: Sequence[Done]) -> Table:
    """Returns the table of collectives on the host."""
    rows = [
        [
            *(name, str(n), ms(times, plan.MIRROR_PLAIN), ms(times, plan.STAGED)),
            *compared(times, ratio, plan.STAGED, plan.MIRROR_PLAIN, limits.S3_STAGED),
            f"{widest(times):.0%}",
        ]
        for name, n, times in by_model(done)
    ]
    headers = ["model", "devices", "pmap ms", "staged ms", "staged / pmap", "S3", "spread"]
    title = f"Collectives on the host compared with the devices (S3: at most {limits.S3_STAGED})"
    return Table(title, headers, rows)


def trainer_table(done: Sequence[Done]) -> Table:
    """Returns the table of a step of an epoch: by hand, by `fit`, with 16 steps per launch."""
    rows = []
    for name, n, times in by_model(done):
        judged = limits.T2_MANY_STEPS if name == "small" else None
        many = compared(times, ratio, plan.FIT_16, plan.FIT, judged)
        rows.append(
            [
                *(name, str(n)),
                *(ms(times, c) for c in (plan.JIT_LOOP, plan.LOOP, plan.FIT, plan.FIT_16)),
                compared(times, ratio, plan.FIT, plan.JIT_LOOP, None)[0],
                *compared(times, ratio, plan.FIT, plan.LOOP, limits.T1_FIT),
                *(many if judged else [*many, ""]),
                f"{widest(times):.0%}",
            ]
        )
    headers = ["model", "devices", "jit loop ms", "loop ms", "fit ms", "fit 16 ms"]
    headers += ["fit / jit loop", "fit / loop", "T1"]
    title = (
        f"A step of an epoch (T1: fit / loop at most {limits.T1_FIT}; T2: 16 steps per launch / "
        f"one step, for many small layers, at most {limits.T2_MANY_STEPS})"
    )
    return Table(title, [*headers, "fit 16 / fit", "T2", "spread"], rows)


def first_table(done: Sequence[Done]) -> Table:
    """Returns the table of seconds from the call to the result, each in a fresh process.

    Noise only increases such a time, so the shortest of the repeats counts.
    """
    repeats: dict[tuple[str, int], list[dict[str, float]]] = {}
    for job_done in done:
        for name, part in job_done.result.items():
            repeats.setdefault((name, job_done.job.devices), []).append(part)

    def secs(name: str, n: int, what: str) -> float:
        return min(part[what] for part in repeats[name, n])

    counts = sorted({n for _, n in repeats})
    counts = [n for n in counts if all((name, n) in repeats for name in plan.FIRST)]
    rows = []
    for n in counts:
        lowered = [secs(name, n, "lowered") for name in plan.FIRST]
        over = lowered[plan.FIRST.index(plan.MIRROR_PLAIN)] / lowered[-1]
        firsts = [secs(name, n, "first") for name in plan.FIRST]
        more = firsts[0] / secs(plan.MIRROR_NNX, counts[0], "first")
        verdict = estimate([more]).at_most(limits.S4_DEVICES) if n == counts[-1] else ""
        noise = spread([part["first"] for part in repeats[plan.MIRROR_NNX, n]])
        rows.append(
            [
                *(str(n), *(f"{x:.3f}" for x in lowered), f"{over:.2f}"),
                estimate([over]).at_most(limits.S4_LOWERED),
                *(*(f"{x:.2f}" for x in firsts), f"{more:.2f}", verdict, f"{noise:.0%}"),
            ]
        )
    title = (
        f"The first step (S4: time to the lowered program, plain / shard_map, at most "
        f"{limits.S4_LOWERED}; whole step, most / fewest devices, at most {limits.S4_DEVICES})"
    )
    headers = ["devices", *(f"{name} lowered s" for name in plan.FIRST), "plain/shard_map", "S4"]
    headers += [*(f"{name} first s" for name in plan.FIRST), "over fewest", "S4", "spread"]
    return Table(title, headers, rows)


def starts_table(done: Sequence[Done]) -> Table:
    """Returns the table of seconds from the start of a program to its first step.

    The shortest of the repeats counts.
    """
    repeats: dict[tuple[str, int], list[dict[str, float]]] = {}
    for name, n, part in by_model(done):
        repeats.setdefault((name, n), []).append(part)
    rows = []
    for (name, n), parts in repeats.items():
        first, second = (min(part[what] for part in parts) for what in ("first", "second"))
        noise = spread([part["second"] for part in parts])
        verdict = estimate([second]).at_most(limits.C1_SECS)
        rows.append([name, str(n), f"{first:.2f}", f"{second:.2f}", verdict, f"{noise:.0%}"])
    title = (
        "From the start of a program to its first step, with an empty compile cache and with a "
        f"full one (C1: at most {limits.C1_SECS:g} s)"
    )
    return Table(title, ["model", "devices", "first s", "second s", "C1", "spread"], rows)


def memory_table(done: Sequence[Done]) -> Table:
    """Returns the table of copies of the state on the fullest device."""
    rows = []
    for name, n, part in by_model(done):
        copies = part["copies"]
        holds = max(copies) <= limits.S5_COPIES + _ROUNDING and part["reused"] == 1
        rows.append(
            [
                *(name, str(n), f"{part['state_bytes'] / 1024:.0f}"),
                *(f"{c:.3f}" for c in copies),
                f"{part['reused']:.0%}",
                "holds" if holds else "BROKEN",
                *_sharded_cells(part.get("sharded")),
                *_peak_cells(part.get("peak")),
            ]
        )
    headers = ["model", "devices", "state KiB", "copies before", "copies after", "reused", "S5"]
    title = (
        "Memory of the fullest device (S5: one copy; all buffers reused; in slices, the "
        "least possible fraction of the optimizer state)"
    )
    headers += ["optimizer sharded", "at best", "S5", "peak MiB", "estimated"]
    return Table(title, headers, rows)


def slices_table(done: Sequence[Done]) -> Table:
    """Returns the table of the ways to store the state; the processes took turns."""
    turns: dict[str, dict[str, list[dict[str, float]]]] = {}
    for each in done:
        for name, part in each.result.items():
            turns.setdefault(name, {}).setdefault(each.job.contenders[0], []).append(part)
    rows = []
    for name, ways in turns.items():
        times = {way: [part["step"] for part in parts] for way, parts in ways.items()}
        by_hand = [way for way in plan.SLICED_BY_HAND if way in times]
        best = best_of(times, by_hand) if by_hand else ""
        for way, parts in ways.items():
            sizes = [parts[0]["state"], parts[0]["temporaries"], max(p["process"] for p in parts)]
            rows.append([name, way, *(f"{size / 2**20:.1f}" for size in sizes)])
            rows[-1].append(f"{min(part['first'] for part in parts):.1f}")
            rows[-1] += compared(times, ratio, way, plan.MIRRORED)
            limited = compared(times, ratio, way, best, limits.S7_SLICES)
            rows[-1] += limited if way == plan.SLICED else [limited[0], NONE]
    headers = ["model", "state", "state MiB", "temporaries MiB", "process MiB", "first s"]
    headers += ["step over mirrored", "over the best by hand", "S7"]
    title = (
        "Models in slices, each in its own process: memory of a device, peak of the process, CPU "
        f"time of a step (S7: at most {limits.S7_SLICES} of the best by hand)"
    )
    return Table(title, headers, rows)


def _peak_cells(peak: dict[str, int | None] | None) -> list[str]:
    counts = [None, None] if peak is None else [peak["reported"], peak["estimate"]]
    return [NONE if count is None else f"{count / 2**20:.1f}" for count in counts]


def _sharded_cells(sharded: dict[str, float] | None) -> list[str]:
    if sharded is None:
        return [NONE] * 3
    share, least = sharded["share"], sharded["least"]
    verdict = "holds" if share <= least * (1 + _ROUNDING) else "BROKEN"
    return [f"{share:.3f}", f"{least:.3f}", verdict]
