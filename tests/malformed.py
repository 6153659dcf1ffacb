"""Inputs that are broken, by what is broken about them: `python tests/malformed.py` lists them.

Every one is given, by tests/test_malformed.py, to entry points that read its kind of file; each must answer in one line
with exit code 2 and leave nothing half-written.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

World = Path


# ---- ways to break a file --------------------------------------------------------------------------------------------


def text(path: str, content: str | bytes) -> Callable[[World], None]:
    """The file holds this instead."""

    def change(world: World) -> None:
        raw = content if isinstance(content, bytes) else content.encode()
        (world / path).write_bytes(raw)

    return change


def gone(path: str) -> Callable[[World], None]:
    def change(world: World) -> None:
        where = world / path
        shutil.rmtree(where) if where.is_dir() else where.unlink()

    return change


def cut(path: str, size: int) -> Callable[[World], None]:
    """Only its first bytes are there."""

    def change(world: World) -> None:
        (world / path).write_bytes((world / path).read_bytes()[:size])

    return change


def fields(path: str, **changes) -> Callable[[World], None]:
    """A JSON object with other fields; None takes one out."""

    def change(world: World) -> None:
        found = json.loads((world / path).read_text())
        found = {name: value for name, value in {**found, **changes}.items() if value is not None}
        (world / path).write_text(json.dumps(found))

    return change


def tensors(path: str, alter: Callable[[dict], dict]) -> Callable[[World], None]:
    """A safetensors file with other tensors."""

    def change(world: World) -> None:
        found = {name: value.clone() for name, value in load_file(world / path).items()}
        save_file(alter(found), world / path, metadata={"format": "pt"})

    return change


def as_file(path: str) -> Callable[[World], None]:
    """A file stands where a folder should."""

    def change(world: World) -> None:
        shutil.rmtree(world / path)
        (world / path).write_text("x")

    return change


def as_folder(path: str) -> Callable[[World], None]:
    def change(world: World) -> None:
        (world / path).unlink()
        (world / path).mkdir()

    return change


def table(**columns) -> Callable[[World], None]:
    """A token file with other columns; None takes one out."""

    def change(world: World) -> None:
        path = world / "train.parquet"
        found = pq.read_table(path)
        for name, values in columns.items():
            index = found.column_names.index(name)
            found = found.remove_column(index)
            if values is not None:
                found = found.append_column(name, values if isinstance(values, pa.Array) else pa.array(values))
        pq.write_table(found.replace_schema_metadata(pq.read_schema(path).metadata), path)

    return change


def lines(*records) -> str:
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


def said(*contents, **more) -> dict:
    """A conversation of user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"id": "a", "messages": messages, **more}


def nan(found: dict) -> dict:
    next(iter(found.values())).view(-1)[0] = torch.nan
    return found


def first_shape(found: dict) -> dict:
    name = next(name for name, value in found.items() if value.dim() == 2)
    return {**found, name: found[name][:-1].contiguous()}


def first_gone(found: dict) -> dict:
    return dict(list(found.items())[1:])


def without(*words: str) -> Callable[[dict], dict]:
    return lambda found: {name: value for name, value in found.items() if not any(word in name for word in words)}


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"

# ---- the list --------------------------------------------------------------------------------------------------------

