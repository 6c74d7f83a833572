"""Runs the `mirror` command for `python -m mirror`."""

import sys

from mirror._src.tools.main import main

sys.exit(main())
