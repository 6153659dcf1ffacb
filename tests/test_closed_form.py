"""The closed-form start: the regression's own solution, in a head of any shape, and through the trainers' door."""

import json
import shutil

import numpy as np
import pytest
import torch
from tiny import KINDS, VOCAB, tiny_model
from toy_training import STOP, family_flags, flags, head_weights, make_toy_pair, toy_samples

import train.head_run
from dcd_core.errors import UserError
from dcd_core.heads.eagle3 import Eagle3Config, Eagle3Head
from dcd_core.heads.family import Family
from dcd_core.heads.rope import rotate
from dcd_core.models import Output
from train import closed_form, cross_alpha, dual_drafter, eagle3
from train.batches import Texts
from train.closed_form import (
    LEAK,
    PENALTIES,
    gather,
    own_position,
    penalised,
    put,
    refuse,
    ridge,
    solve,
    start_in_closed_form,
)
from train.online_expert import HeadStep, feature_rms, scale_features
from train.passes import Passes
from train.processes import Ranks, start
from train.unroll import Aim, Unroll

STOPS, ALONE, HIDDEN = frozenset({STOP}), Ranks(0, 1, torch.device("cpu")), 32
TEXTS = Texts(toy_samples(40), "", 0, 0)
# heads, key/value heads, head_dim, blocks, theta, scaling
SHAPES = {
    "llama": (4, 2, 16, 1, 1e4, None),
    "one key/value group": (3, 1, 16, 1, 1e5, None),
    "a head_dim beyond hidden / heads, several blocks": (4, 4, 32, 3, 1e6, None),
    "more head_dim than hidden size": (2, 2, 64, 1, 1e4, None),
    "several groups": (12, 6, 4, 2, 3.0, None),
    "yarn": (4, 2, 16, 1, 1e4, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
}


class LinearExpert:
    """An expert whose final state is a linear function of the normed embedding of the token, at rank 4, and of the
    features of the position before, whose channels differ in size."""

    name, vocab, hidden_size, device = "linear", VOCAB, HIDDEN, torch.device("cpu")

    def __init__(self, shuffled: bool = False):
        draw = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=draw)

        self.shuffled = shuffled
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        # embeddings have a direction in common, as trained ones do
        self.embedding.weight.data = normal(VOCAB, HIDDEN) + 2
        self.gains = torch.logspace(-1, 1, 3 * HIDDEN)
        self.tables = normal(2, VOCAB, 3 * HIDDEN)
        self.tables[0] += 0.5
        self.fc = 0.1 * normal(HIDDEN, 3 * HIDDEN) / self.gains
        self.embedded = 0.1 * normal(HIDDEN, 4) @ normal(4, HIDDEN)
        self.rows = 0.3 * normal(VOCAB, HIDDEN)

    def output_layer(self, hidden, ids=None):
        return hidden @ (self.rows if ids is None else self.rows[ids]).T

    def forward_full(self, ids, features=False, logits=True):
        before = torch.cat([ids[:, :1], ids[:, :-1]], dim=1)
        found = (self.tables[0][ids] + self.tables[1][before]) * self.gains
        embeds = self.embedding(ids).detach()
        embeds = embeds * torch.rsqrt(embeds.pow(2).mean(-1, keepdim=True) + 1e-5)
        hidden = embeds @ self.embedded.T
        hidden[:, 1:] += (found @ self.fc.T)[:, :-1]
        if self.shuffled:
            order = np.random.default_rng(int(ids.sum())).permutation(ids.shape[1])
            hidden = hidden[:, order]
        return Output(None, found if features else None, hidden)


def linear_head(shape, seed: int = 0) -> Eagle3Head:
    heads, kv_heads, dim, layers, theta, scaling = shape
    config = Eagle3Config(HIDDEN, HIDDEN, 64, heads, kv_heads, dim, VOCAB, VOCAB, rope_theta=theta)
    head = Eagle3Head(config.replace(num_hidden_layers=layers, rope_scaling=scaling, feature_layers=(1, 2, 3)))
    head.initialise(seed, LinearExpert().rows)
    return head


