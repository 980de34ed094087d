"""Two devices on a CPU, one thread, and warnings are errors (pyproject.toml).

Compiling takes most of the time, and nothing here depends on how fast its result is.
"""

import os

FLAGS = (
    "force_host_platform_device_count=2",
    "backend_optimization_level=0",
    "cpu_use_fusion_emitters=false",
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(f"--xla_{flag}" for flag in FLAGS)
