"""Raw chats, and what data_prep/conversations.py makes of a file of them."""

import json

from data_prep.conversations import main
from data_prep.messages import read_conversations


def share(name, *turns):
    """A ShareGPT record."""
    return {"id": name, "conversations": [{"from": role, "value": text} for role, text in turns]}


def message(content, role="user", **more):
    """A message in OpenAI's form."""
    return {"role": role, "content": content, **more}


def run(tmp_path, source, *flags):
    """The conversations made of a source, and the report."""
    out = tmp_path / "out.jsonl"
    out.unlink(missing_ok=True)
    assert main(["--source", str(source), "--out", str(out), *flags]) == 0
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    return list(read_conversations(out)), report
