"""Runs the `mirror` command for `python -m mirror_cli`, without importing JAX."""

import sys

from mirror_cli.main import main

sys.exit(main())
