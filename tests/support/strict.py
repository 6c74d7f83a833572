"""Options that make warnings errors, except for the one that `tests/conftest.py` explains."""

HALF_WRITTEN = "ignore:Error reading persistent compilation cache entry"
STRICT = ["-W", "error", "-W", HALF_WRITTEN]
