"""Process settings that must be in place before torch or transformers is imported; import this module first.

Nothing that the user has set is changed. Why each one is here:

* OMP_WAIT_POLICY=PASSIVE: OpenMP threads otherwise spin while they wait, and one other busy process on the machine
  then slows a forward pass by a factor of fifty or more.
* TOKENIZERS_PARALLELISM=false: the tokenizers library warns, and may hang, when a process forks after using its
  threads.
* TRANSFORMERS_NO_ADVISORY_WARNINGS: advice for interactive use is noise in a log of a long run.
* HF_HUB_DISABLE_PROGRESS_BARS: bars are for terminals; in a log each of their frames is a line of its own.
* MPLBACKEND=Agg: plots go to files, and a machine without a display must be able to draw them.
* torchao and deepspeed, where they are installed, are imported with transformers, and warn on every machine without a
  GPU.
"""

import logging
import os
import sys

SETTINGS = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "MPLBACKEND": "Agg",
}

CHECK_MODELS = "DCD_CHECK_MODELS"
"""0 loads models without comparing them with their own forward (:mod:`dcd_core.model_check`)."""

for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)
if sys.stderr is None or not sys.stderr.isatty():
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
