"""Scripts behind the real deepspeed launcher."""

import os
import subprocess
import sys
from pathlib import Path

from toy_training import GROUP

from dcd_core.processes import free_port

ROOT = Path(__file__).resolve().parent.parent


def launch(*command: str) -> str:
    """Two ranks of a script, as ``deepspeed --num_accelerators 2 SCRIPT ...`` starts them; what they printed."""
    # the variables of this process's own group must not reach the launcher
    environment = {name: value for name, value in os.environ.items() if name not in GROUP}
    path = [str(ROOT), str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators=2"]
    done = subprocess.run(
        [*launcher, f"--master_port={free_port()}", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
