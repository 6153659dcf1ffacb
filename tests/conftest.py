"""One thread and quiet waiting for every test, and shapes in signatures checked as the tests run."""

import dcd_core.environment  # noqa: F401  (first: OpenMP reads its variables once)

import atexit
import os
import shutil
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"  # also for the processes that tests start
# transformers copies custom code there, and does not expect another worker of the tests to read it meanwhile
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="dcd-tests-")

import torch
from jaxtyping import install_import_hook

atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
torch.set_num_threads(1)
if os.environ.get("DCD_SHAPES") != "0":  # takes half as long again
    install_import_hook("dcd_core", "shapes.check")
