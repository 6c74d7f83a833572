"""`mirror demo`."""

import argparse
import contextlib
import importlib
import json
import sys

from mirror._src.base.optional import describe_missing
from mirror._src.tools.options import FAILED, USAGE_ERROR, OptionError, report_error

_PACKAGES = ("sklearn", "matplotlib")


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        # Imported here because it needs packages that the other commands do not.
        demo = importlib.import_module("mirror._src.tools.demo.run")
        with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout):
            outcome = demo.run(parsed)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PACKAGES:
            raise
        message = describe_missing(missing, "mirror demo", "demo")
        return report_error("demo", message, USAGE_ERROR)
    except OptionError as error:
        return report_error("demo", str(error), USAGE_ERROR)
    if parsed.json:
        print(json.dumps(outcome.to_dict(), indent=2))
    return 0 if outcome.passed else FAILED
