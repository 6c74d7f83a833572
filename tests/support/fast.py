"""Options with which XLA compiles for a CPU in less than half the time."""

from importlib import metadata

# Without fusion emitters, and without splitting a program for more threads. Only jaxlib 0.10 has
# the first flag; newer versions abort when they read it.
FLAGS = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if metadata.version("jaxlib").startswith("0.10.")
    else ""
)
# For processes whose results do not depend on them. Others compile as users do.
ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **({"XLA_FLAGS": FLAGS} if FLAGS else {})}