MODEL = {
    "a folder that is not there": gone("expert"),
    "a file in the folder's place": as_file("expert"),
    "no config.json": gone("expert/config.json"),
    "an empty config.json": text("expert/config.json", ""),
    "half a config.json": cut("expert/config.json", 60),
    "a list in config.json": text("expert/config.json", "[]"),
    "binary in config.json": text("expert/config.json", b"\xff\xfe\x00\x01"),
    "no model_type": fields("expert/config.json", model_type=None, architectures=None),
    "an unknown model_type": fields("expert/config.json", model_type="warp"),
    "a model that is none of language": fields("expert/config.json", model_type="vit"),
    "a hidden size that heads do not divide": fields("expert/config.json", hidden_size=30, head_dim=None),
    "a negative hidden size": fields("expert/config.json", hidden_size=-32),
    "a hidden size in words": fields("expert/config.json", hidden_size="big"),
    "another hidden size than the weights": fields("expert/config.json", hidden_size=64),
    "no layers": fields("expert/config.json", num_hidden_layers=0),
    "more layers than weights": fields("expert/config.json", num_hidden_layers=9),
    "fewer layers than weights": fields("expert/config.json", num_hidden_layers=7),
    "a smaller vocabulary than the tokenizer": fields("expert/config.json", vocab_size=50),
    "no heads": fields("expert/config.json", num_attention_heads=0),
    "an unknown activation": fields("expert/config.json", hidden_act="warp"),
    "unknown rotary positions": fields(
        "expert/config.json", rope_parameters={"rope_type": "warp", "rope_theta": 1e4}, rope_theta=None
    ),
    "an unknown quantisation": fields("expert/config.json", quantization_config={"quant_method": "warp"}),
    "quantisation without a method": fields("expert/config.json", quantization_config={"bits": 4}),
    "code of its own": fields(
        "expert/config.json", model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.M"}
    ),
    "no weights": gone("expert/model.safetensors"),
    "empty weights": text("expert/model.safetensors", ""),
    "half of the weights": cut("expert/model.safetensors", 3000),
    "a pointer in the weights' place": text("expert/model.safetensors", LFS),
    "text in the weights' place": text("expert/model.safetensors", "hello " * 50),
    "a layer missing": tensors("expert/model.safetensors", without("layers.3.")),
    "no embedding": tensors("expert/model.safetensors", without("embed_tokens")),
    "a weight of another shape": tensors("expert/model.safetensors", first_shape),
    "NaN in a weight": tensors("expert/model.safetensors", nan),
    "an index of shards that are not there": lambda world: (
        gone("expert/model.safetensors")(world),
        text(
            "expert/model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": "model-1-of-2.safetensors"}}'
        )(world),
    ),
    "no tokenizer": lambda world: [path.unlink() for path in (world / "expert").glob("tokenizer*")],
    "half a tokenizer": cut("expert/tokenizer.json", 200),
    "an empty tokenizer": text("expert/tokenizer.json", "{}"),
    "a broken tokenizer_config": text("expert/tokenizer_config.json", "{"),
    "an unknown tokenizer class": fields("expert/tokenizer_config.json", tokenizer_class="WarpTokenizer"),
    "a broken generation_config": text("expert/generation_config.json", "{"),
    "a generation_config that is a list": text("expert/generation_config.json", "[]"),
    "an end of turn in words": fields("expert/generation_config.json", eos_token_id="x"),
    "an end of turn that is null in a list": fields("expert/generation_config.json", eos_token_id=[3, None]),
    "an end of turn in a list of lists": fields("expert/generation_config.json", eos_token_id=[[3]]),
    "a broken chat template": text("expert/chat_template.jinja", "{% for m in messages %}{{ m['content'] }"),
    "a chat template that refuses": text("expert/chat_template.jinja", "{{ raise_exception('no') }}"),
    "a chat template that writes nothing": text("expert/chat_template.jinja", ""),
}
HEAD = {
    "no head": gone("head"),
    "a file in the head's place": as_file("head"),
    "a head without config.json": gone("head/config.json"),
    "a head with half a config.json": cut("head/config.json", 50),
    "a list as the head's config": text("head/config.json", "[1]"),
    "a head without a hidden size": fields("head/config.json", hidden_size=None),
    "a head of another hidden size": fields("head/config.json", hidden_size=48),
    "a head's hidden size in words": fields("head/config.json", hidden_size="32"),
    "a head with more draft ids than ids": fields("head/config.json", draft_vocab_size=5000),
    "a head of another vocabulary": fields("head/config.json", vocab_size=64),
    "a head of three layers": fields("head/config.json", num_hidden_layers=3),
    "a head without heads": fields("head/config.json", num_attention_heads=0),
    "a head that taps two layers": fields(
        "head/config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}
    ),
    "a head that taps layers that are not there": fields(
        "head/config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 30]}
    ),
    "a head that taps words": fields("head/config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": "low"}),
    "a head that taps negative layers": fields(
        "head/config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": [-3, -2, -1]}
    ),
    "a head with other rotary positions": fields("head/config.json", rope_theta=5.0, rope_parameters=None),
    "a head whose two thetas differ": fields("head/config.json", rope_theta=5.0),
    "a head whose two rotary scalings differ": fields(
        "head/config.json", rope_scaling={"rope_type": "yarn", "factor": 4.0}
    ),
    "a head that drafts in parallel": fields(
        "head/config.json",
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "parallel_drafting": True},
    ),
    "a head with unknown rotary scaling": fields(
        "head/config.json", rope_scaling={"rope_type": "warp"}, rope_parameters=None
    ),
    "a head whose residual is normed, perhaps": fields("head/config.json", norm_before_residual="maybe"),
    "a head of an unknown kind": fields("head/config.json", dcd={"kind": "warp"}),
    "a head whose own fields are a list": fields("head/config.json", dcd=[1]),
    "a head's depth in words": fields("head/config.json", num_hidden_layers="one"),
    "a head without weights": gone("head/model.safetensors"),
    "a head with half its weights": cut("head/model.safetensors", 2000),
    "a head that lacks a tensor": tensors("head/model.safetensors", without("fc.weight")),
    "a head without its map": tensors("head/model.safetensors", without("d2t")),
    "a head with a damaged map": tensors(
        "head/model.safetensors", lambda found: {**found, "d2t": found["d2t"].flip(0).contiguous()}
    ),
    "a head with a tensor of another shape": tensors("head/model.safetensors", first_shape),
    "a head with NaN": tensors("head/model.safetensors", lambda found: {**found, "fc.weight": found["fc.weight"] / 0}),
    "a model's folder as the head": lambda world: (
        shutil.rmtree(world / "head"),
        shutil.copytree(world / "expert", world / "head"),
    ),
}
PROMPTS = {
    "no prompts": gone("prompts.jsonl"),
    "a folder as prompts": as_folder("prompts.jsonl"),
    "an empty file of prompts": text("prompts.jsonl", ""),
    "prompts that are no JSON": text("prompts.jsonl", "hello\n"),
    "prompts in a list": text("prompts.jsonl", '[{"prompt": "w1"}]\n'),
    "a number as a prompt": text("prompts.jsonl", "7\n"),
    "a prompt without messages": text("prompts.jsonl", '{"id": "a"}\n'),
    "empty messages": text("prompts.jsonl", lines({"id": "a", "messages": []})),
    "messages that are words": text("prompts.jsonl", lines({"id": "a", "messages": ["w1"]})),
    "a message without a role": text("prompts.jsonl", lines({"id": "a", "messages": [{"content": "w1"}]})),
    "a message without content": text("prompts.jsonl", lines({"id": "a", "messages": [{"role": "user"}]})),
    "content that is a number": text("prompts.jsonl", lines(said(7))),
    "an empty prompt": text("prompts.jsonl", lines(said(""))),
    "an id twice": text("prompts.jsonl", lines(said("w1"), said("w2"))),
    "prompts in another encoding": text("prompts.jsonl", '{"prompt": "é"}\n'.encode("latin-1")),
    "a prompt longer than the context": text("prompts.jsonl", lines(said("w1 " * 900))),
    "half a line of prompts": text("prompts.jsonl", lines(said("w1")) + '{"id": "b", "mess'),
}
CONVERSATIONS = {
    "no conversations": gone("chats.jsonl"),
    "a folder as conversations": as_folder("chats.jsonl"),
    "an empty file of conversations": text("chats.jsonl", ""),
    "conversations that are no JSON": text("chats.jsonl", "hello\n"),
    "numbers as conversations": text("chats.jsonl", "7\n8\n"),
    "conversations without messages": text("chats.jsonl", '{"words": "w1"}\n'),
    "conversations in another encoding": text("chats.jsonl", '{"é": 1}\n'.encode("latin-1")),
    "binary conversations": text("chats.jsonl", bytes(range(256)) * 4),
    "a pointer as conversations": text("chats.jsonl", LFS),
    "half a line of conversations": text("chats.jsonl", lines(said("w1", "w2")) + '{"id": "b", "mess'),
    "messages that are a number": text("chats.jsonl", lines({"id": "a", "messages": 3})),
    "broken gzip as conversations": text("chats.jsonl", gzip.compress(b'{"id": "a"}\n' * 50)[:30]),
    "broken parquet as conversations": text("chats.jsonl", b"PAR1" + b"\0" * 40 + b"PAR1"),
    "nested too deep": text("chats.jsonl", "[" * 100_000 + "\n"),
}
TOKENS = {
    "no token file": gone("train.parquet"),
    "an empty token file": text("train.parquet", ""),
    "text as a token file": text("train.parquet", "hello"),
    "half a token file": cut("train.parquet", 900),
    "conversations as a token file": text("train.parquet", lines(said("w1", "w2"))),
    "a pointer as a token file": text("train.parquet", LFS),
    "a token file without ids": table(input_ids=None),
    "a token file without spans": table(answer_spans=None),
    "ids that are words": table(input_ids=[["a", "b"]] * 30),
    "ids outside the vocabulary": table(input_ids=pa.array([[5, 9000, 7]] * 30, pa.list_(pa.int32()))),
    "negative ids": table(input_ids=pa.array([[5, -1, 7]] * 30, pa.list_(pa.int32()))),
    "ids that are null": table(input_ids=pa.array([[5, None, 7]] * 30, pa.list_(pa.int32()))),
    "spans past the end": table(answer_spans=[[[1, 9000]]] * 30),
    "spans that run backwards": table(answer_spans=[[[3, 1]]] * 30),
    "spans of one number": table(answer_spans=[[[1]]] * 30),
    "texts without ids": table(input_ids=pa.array([[]] * 30, pa.list_(pa.int32()))),
}
CONFIG = {
    "no config": gone("config.yaml"),
    "a config that is no YAML": text("config.yaml", "a: [1\n"),
    "a list as a config": text("config.yaml", "- 1\n"),
    "a word as a config": text("config.yaml", "hello\n"),
    "binary as a config": text("config.yaml", b"\xff\xfe\x00\x01\x02"),
    "an unknown setting": text("config.yaml", "warp: 1\n"),
    "a setting twice": text("config.yaml", "seed: 1\nseed: 2\n"),
    "a setting of another type": text("config.yaml", "seed: three\n"),
    "a setting that is an object": text("config.yaml", "seed: {a: 1}\n"),
    "a list for one value": text("config.yaml", "seed: [1, 2]\n"),
    "a number beyond all bounds": text("config.yaml", "seed: 1.5e400\n"),
    "a pair whose expert is a number": text("config.yaml", "pair: {expert: 5}\n"),
    "a pair of an unknown model": text("config.yaml", "pair: {third: a}\n"),
    "tabs in a config": text("config.yaml", "seed:\t\t{\n"),
    "a folder as a config": as_folder("config.yaml"),
}
PIPELINE = {
    "no pipeline": gone("pipeline.yaml"),
    "a pipeline that is no YAML": text("pipeline.yaml", "stages: [\n"),
    "a list as a pipeline": text("pipeline.yaml", "- 1\n"),
    "a pipeline without stages": text("pipeline.yaml", "run_dir: x\n"),
    "stages that are words": text("pipeline.yaml", "run_dir: x\nstages: [a, b]\n"),
    "a stage without a command": text("pipeline.yaml", "run_dir: x\nstages: [{name: a}]\n"),
}
FLAGS = {
    "an unknown flag": ["--warp=1"],
    "a word without a flag": ["warp"],
    "an unknown device": ["--device=warp"],
    "an unknown dtype": ["--dtype=float3"],
    "a seed in words": ["--seed=x"],
    "a negative seed": ["--seed=-1"],
    "no output": ["--output=", "--out="],
    "an output inside a file": ["--output={world}/prompts.jsonl/x", "--out={world}/prompts.jsonl/x"],
    "an output that is a file": ["--output={world}/prompts.jsonl", "--out={world}/prompts.jsonl/x"],
    "an output that cannot be made": ["--output=/proc/x", "--out=/proc/x"],
    "template arguments that are no JSON": ["--template_args={"],
    "template arguments that are a list": ["--template_args=[]"],
    "a negative alpha": ["--alpha=-1", "--alphas=-1", "--infer_alphas=-1"],
    "alpha that is no number": ["--alpha=nan", "--alphas=nan", "--infer_alphas=nan"],
    "infinite alpha": ["--alpha=inf", "--alphas=inf", "--infer_alphas=inf"],
    "no drafts": ["--gamma=0"],
    "no tokens": ["--max_new_tokens=0"],
    "no batch": ["--batch=0", "--batch_size=0", "--batches=0"],
    "a batch in words": ["--batch=x", "--batch_size=x", "--batches=x"],
    "an unknown method": ["--method=warp", "--methods=warp"],
    "an empty expert": ["--expert="],
    "a negative learning rate": ["--lr=-1"],
    "no epochs": ["--epochs=0"],
    "an unroll of no steps": ["--unroll_steps=0"],
    "a wait without end": ["--timeout_minutes=1e12"],
    "a broken DeepSpeed file": ["--deepspeed_config={world}/prompts.jsonl"],
}
KINDS = {
    "model": MODEL,
    "head": HEAD,
    "prompts": PROMPTS,
    "conversations": CONVERSATIONS,
    "tokens": TOKENS,
    "config": CONFIG,
    "pipeline": PIPELINE,
}

if __name__ == "__main__":
    for kind, listed in {**KINDS, "flags": FLAGS}.items():
        for label in listed:
            print(f"{kind}: {label}")
