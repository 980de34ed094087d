"""Two devices on a CPU, one thread, and warnings are errors (pyproject.toml)."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
