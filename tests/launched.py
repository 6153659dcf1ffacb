"""Scripts behind the real deepspeed launcher."""

import os
import signal
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
    process = subprocess.Popen(
        [*launcher, f"--master_port={free_port()}", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=1200)
    finally:
        if process.poll() is None:  # the ranks with it, or they would slow down all that follows
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out + errors
    return out
