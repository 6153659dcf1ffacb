"""What every measurement starts from: prompts rendered to ids, the pair, and the head with its tapped layers."""

import hashlib
import inspect
import json
import re
from pathlib import Path

from jinja2 import TemplateError

from data_prep.chat_template import load_chat_tokenizer, render_ids, stop_ids
from dcd_core.decode import Assembled, Prompt
from dcd_core.errors import UserError
from dcd_core.files import file_hash
from dcd_core.heads.checkpoint import load_head, load_head_config
from dcd_core.heads.eagle3 import Eagle3Head
from dcd_core.methods import assemble
from dcd_core.models import LanguageModel, Pair, load_pair

_HASH = re.compile(r"-[0-9a-f]{12,}$")


def load_models(expert: str, amateur: str, head: str, dtype: str, device: str) -> tuple[Pair, Eagle3Head | None]:
    """The pair, and the head if one is named; the head's config says which layers of the expert are tapped."""
    taps = load_head_config(head).feature_layers if head else None
    pair = load_pair(expert, amateur or None, dtype, device, feature_layers=taps)
    return pair, _head_for(pair, head) if head else None


def _head_for(pair: Pair, folder: str) -> Eagle3Head:
    head = load_head(folder, pair.expert)
    largest = int(head.target_ids[-1])
    if largest >= pair.expert.vocab:
        raise UserError(
            f"{folder} drafts id {largest}, but the pair shares only {pair.expert.vocab} real ids; the head's draft "
            "vocabulary reaches into the padding, so it was made for another pair"
        )
    return head


def put_together(name: str, pair: Pair, head: Eagle3Head | None, lm: LanguageModel | None = None) -> Assembled:
    """Any method, with the head and a small language model (by default the amateur, which is one) for those that draft
    with them."""
    # the methods that draft with a language model bring this argument with them
    model = {"lm": lm or pair.amateur} if "lm" in inspect.signature(assemble).parameters else {}
    return assemble(name, pair, head, **model)


def read_prompts(path: str, expert: str, limit: int = 0, **template_arguments) -> tuple[list[Prompt], tuple[int, ...]]:
    """Prompts of a conversation file (JSONL {id, messages}) as ids, and the ids that end an answer.

    A prompt is the conversation up to its last user message, with the generation prompt of the expert's chat template.
    `limit` 0 takes all. Raises UserError for a missing or empty file, a bad line, or an id that occurs twice (answers
    are paired by id).
    """
    tokenizer = load_chat_tokenizer(expert)
    prompts: dict[str, Prompt] = {}
    for number, line in _lines(path):
        if limit and len(prompts) == limit:
            break
        where = f"{path}, line {number}"
        messages, name = _conversation(line, where)
        if name in prompts:
            raise UserError(f"{where}: the id '{name}' occurs twice; answers are paired by id, so give each its own")
        try:
            ids = render_ids(tokenizer, messages, True, **template_arguments)
        except TemplateError as problem:
            raise UserError(f"{where}: the chat template of {expert} refuses it: {problem}") from None
        prompts[name] = Prompt(name, ids)
    if not prompts:
        raise UserError(f'{path} is empty; it needs lines such as {{"id": "1", "messages": [...]}}')
    return list(prompts.values()), stop_ids(tokenizer, expert)


def short_name(path: str) -> str:
    """What the report calls a model: the last part of its hub id, or its folder's own name without a cache's hash."""
    if not path:
        return "none"
    folder = Path(path).resolve() if Path(path).is_dir() else Path(path)
    own = folder.parent.name if folder.name == "model" else folder.name  # a trained amateur stands in <run>/model
    return _HASH.sub("", own)


def inputs_key(prompts: str, *models: str) -> dict[str, str]:
    """What a partial result is keyed by: the prompts' hash, and fingerprints of models in local folders."""
    folders = [model for model in models if model and Path(model).is_dir()]
    return {"prompts": file_hash(prompts)} | {folder: fingerprint(folder) for folder in folders}


def fingerprint(folder: str) -> str:
    """Hash of a model folder: its config whole, and 16 samples spread over each of its weight files.

    Training changes weights everywhere, so samples see it, and a large model need not be read whole.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin"):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size};".encode())
            with path.open("rb") as handle:
                for sample in range(16):
                    handle.seek(size * sample // 16)
                    digest.update(handle.read(65536))
    return digest.hexdigest()


def _lines(path: str) -> list[tuple[int, str]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"cannot read the prompts in {path}: {getattr(problem, 'strerror', None) or problem}") from None
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _conversation(line: str, where: str) -> tuple[list[dict], str]:
    expected = (
        "a prompt is {id, messages: [{role, content}]} with a user message; data_prep/conversations.py makes such files"
    )
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{where} is not JSON; {expected}") from None
    for name, kind in (("id", str | int), ("messages", list)):
        if not isinstance(record, dict) or not isinstance(record.get(name), kind):
            raise UserError(f"{where} has no '{name}'; {expected}")
    messages = record["messages"]
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError(f"{where} holds a message without role and content as text; {expected}")
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise UserError(f"{where} has no user message; {expected}")
    return messages[: users[-1] + 1], str(record["id"])
