"""`python -m mirror` is the `mirror` command."""

import sys

from mirror._src.cli.main import main

sys.exit(main())
