"""Quantised experts and amateurs: they decode and train heads like any other, or are refused in one line."""

import json

import pytest
import torch
from naive import assembled, greedy_cd, some_prompts, tiny_head
from quantised import INSTALLED_NOWHERE, NEEDS, mark, save_fp8, save_marked, save_quantised
from tiny import VOCAB, save_tiny, tiny_causal_lm
from toy_training import make_toy, options
from transformers import AutoConfig, AutoModelForCausalLM

import dcd_core.quantisation as quantisation
from dcd_core.config import run_entry
from dcd_core.contrast import Target
from dcd_core.custom_generate import contrastive
from dcd_core.decode import Settings, decode
from dcd_core.errors import UserError
from dcd_core.generate import main as generate
from dcd_core.heads.checkpoint import load_head
from dcd_core.methods import METHODS
from dcd_core.model_identity import model_identity
from dcd_core.models import LanguageModel, load_model, load_pair, load_scorer
from dcd_core.packages import installed
from dcd_core.quantisation import computing_dtype, linear_rows, output_rows, plain_weight
from train.amateur import main as train_amateur
from train.eagle3 import main as train_eagle3

PROMPTS = some_prompts(3)
IDS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
TOKENS = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An expert and an amateur by each way to quantise; made when they are first asked for."""
    root, made = tmp_path_factory.mktemp("quantised"), {}

    def get(how: str):
        if how not in made:
            expert = save_quantised(root / f"{how}-expert", how)
            made[how] = expert, save_quantised(root / f"{how}-amateur", how, seed=100, layers=4)
        return made[how]

    return get


@pytest.fixture(scope="module", params=["bitsandbytes_output", "torchao_output"])
def pair(request, folders):
    """A pair whose models are both quantised, in fp32."""
    found = load_pair(*map(str, folders(request.param)), device="cpu", amateur_feature_layers=(1, 2, 3))
    assert found.expert.model.is_quantized and found.amateur.model.is_quantized
    return found


# ---- they work -------------------------------------------------------------------------------------------------------


def test_every_method_writes_the_plain_loop_s_text(pair):
    head = tiny_head(pair)
    plain = {alpha: [greedy_cd(pair, prompt.ids, alpha, TOKENS) for prompt in PROMPTS] for alpha in (0.0, 0.5)}
    assert plain[0.0] != plain[0.5], "the contrast matters here"
    settings = Settings(Target(alpha=0.5, temperature=0.0), max_new_tokens=TOKENS, gamma=3)
    for name in METHODS:
        found = decode(assembled(name, pair, head), PROMPTS, settings, max_batch=3)
        assert [generation.ids for generation in found] == plain[0.0 if name in ("ar", "expert_sd") else 0.5], name


@pytest.mark.parametrize("saving", ["lazy", "deferred"])
def test_saved_passes_of_a_quantised_amateur_change_nothing(pair, saving):
    cutoff = 0.1
    plain = [greedy_cd(pair, prompt.ids, 0.5, TOKENS, cutoff) for prompt in PROMPTS]
    target = Target(alpha=0.5, temperature=0.0, cutoff=cutoff)
    settings = Settings(target, max_new_tokens=TOKENS, gamma=3, saving=saving)
    found = decode(assembled("dcd_eagle3", pair, tiny_head(pair)), PROMPTS, settings, max_batch=3)
    assert [generation.ids for generation in found] == plain


def test_logits_of_a_few_ids_are_those_of_all(pair):
    hidden, ids = pair.expert.forward_full(IDS).hidden, torch.tensor([2, 50, 51])
    torch.testing.assert_close(
        pair.expert.output_layer(hidden, ids), pair.expert.output_layer(hidden)[..., ids], atol=1e-5, rtol=1e-5
    )


def test_the_output_layer_s_rows_are_what_it_multiplies_by(pair):
    rows, model = output_rows(pair.expert.model), pair.expert.model
    assert rows.dtype == torch.float32 and rows.shape == (VOCAB, 32)
    hidden = pair.expert.forward_full(IDS).hidden
    torch.testing.assert_close(hidden.float() @ rows.T, model.lm_head(hidden).float(), atol=1e-4, rtol=1e-4)


def test_columns_are_read_in_chunks_and_a_bias_is_no_part_of_them(monkeypatch):
    """As a layer without a plain weight, which a wrapper around a plain one stands for."""
    model = tiny_causal_lm("llama3")
    plain = torch.nn.Linear(32, VOCAB)
    model.set_output_embeddings(torch.nn.Sequential(plain))
    monkeypatch.setattr(quantisation, "CHUNK", 5)
    assert plain_weight(model.lm_head) is None and plain_weight(plain) is plain.weight
    torch.testing.assert_close(output_rows(model), plain.weight.data, atol=1e-6, rtol=1e-6)
    hidden, ids = torch.randn(2, 3, 32), torch.tensor([4, 9])
    for layer in (plain, model.lm_head):
        torch.testing.assert_close(linear_rows(layer, hidden, ids), plain(hidden)[..., ids], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_a_stored_weight_is_not_multiplied_by(dtype):
    layer = torch.nn.Linear(4, 4)
    layer.weight = torch.nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)
    assert plain_weight(layer) is None


@pytest.mark.parametrize("how", NEEDS)
def test_it_computes_in_the_dtype_of_its_keys(folders, how):
    model = load_model(str(folders(how)[0]), dtype="bfloat16", device="cpu")
    output = model.model.model(IDS, use_cache=True)
    kept = output.cache if "cache" in output else output.past_key_values
    assert model.dtype == computing_dtype(model.model) == kept.layers[0].keys.dtype
    whole = model.forward_full(IDS, features=True)
    cached = model.forward(IDS, model.new_cache(2, 9), features=True)
    torch.testing.assert_close(cached.logits, whole.logits, atol=0.5, rtol=0.05)
    assert whole.logits.dtype == torch.float32 and model.device.type == "cpu"


def test_an_expert_that_computes_in_half_precision_takes_further_models(pair, tmp_path):
    third = save_tiny(tmp_path / "third", "llama3", seed=9, layers=2)
    pair.expert._quantised_dtype, kept = torch.float16, pair.expert._quantised_dtype
    try:
        assert load_scorer(str(third), pair).dtype == torch.bfloat16
    finally:
        pair.expert._quantised_dtype = kept


@pytest.mark.parametrize("how", ["bitsandbytes", "torchao"])
def test_all_that_a_layer_stores_is_its_identity(folders, how):
    expert, amateur = (load_model(str(folder), device="cpu").model for folder in folders(how))
    seen = {model_identity(expert), model_identity(amateur)}
    again = load_model(str(folders(how)[0]), device="cpu").model
    assert model_identity(again) in seen and len(seen) == 2
    weight = again.model.layers[0].self_attn.q_proj.weight
    (weight.quant_state.absmax if how == "bitsandbytes" else weight.scale)[0] *= 2
    assert model_identity(again) not in seen


def test_fp8_is_loaded_as_plain_weights_without_a_gpu(tmp_path):
    pytest.importorskip("accelerate")
    if torch.cuda.is_available():
        pytest.skip("its kernels run here")
    folder = save_fp8(tmp_path / "fp8")
    model = load_model(str(folder), device="cpu")
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map={"": "cpu"})
    torch.testing.assert_close(model.forward_full(IDS).logits, stock(IDS).logits[..., :VOCAB], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("how", ["bitsandbytes_output", "torchao_output"])
def test_a_head_trains_on_a_quantised_expert(folders, tmp_path, how):
    expert, _ = folders(how)
    toy = make_toy(tmp_path / "toy", "llama3")
    output = tmp_path / "run"
    more = (f"--expert={expert}", "--expert_dtype=float32")
    assert train_eagle3(options(toy, output, *more)) == 0
    found = json.loads((output / "metrics.json").read_text())
    losses = [entry["loss"] for entry in found["history"] if "loss" in entry]
    assert len(losses) == 16 and sum(losses[-4:]) < sum(losses[:4])
    pair = load_pair(str(expert), device="cpu")
    head = load_head(output / "head", pair.expert)
    settings = Settings(Target(temperature=0.0), max_new_tokens=TOKENS, gamma=3)
    drafted = decode(assembled("expert_sd", pair, head), PROMPTS, settings, max_batch=3)
    plain = decode(assembled("ar", pair), PROMPTS, settings, max_batch=3)
    assert [generation.ids for generation in drafted] == [generation.ids for generation in plain]


def test_transformers_own_generate_gives_the_same_text(folders):
    expert, amateur = map(str, folders("bitsandbytes"))
    model = AutoModelForCausalLM.from_pretrained(expert, device_map={"": "cpu"})
    pair, prompt = load_pair(expert, amateur, device="cpu"), PROMPTS[1].ids
    given = {"custom_generate": contrastive, "method": "cd", "amateur": amateur, "alpha": 0.5, "max_new_tokens": TOKENS}
    ids = model.generate(torch.tensor([prompt]), do_sample=False, eos_token_id=None, pad_token_id=1, **given)
    assert ids[0, len(prompt) :].tolist() == greedy_cd(pair, prompt, 0.5, TOKENS)


@pytest.mark.parametrize("dry", [[], ["--dry_run"]])
def test_no_amateur_is_cut_from_a_quantised_expert(tmp_path, capsys, dry):
    toy = make_toy(tmp_path / "toy")
    mark(toy / "expert", {"quant_method": "torchao", **INSTALLED_NOWHERE["torchao"]})
    flags = [f"--expert={toy / 'expert'}", f"--train_tokens={toy / 'train.parquet'}", "--keep_layers=0-3"]
    assert run_entry(lambda: train_amateur([*flags, f"--output={tmp_path / 'out'}", *dry])) == 2
    assert "unquantised" in capsys.readouterr().err and not (tmp_path / "out").exists()


# ---- or they are refused ---------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_installed(monkeypatch):
    """No package of any quantisation method, and no weight that could be read."""
    monkeypatch.setattr(quantisation, "installed", lambda package: False)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))


@pytest.mark.parametrize("role", ["expert", "amateur"])
@pytest.mark.parametrize("method", INSTALLED_NOWHERE)
def test_a_missing_package_or_an_unknown_method_is_one_line(tmp_path, capsys, nothing_installed, method, role):
    settings = {"quant_method": method, **INSTALLED_NOWHERE[method]}
    folder = save_marked(tmp_path / "model", settings)
    flags = [f"--expert={folder}", "--method=ar"]
    if role == "amateur":
        flags = [f"--expert={save_tiny(tmp_path / 'expert', 'smol')}", f"--amateur={folder}", "--method=cd"]
    assert run_entry(lambda: generate([*flags, "--prompt=w1"])) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and said.startswith("error:") and str(folder) in said and method in said
    for package in quantisation.PACKAGES.get(method, ()):
        assert package in said
    if method in quantisation.CUDA_ONLY and not torch.cuda.is_available():
        assert "CUDA" in said


@pytest.mark.parametrize("settings", [{"bits": 4, "group_size": 64}, {"quant_method": None}, {"quant_method": "awq"}])
def test_settings_that_say_too_little_are_one_line(tmp_path, capsys, settings):
    if "awq" in settings.values() and installed("gptqmodel"):
        pytest.skip("it can be loaded here")
    folder = save_marked(tmp_path / "model", settings)
    assert run_entry(lambda: generate([f"--expert={folder}", "--method=ar", "--prompt=w1"])) == 2
    assert capsys.readouterr().err.strip().count("\n") == 0


def test_what_transformers_looks_for_itself_is_one_line_too(tmp_path, capsys, monkeypatch):
    """A package that is there and broken, or too old."""
    folder = save_marked(tmp_path / "model", {"quant_method": "hqq", **INSTALLED_NOWHERE["hqq"]})
    monkeypatch.setattr(quantisation, "installed", lambda package: True)
    assert run_entry(lambda: generate([f"--expert={folder}", "--method=ar", "--prompt=w1"])) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and "hqq" in said


def test_a_method_that_fails_while_loading_or_in_its_first_pass_is_one_line(folders, monkeypatch):
    expert = str(folders("bitsandbytes")[0])

    def broken(*args, **kwargs):
        raise AttributeError("module 'kernels' has no attribute 'x'")

    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", broken)
        with pytest.raises(UserError, match="bitsandbytes and cannot be used on cpu: module"):
            load_model(expert, device="cpu")
    model = load_model(expert, device="cpu").model
    model.model.forward = broken
    with pytest.raises(UserError, match="bitsandbytes and cannot be used on cpu"):
        LanguageModel(model)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return save_tiny(tmp_path / "model")


def weights_of(folder) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("moved", [False, True])
def test_a_full_device_is_one_line_with_the_sizes(folder, monkeypatch, capsys, moved, dtype, size):
    def full(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    gibi = 2**30
    monkeypatch.setattr("dcd_core.models.choose_device", lambda _: torch.device("cuda:0"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (3 * gibi, 80 * gibi))
    monkeypatch.setattr("dcd_core.load_errors.gibibytes", lambda count: f"{count / gibi:.9f} GiB")
    if moved:
        monkeypatch.setattr("transformers.PreTrainedModel.to", full)
    else:
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    flags = [f"--expert={folder}", "--method=ar", "--prompt=w1", f"--dtype={dtype}"]
    assert run_entry(lambda: generate(flags)) == 2
    said = capsys.readouterr().err.strip()
    expected = (
        f"{weights_of(folder) * size / gibi:.9f} GiB",
        "3.000000000 GiB",
        "80.000000000 GiB",
        "cuda:0",
        str(folder),
    )
    assert "\n" not in said and all(part in said for part in expected)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: ..."),
    ],
)
def test_a_full_host_is_one_line_with_the_sizes(folder, monkeypatch, error):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(UserError, match="out of memory while loading .* GiB in float32, and this machine has .* GiB"):
        load_model(str(folder), device="cpu")


def test_a_quantised_model_that_does_not_fit_says_how_many_weights_it_has(folders, monkeypatch):
    def full(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(UserError, match="billion weights, which are quantised"):
        load_model(str(folders("bitsandbytes")[0]), device="cpu")
