"""Options that make warnings errors, except for the one that `tests/conftest.py` explains."""

HALF_WRITTEN = "ignore:Error reading persistent compilation cache entry"
# Python skips an option that `PYTHONWARNINGS` already has, and `error` would then be the last one.
STRICT = ["-W", "error", "-W", HALF_WRITTEN.removesuffix(" entry")]