def solved(head, expert, texts=TEXTS, target=None):
    models = [expert, target] if target else [expert]
    sums = gather(head, Passes(models), models[-1], texts, STOPS, ALONE)
    return solve(*sums, closed_form.groups_used(head) * head.config.head_dim)


def stacked(head, expert, wanted) -> tuple[torch.Tensor, torch.Tensor]:
    """Regressors and targets of the rows that draft, one under the other; a plain loop over the definition."""
    xs, ys = [], []
    for number, sample in enumerate(TEXTS.samples):
        ids = torch.from_numpy(sample.input_ids).long()[None]
        output = expert.forward_full(ids, features=True, logits=False)
        for first, end in sample.answer_spans:
            for place in range(first, end - (int(ids[0, end - 1]) == STOP)):
                if wanted(number):
                    embed = expert.embedding.weight[ids[0, place]].double()
                    embed = embed / (embed.pow(2).mean() + head.config.rms_norm_eps).sqrt()
                    xs.append(torch.cat([embed, output.features[0, place - 1].double()]))
                    ys.append(output.hidden[0, place].double())
    return torch.stack(xs).detach(), torch.stack(ys)


def test_the_sums_give_the_ridge_regression_of_the_stacked_rows():
    expert = tiny_model("qwen3")
    head = Eagle3Head.from_expert(expert.config, None, expert.feature_layers, 0)
    fitted, held_out = gather(head, Passes([expert]), expert, TEXTS, STOPS, ALONE)
    found = solve(fitted, held_out, HIDDEN)  # the embedding's part at full rank
    x, y = stacked(head, expert, lambda number: True)
    sizes = torch.cat([torch.ones(HIDDEN), x[:, HIDDEN:].pow(2).mean(0).sqrt()]).double()
    x = x / sizes

    def plain(x, y, penalty):
        """Least squares, the penalty as further rows."""
        extra = (penalty * x.pow(2).sum() / x.shape[1]).sqrt() * torch.eye(x.shape[1]).double()
        return torch.linalg.lstsq(torch.cat([x, extra]), torch.cat([y, y.new_zeros(len(extra), y.shape[1])])).solution

    weights = plain(x, y, found.penalty)
    assert torch.allclose(found.left @ found.right, weights[:HIDDEN].T, atol=1e-8)
    assert torch.allclose(found.fc * sizes[HIDDEN:], weights[HIDDEN:].T, atol=1e-8)
    assert found.size == pytest.approx(y.pow(2).mean().sqrt().item())
    # the penalty is the best of the grid on texts that were not fitted
    parts = [stacked(head, expert, lambda number, held=held: (number % 8 == 0) == held) for held in (False, True)]
    (x, y), (other_x, other_y) = [(x / sizes, y) for x, y in parts]
    errors = {p: float((other_y - other_x @ plain(x, y, p)).pow(2).sum() / other_y.pow(2).sum()) for p in PENALTIES}
    assert found.penalty == min(errors, key=errors.get)
    assert found.unexplained == pytest.approx(errors[found.penalty])


def test_the_limited_rank_is_the_best_of_that_rank():
    """No other embedding's part of rank 2, with the features' part fitted beside it, leaves less."""
    expert = tiny_model("smol")
    head = Eagle3Head.from_expert(expert.config, None, expert.feature_layers, 0)
    fitted, held_out = gather(head, Passes([expert]), expert, TEXTS, STOPS, ALONE)
    found, both = solve(fitted, held_out, 2), fitted + held_out
    sizes = torch.cat([torch.ones(HIDDEN), (both.gram.diagonal()[HIDDEN:] / both.rows).sqrt()])
    both = both.scaled(sizes)
    gram = penalised(both, found.penalty)

    def objective(embedded):
        others = slice(HIDDEN, None)
        features = ridge(gram[others, others], both.cross[others] - gram[others, :HIDDEN] @ embedded.T)
        weights = torch.cat([embedded.T, features])
        return float((weights * (gram @ weights)).sum() - 2 * (weights * both.cross).sum())

    best = objective(found.left @ found.right)
    draw = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(5):
            left = found.left + size * torch.randn(found.left.shape, generator=draw, dtype=torch.float64)
            right = found.right + size * torch.randn(found.right.shape, generator=draw, dtype=torch.float64)
            assert objective(left @ right) > best


