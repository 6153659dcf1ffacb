"""One thread and quiet waiting for every test, and shapes in signatures checked as the tests run."""

import dcd_core.environment  # noqa: F401  (first: OpenMP reads its variables once)

import os

os.environ["OMP_NUM_THREADS"] = "1"  # also for the processes that tests start

import torch
from jaxtyping import install_import_hook

torch.set_num_threads(1)
install_import_hook("dcd_core", "shapes.check")
