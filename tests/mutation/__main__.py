"""`python -m tests.mutation [--base DIR] [NAME ...]`: which tests catch which planted fault.

Copies the tree, plants one fault at a time, and runs the tests that should find it. With
`--compare`, it fails if a fault escapes that an earlier run has caught.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.mutation.faults import FAULTS
from tests.mutation.run import ESCAPED, Copy, escaped_now

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Runs what the command line asks for; returns 1 if a fault escapes that was caught before."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("names", nargs="*", help="faults to plant (default: all)")
    parser.add_argument("--base", type=Path, default=ROOT, help="the tree to test")
    parser.add_argument("--json", type=Path, help="file to update: each fault, and what caught it")
    parser.add_argument("--compare", type=Path, help="such a file of an earlier run")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that end a hang")
    parser.add_argument("--verbose", action="store_true", help="print what pytest printed")
    options = parser.parse_args()
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"unknown fault {unknown[0]!r}")
    faults = [known[name] for name in options.names or known]
    found: dict[str, str] = {}
    catching: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="mirror-mutation-") as folder:
        copy = Copy(options.base.resolve(), Path(folder), options.limit)
        for number, fault in enumerate(faults, 1):
            start = time.monotonic()
            try:
                outcome = copy.outcome(fault)
            except LookupError as error:
                print(f"{number}/{len(faults)} NOT PLANTED {error}", flush=True)
                continue
            found[fault.name] = outcome.file
            if "::" in outcome.caught:
                catching.setdefault(outcome.caught, []).append(fault.name)
            secs = time.monotonic() - start
            head = f"{number}/{len(faults)} {fault.name}: {outcome.caught}"
            print(f"{head} ({secs:.0f} s)", flush=True)
            if options.verbose:
                print(outcome.output)
            if options.json is not None:
                earlier = json.loads(options.json.read_text()) if options.json.exists() else {}
                text = json.dumps({**earlier, **found}, indent=0)
                options.json.write_text(f"{text}\n")
        tests = [test.removesuffix("::crash") for test in catching if not test.endswith("::hang")]
        for test in copy.failing(tests) if tests else ():
            names = [*catching.get(test, ()), *catching.get(f"{test}::crash", ())]
            print(f"FAILS WITHOUT A FAULT {test}: {', '.join(names)}")
    escaped = [name for name, caught in found.items() if caught == ESCAPED]
    print(f"{len(found) - len(escaped)} of {len(found)} faults caught")
    for name in escaped:
        print(f"ESCAPED {name}")
    if options.compare is None:
        return 0
    lost = escaped_now(json.loads(options.compare.read_text()), found)
    for name, file in lost.items():
        print(f"CAUGHT BEFORE, by {file}: {name}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