def test_ranks_and_the_order_of_texts_change_nothing():
    expert = tiny_model("llama3")
    head = Eagle3Head.from_expert(expert.config, None, expert.feature_layers, 0)
    whole = gather(head, Passes([expert]), expert, TEXTS, STOPS, ALONE)
    halves = [gather(head, Passes([expert]), expert, TEXTS, STOPS, Ranks(rank, 2, ALONE.device)) for rank in (0, 1)]
    backwards = Texts(TEXTS.samples[::-1], "", 0, 0)
    turned = gather(head, Passes([expert]), expert, backwards, STOPS, ALONE)
    pairs = [(one, two + three) for one, two, three in zip(whole, *halves, strict=True)]
    for one, other in [*pairs, (whole[0] + whole[1], turned[0] + turned[1])]:
        assert one.rows == other.rows > 0
        for mine, its in zip(one.parts, other.parts, strict=True):
            assert torch.allclose(mine, its, rtol=1e-12, atol=1e-12 * float(mine.abs().max()))
    first, second = solve(*whole, 8), solve(*[two for _, two in pairs], 8)
    assert torch.allclose(first.fc, second.fc, atol=1e-10)
    assert torch.allclose(first.left @ first.right, second.left @ second.right, atol=1e-10)
    assert first.penalty == second.penalty


def step_zero(head, expert, texts=TEXTS, steps: int = 1):
    """States of the first drafts of each text, and loss and accuracy of each step."""
    step = HeadStep(expert, head.target_ids, STOPS)
    states, totals = [], 0
    for number in range(len(texts)):
        features, embeds, alignment, targets = step.inputs(texts.batch([number]))
        with torch.no_grad():
            totals = totals + Unroll(head, steps)(features, embeds, alignment, targets, [1.0] * steps)[1]
            state = next(head.unroll(features, embeds, alignment.rows, 1, lambda *_: None))
        states.append(state[0, alignment.trained(0)])
    return torch.cat(states), (totals[:, 0] / totals[:, 3]).tolist(), (totals[:, 1] / totals[:, 3]).tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_the_first_states_are_the_regressions_predictions(name):
    """Where the expert is linear and of low rank, so the predictions are its states, whatever the shape."""
    head, expert = linear_head(SHAPES[name]), LinearExpert()
    found = solved(head, expert)
    assert found.unexplained < 1e-3 and found.spread < 0.2
    put(head, found, 1.0, max(TEXTS.lengths))
    states, losses, accuracies = step_zero(head, expert)
    x, y = stacked(head, expert, lambda number: True)
    fused = x[:, HIDDEN:] @ found.fc.T
    read = torch.cat([x[:, :HIDDEN], fused / fused.pow(2).mean(1, keepdim=True).sqrt()], dim=1) @ found.constant
    assert read.mean() == pytest.approx(1, abs=0.05) and read.std() == pytest.approx(found.spread, abs=0.05)
    # up to the leak: other positions have at most LEAK of the own one's weight, here of half of the states' size
    error = (states - y).pow(2).mean().sqrt() / y.pow(2).mean().sqrt()
    assert error < LEAK and accuracies[0] > 0.9
    # the same attention without positions reads the mean of all tokens so far
    head.midlayer.self_attn.q_proj.weight.data.zero_()
    assert (step_zero(head, expert)[0] - y).pow(2).mean().sqrt() / y.pow(2).mean().sqrt() > 2 * error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", [2, 40, 2048])
def test_a_query_that_equals_its_key_attends_to_its_own_position(kind, positions):
    """Through the head's own rotary tables, at the last position of a text."""
    head = Eagle3Head.from_expert(tiny_model(kind).config, None, None, 0)
    pairs, logit = own_position(head, positions)
    states = torch.zeros(1, 1, positions, head.config.head_dim)
    states[..., :pairs] = (logit * head.config.head_dim**0.5 / pairs) ** 0.5 / head.rotary.factor
    turned = rotate(states, head.rotary.tables(torch.arange(positions)[None], torch.float32))
    weights = (turned[0, 0, -1] @ turned[0, 0].T / head.config.head_dim**0.5).softmax(-1)
    assert weights[-1] > 1 / (1 + LEAK) - 1e-3


