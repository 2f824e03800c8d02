"""Four host devices for every test, so that sharding is tested without a cluster."""

import os

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4",
        # Most of a test's time is compilation of programs that run a few times.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"
