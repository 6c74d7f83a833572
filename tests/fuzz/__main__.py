"""`python -m tests.fuzz PROFILE SEED`: shows a program, checks it, and shrinks a violation.

With `--run` it runs under every executor as well; `--secs` goes on with the seeds that follow.
"""

import argparse
import sys
import time

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from tests.fuzz.generate import PROFILES, generate  # noqa: E402
from tests.fuzz.laws import (  # noqa: E402
    Tally,
    checked,
    cpu_strategies,
    proof_law,
    run_law,
    shrunk,
)
from tests.fuzz.program import listing  # noqa: E402


def main() -> int:
    """Checks what the command line asks for; how many programs break a law."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("profile", choices=[*PROFILES])
    parser.add_argument("seed", type=int)
    parser.add_argument("--run", action="store_true", help="run it under every executor as well")
    parser.add_argument("--secs", type=float, default=0.0, help="continue with the following seeds")
    parser.add_argument("--quiet", action="store_true", help="show only programs that break a law")
    options = parser.parse_args()
    strategies = cpu_strategies()

    def law(program, tally):
        if options.run:
            return run_law(strategies, program, tally)
        return proof_law(next(iter(strategies.values())), program, tally)

    tally, broken, seed = Tally(), 0, options.seed
    end = time.monotonic() + options.secs
    while True:
        program = generate(options.profile, seed)
        failure = checked(law, program, tally)
        if failure is not None or not options.quiet:
            print(f"-- {options.profile} {seed}")
            print(listing(program))
        if failure is not None:
            broken += 1
            print(f"{failure.law}: {failure.words}\nshrunk:")
            print(listing(shrunk(law, program, failure.law)), flush=True)
        seed += 1
        if time.monotonic() > end:
            break
    print(tally)
    return broken


if __name__ == "__main__":
    sys.exit(main())