def test_the_start_is_better_than_a_random_one_and_shuffled_targets_are_not_learnt():
    expert, head = LinearExpert(), linear_head(SHAPES["llama"])
    scale_features(head, feature_rms(Passes([expert]), TEXTS))
    _, [random], _ = step_zero(head, expert)
    put(head, solved(head, expert), 0.5, max(TEXTS.lengths))
    _, [closed], [accuracy] = step_zero(head, expert)
    shuffled = solved(head, LinearExpert(shuffled=True))
    put(head, shuffled, 0.5, max(TEXTS.lengths))
    _, [control], [chance] = step_zero(head, expert)
    assert closed < random - 2 and closed < control - 1
    # what is left is the mean of the states, whatever the token
    assert accuracy > 0.9 and chance < 0.2 and shuffled.unexplained > 0.5


def test_an_amateurs_head_predicts_the_amateurs_states():
    expert, amateur = tiny_model("smol"), tiny_model("smol", 100, 4)
    ranks = start(0)

    def losses(closed: bool) -> list[float]:
        heads = [
            Eagle3Head.from_expert(
                expert.config, None, expert.feature_layers, 0, expert.output.rows(), aligned_with=with_
            )
            for with_ in ("expert", "amateur")
        ]
        if closed:
            start_in_closed_form(heads, Passes([expert, amateur]), TEXTS, STOPS, ranks)
            assert torch.equal(heads[1].lm_head.weight, amateur.output.rows())
        step = HeadStep(expert, heads[0].target_ids, STOPS, (Aim(0.0), Aim(None)), amateur)
        totals = torch.zeros(2, 1, 4)
        for number in range(len(TEXTS)):
            for head, inputs, total in zip(heads, step.each(TEXTS.batch([number])), totals, strict=True):
                with torch.no_grad():
                    total += Unroll(head, 1)(*inputs, [1.0])[1]
        return (totals[:, 0, 0] / totals[:, 0, 3]).tolist()

    for closed, random in zip(losses(True), losses(False), strict=True):
        assert closed < random - 0.15


