"""A llama-architecture GGUF file -> a plain Llama folder that every Hugging Face tool can load.

What differs between the two forms, and is undone here:

* Quantised blocks are expanded to floats by the `gguf` package; nothing here depends on the kind of block.
* llama.cpp stores the rows of the query and key projections so that rotary pairs are neighbours (2i, 2i + 1);
  transformers rotates halves (i, i + head_dim / 2). `unpermute` puts the rows back. Wrong rows still load.
* A file without `output.weight` ties its output rows to the embedding.
* The tokenizer is kept as lists (tokens, their types, merges) plus the *name* of its pre-tokenizer.

Only what this project converts is accepted: plain llama blocks, byte-level BPE with one of PRE_TOKENIZERS. All
else is refused by name.
"""

import json
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dcd_core.errors import UserError

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Token types of the GGUF format: 3 = control (special), 4 = added by the user (matched before BPE, but ordinary text).
CONTROL, USER_DEFINED = 3, 4
# The `tokenizer.ggml.pre` names whose splitting rules are known, with the original pre-tokenizer.
PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
}


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of one query or key projection, [heads * head_dim, hidden], from interleaved pairs to halves.

    Within each head llama.cpp's row 2i + s is transformers' row i + s * head_dim / 2 (s = 0 or 1).
    """
    rows, columns = weight.shape
    if rows % (2 * heads):
        raise UserError(
            f"a projection of {rows} rows cannot be split into {heads} heads of even width: the GGUF file is damaged"
        )
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


class GGUFModel:
    """One GGUF file, memory-mapped. Raises UserError when it holds something that this module does not convert."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.reader = GGUFReader(self.path)
        except (OSError, ValueError, IndexError) as error:
            raise UserError(f"{path} cannot be read as a GGUF file ({error}): fetch it again") from None
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise UserError(
                f"{path} has architecture '{architecture}': only 'llama' is converted; pass a model folder instead"
            )
        if self.field("llama.rope.scaling.type", "none") != "none":
            raise UserError(
                f"{path} uses scaled rotary positions, which are not converted: pass the original model folder instead"
            )

    def field(self, name: str, default=None):
        """One metadata value; without a default its absence is a UserError."""
        found = self.reader.fields.get(name)
        if found is None:
            if default is None:
                raise UserError(f"{self.path} has no metadata field '{name}': it is not a complete llama model")
            return default
        return found.contents()

    def token_id(self, name: str) -> int | None:
        found = self.reader.fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if found is None else int(found.contents())

    def config(self, dtype: torch.dtype) -> LlamaConfig:
        """The model's config. `dtype` is what the weights are stored in."""
        hidden, heads = int(self.field("llama.embedding_length")), int(self.field("llama.attention.head_count"))
        names = {tensor.name for tensor in self.reader.tensors}
        # 32-bit floats print as 9.999999747378752e-06; six digits give back what was meant.
        epsilon = float(f"{self.field('llama.attention.layer_norm_rms_epsilon'):.6g}")
        theta = float(f"{self.field('llama.rope.freq_base', 10000.0):.6g}")
        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=len(self.field("tokenizer.ggml.tokens")),
            hidden_size=hidden,
            intermediate_size=int(self.field("llama.feed_forward_length")),
            num_hidden_layers=int(self.field("llama.block_count")),
            num_attention_heads=heads,
            num_key_value_heads=int(self.field("llama.attention.head_count_kv", heads)),
            head_dim=int(self.field("llama.attention.key_length", hidden // heads)),
            max_position_embeddings=int(self.field("llama.context_length")),
            rms_norm_eps=epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            tie_word_embeddings="output.weight" not in names,
            bos_token_id=self.token_id("bos"),
            eos_token_id=self.token_id("eos"),
            pad_token_id=self.token_id("padding"),
            dtype=str(dtype).removeprefix("torch."),
        )

    def state_dict(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All weights under their transformers names, in `dtype`; every name and shape is checked."""
        config = self.config(dtype)
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        state = {}
        for tensor in self.reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            # GGUF lists dimensions fastest first; the rows of a matrix are its last one.
            values = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
            parts = tensor.name.split(".")
            if tensor.name in TOP_NAMES:
                name = TOP_NAMES[tensor.name]
            elif len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK_NAMES and parts[3] == "weight":
                name = f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.weight"
                if parts[2] in heads:
                    values = unpermute(values, heads[parts[2]])
            else:
                raise UserError(
                    f"{self.path} holds tensor '{tensor.name}', which a plain llama model does not have: not converted"
                )
            state[name] = torch.from_numpy(np.array(values)).to(dtype).contiguous()
        check_state(state, config, self.path)
        return state

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE tokenizer, with control tokens marked as special."""
        kind, rule = self.field("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre", "gpt-2")
        if kind != "gpt2" or rule not in PRE_TOKENIZERS:
            raise UserError(
                f"{self.path} has tokenizer '{kind}' with splitting rule '{rule}', which is not converted: "
                f"known is 'gpt2' with one of {sorted(PRE_TOKENIZERS)}"
            )
        tokens, types = self.field("tokenizer.ggml.tokens"), self.field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ", 1)) for merge in self.field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[rule]()
        tokenizer.decoder = decoders.ByteLevel()
        for token, token_type in zip(tokens, types, strict=True):
            if token_type in (CONTROL, USER_DEFINED):
                special = token_type == CONTROL
                added = AddedToken(token, special=special, normalized=False)
                tokenizer.add_special_tokens([added]) if special else tokenizer.add_tokens([added])
        if tokenizer.get_vocab_size() != len(tokens):
            raise UserError(
                f"{self.path} lists {len(tokens)} tokens, {tokenizer.get_vocab_size()} of them distinct: it is damaged"
            )
        return tokenizer

    def tokenizer_config(self) -> dict:
        """What transformers needs beside tokenizer.json: the chat template and the named special tokens."""
        tokens = self.field("tokenizer.ggml.tokens")
        named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {short: self.token_id(long) for short, long in named.items()}
        return {
            # The generic class keeps tokenizer.json as it is; others rebuild parts of it from their own defaults.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": int(self.field("llama.context_length")),
            "clean_up_tokenization_spaces": False,
            "chat_template": self.field("tokenizer.chat_template"),
            **{f"{short}_token": tokens[i] for short, i in ids.items() if i is not None},
        }

    def save(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the model (config, generation config, safetensors) and its tokenizer into an existing folder."""
        folder = Path(folder)
        config = self.config(dtype)
        config.save_pretrained(folder)
        ids = {f"{short}_token_id": getattr(config, f"{short}_token_id") for short in ("bos", "eos", "pad")}
        write_json(folder / "generation_config.json", {name: value for name, value in ids.items() if value is not None})
        save_file(self.state_dict(dtype), folder / "model.safetensors", metadata={"format": "pt"})
        # safetensors makes the file readable by its owner only; a cache may be shared
        (folder / "model.safetensors").chmod(0o644)
        self.tokenizer().save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", self.tokenizer_config())


def mean_loss(folder: str | Path, text: str) -> float:
    """Mean loss of a saved model on a text, in nats per token, in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def check_state(state: dict[str, torch.Tensor], config: LlamaConfig, path: Path) -> None:
    """Every weight must be there in its own shape: loaders initialise a missing one at random."""
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
    found = {name: tuple(value.shape) for name, value in state.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise UserError(
            f"{path}: {len(wrong)} tensors do not fit the model; the first is {name}: "
            f"its shape is {found.get(name)}, expected {wanted.get(name)}"
        )


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
