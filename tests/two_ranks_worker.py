"""What each of two ranks does in test_train_ranks.py: several runs behind one start of the launcher."""

import dcd_core.environment  # noqa: F401  (first: it sets what torch and others read when they are imported)

import shutil
import sys
from pathlib import Path

from toy_training import amateur_flags, family_flags, flags

from train import amateur, cross_alpha, unroll
from train.eagle3 import main
from train.processes import barrier, start

if __name__ == "__main__":
    toy, folder = Path(sys.argv[-2]), Path(sys.argv[-1])
    ranks = start(0)
    shared = ["--batch_size=2", "--max_steps=10", "--epochs=3", f"--eval_tokens={toy / 'held_out.parquet'}", "--keep=3"]
    main([*sys.argv[1:-2], *flags(toy, folder / "two", *shared, "--log_every=1")])  # the launcher's own flags first
    for stage in (2, 3):
        run = flags(toy, folder / f"zero{stage}", *shared, "--save_every=5", "--log_every=1")
        run.append(f"--deepspeed_config=configs/deepspeed/zero{stage}.json")
        main(run)
        # stopped after step 5, and gone on with
        again = folder / f"again{stage}"
        if ranks.first:
            shutil.copytree(folder / f"zero{stage}", again)
            (again / "metrics.json").unlink()
            shutil.rmtree(again / "checkpoints" / "step-00000010")
        barrier()
        main([*run, f"--output={again}"])
    # a family, whole and sharded
    for stage in (0, 3):
        more = [f"--deepspeed_config=configs/deepspeed/zero{stage}.json", "--train_alphas", "0", "0.5"]
        shuffled = ["--input=amateur_shuffled", "--log_every=1"]
        cross_alpha.main(family_flags(toy, folder / f"family{stage}", *shared, *shuffled, *more))
    # ranks with different numbers of rows, in pieces of a few: who made more pieces than the other would wait for ever
    unroll.LOGIT_BUDGET = 40 * 6
    sharded = ["--log_every=1", "--deepspeed_config=configs/deepspeed/zero3.json"]
    main(flags(toy, folder / "pieces", *shared, *sharded))
    amateur.main(amateur_flags(toy, folder / "amateur3", *shared, *sharded))
