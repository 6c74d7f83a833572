"""Runs the `mirror` command for `python -m mirror`."""

import sys

from mirror_cli.main import main

sys.exit(main())
