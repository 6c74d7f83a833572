"""The `mirror` command. It imports JAX only when a command needs it."""

from mirror._src.tools.main import main as main
