"""A process of `benchmarks.served`: a contender that takes as many steps as each line says."""

import contextlib
import json
import sys

from benchmarks.processes import claim_stdout
from benchmarks.served import UPDATES
from mirror._src.ps.ray_cluster import Connection


def main() -> None:
    """Answers each line with the losses of the steps."""
    answers, request = claim_stdout(), json.loads(sys.argv[1])
    connection = Connection(None)
    try:
        with contextlib.closing(UPDATES[request["name"]]()) as program:
            for line in sys.stdin:
                print(json.dumps({"losses": program.take(int(line))}), file=answers)
    finally:
        connection.close()


if __name__ == "__main__":
    main()