@pytest.mark.parametrize("field", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_heads_with_other_norms_are_refused(field):
    expert = tiny_model("smol")
    head = Eagle3Head.from_expert(expert.config, None, expert.feature_layers, 0, **{field: True})
    with pytest.raises(UserError, match=f"unsupported.*{field}"):
        start_in_closed_form([head], Passes([expert]), TEXTS, STOPS, ALONE)


def test_what_cannot_be_started_so_is_refused():
    expert, head = LinearExpert(), linear_head(SHAPES["llama"])
    amateur = LinearExpert()
    amateur.hidden_size = 2 * HIDDEN
    with pytest.raises(UserError, match="64 numbers, more than the head's 32"):
        refuse(head, amateur)
    for few in (TEXTS.samples[:1], TEXTS.samples[1:2]):
        with pytest.raises(UserError, match="give more training texts"):
            solved(head, expert, Texts(few, "", 0, 0))
    with pytest.raises(UserError, match="unsupported.*head_dim of 2"):
        own_position(linear_head((2, 1, 2, 1, 1e4, None)), 2048)


# ---- through the trainers --------------------------------------------------------------------------------------------

SHORT = ("--max_steps=3", "--log_every=1", "--save_every=2", "--warmup_steps=1", "--lr=3e-4")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy_pair(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "closed"
    assert eagle3.main(flags(toy, output, *SHORT, "--start=closed_form")) == 0
    return output


def first_loss(output, *member) -> float:
    found = json.loads((output / "metrics.json").read_text())
    for name in member:
        found = found[name]
    return found["history"][0]["loss"]


def same(one, two, head: str = "head"):
    mine, its = head_weights(one, head), head_weights(two, head)
    return mine.keys() == its.keys() and all(torch.equal(weight, its[name]) for name, weight in mine.items())


def test_the_first_logged_loss_is_below_that_of_a_random_start(toy, finished, tmp_path):
    assert eagle3.main(flags(toy, tmp_path / "random", *SHORT)) == 0
    assert first_loss(finished) < first_loss(tmp_path / "random") - 0.15


def test_a_run_that_ends_within_the_start_begins_it_again(toy, finished, tmp_path, monkeypatch):
    run = flags(toy, tmp_path / "run", *SHORT, "--start=closed_form")
    with monkeypatch.context() as patched:
        patched.setattr(closed_form, "solve", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            eagle3.main(run)
    assert eagle3.main(run) == 0
    assert same(tmp_path / "run", finished)


def test_a_resumed_run_makes_no_start_and_ends_with_the_same_weights(toy, finished, tmp_path, monkeypatch):
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    (output / "metrics.json").unlink()
    shutil.rmtree(output / "checkpoints" / "step-00000003")
    for change, named in {
        "--start=random": "start was closed_form, now random",
        "--start_norm=1": "start_norm was 0.0, now 1.0",
        "--start_texts=20": "start_texts was 5000, now 20",
    }.items():
        with pytest.raises(UserError, match=f"cannot resume.*{named}"):
            eagle3.main(flags(toy, output, *SHORT, "--start=closed_form", change))
    with monkeypatch.context() as patched:
        patched.setattr(train.head_run, "start_in_closed_form", lambda *_: pytest.fail("it is in the checkpoint"))
        assert eagle3.main(flags(toy, output, *SHORT, "--start=closed_form")) == 0
    assert same(output, finished)


def test_a_finished_run_that_is_redone_makes_its_start(toy, finished, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    assert eagle3.main(flags(toy, output, *SHORT, "--start=closed_form", "--overwrite")) == 0
    assert same(output, finished)


def test_families_start_so_too(toy, finished, tmp_path):
    """All targets of a seed as one function; an expert-only head as train/eagle3.py trains it."""
    run = family_flags(toy, tmp_path / "dual", *SHORT, "--start=closed_form", "--head_layers=2")
    assert cross_alpha.main([*run, "--train_alphas", "0", "0.5", "--lr=1e-12"]) == 0
    assert Family.read(tmp_path / "dual").held_fixed["feature scaling"].startswith("closed_form")
    one, two = (head_weights(tmp_path / "dual" / "heads", f"alpha_{alpha}_seed_0") for alpha in ("0", "0.5"))
    assert all(torch.allclose(weight.double(), two[name].double(), atol=1e-6) for name, weight in one.items())
    alone = [*SHORT, "--start=closed_form", "--input=expert_only", "--train_alphas", "0"]
    assert cross_alpha.main(family_flags(toy, tmp_path / "control", *alone)) == 0
    mine, its = head_weights(tmp_path / "control" / "heads", "alpha_0_seed_0"), head_weights(finished)
    assert all(torch.equal(weight, its[name]) for name, weight in mine.items())
    assert dual_drafter.main(family_flags(toy, tmp_path / "drafters", *SHORT, "--start=closed_form")) == 0
    assert dual_drafter.main(family_flags(toy, tmp_path / "random", *SHORT)) == 0
    for member in ("expert_seed_0", "amateur_seed_0"):
        losses = [first_loss(tmp_path / name, "members", member) for name in ("drafters", "random")]
        assert losses[0] < losses[1] - 0.15


@pytest.mark.parametrize(
    "change, message",
    [
        (["--start=zero"], "start"),
        (["--start_norm=-1"], "--start_norm must be at least 0"),
        (["--start_texts=-1"], "--start_texts must be at least 0"),
        (["--start=closed_form", "--start_texts=1"], "give more training texts"),
    ],
)
def test_bad_settings_are_one_clear_error(toy, tmp_path, change, message):
    with pytest.raises(UserError) as caught:
        eagle3.main(flags(toy, tmp_path / "run", *change))
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists(), "a refused start leaves nothing behind"
