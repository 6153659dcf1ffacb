"""Which rows are trained, what they learn, and that the trainer and the decoder compute the same thing."""

from pathlib import Path

import pytest
import torch
from test_eagle3_head import loud_head
from tiny import KINDS, tiny_model
from toy_training import STOP, toy_samples

from data_prep.token_files import Sample
from dcd_core.chat import stop_ids
from dcd_core.divergence import acceptance, kl
from dcd_core.heads.checkpoint import load_head
from dcd_core.models import load_pair
from train import unroll
from train.batches import Texts
from train.online_expert import HeadStep
from train.unroll import Unroll, align, count_rows, draft_targets, row_sums

E = STOP
P, A = 50, 60

# texts, spans, and per step the trained rows of each text
TABLE = {
    "the example: T = 6, prompt of 3, x_5 end-of-turn": ([P, P, P, A, A, E], [(3, 6)], [[2, 3], [2], []]),
    "cut by length: no end-of-turn, the last token is trained": ([P, P, A, A, A], [(2, 5)], [[1, 2, 3], [1, 2], [1]]),
    "two turns: no row reaches into the next prompt": (
        [P, P, A, A, E, P, P, A, E],
        [(2, 5), (7, 9)],
        [[1, 2, 6], [1], []],
    ),
    "an answer of its end-of-turn only is never drafted": ([P, P, E], [(2, 3)], [[], [], []]),
    "one token": ([P, A, E], [(1, 3)], [[0], [], []]),
    "a stop id inside an answer does not end it": ([P, A, E, A, E], [(1, 5)], [[0, 1, 2], [0, 1], [0]]),
    "an answer at the start begins one token later": ([A, A, A, E], [(0, 4)], [[0, 1], [0], []]),
    "no answer": ([P], [], [[], [], []]),
}


@pytest.mark.parametrize("name", TABLE)
def test_trained_rows(name):
    ids, spans, expected = TABLE[name]
    found = align([ids], [spans], frozenset({E}))
    assert [found.rows[0, found.trained(step)].tolist() for step in range(3)] == expected
    assert count_rows(ids, spans, frozenset({E}), 3) == [len(rows) for rows in expected]


def test_trained_rows_satisfy_the_definition():
    """Against the rule word by word, on random texts with several turns, in one batch."""
    samples = toy_samples(40)
    found = align([s.input_ids for s in samples], [list(s.answer_spans) for s in samples], frozenset({STOP}))
    for step in range(6):
        trained, first, total = found.rows[0, found.trained(step)], 0, 0
        for sample in samples:
            length, wanted = len(sample.input_ids), []
            for t in range(length):
                for start, end in sample.answer_spans:
                    places = range(t + 1, t + 2 + step)
                    inside = t + 1 + step <= length - 1 and all(start <= place < end for place in places)
                    ends = t + 1 + step == end - 1 and sample.input_ids[end - 1] == STOP
                    if inside and not ends:
                        wanted.append(t)
            own = (trained >= first) & (trained < first + length)
            assert (trained[own] - first).tolist() == wanted
            first, total = first + length, total + len(wanted)
            counted = count_rows(sample.input_ids, list(sample.answer_spans), frozenset({STOP}), 6)
            assert counted[step] == len(wanted)
        assert total == len(trained)


def toy_texts(samples) -> Texts:
    return Texts(samples, "", 0, 0)


@torch.no_grad()
def naive_loss(head, expert, samples, denominators, decay, steps):
    """A double loop over texts, rows and steps: each draft decoded alone on the cache, fed the true tokens."""
    total, correct, accepted = 0.0, torch.zeros(steps), torch.zeros(steps)
    target_ids = head.target_ids
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids).long()[None]
        output = expert.forward_full(ids, features=True)
        for start, end in sample.answer_spans:
            last = end - 2 if ids[0, end - 1] == STOP else end - 1
            for root in range(start - 1, last):
                for step in range(min(steps, last - root)):
                    cache = head.new_cache(1, 64)
                    state = head.step(
                        expert.embedding(ids[:, 1 : root + 2]), head.fuse(output.features[:, : root + 1]), cache
                    )[:, -1:]
                    cache.commit([root + 1])
                    for later in range(1, step + 1):
                        state = head.step(expert.embedding(ids[:, [root + 1 + later]]), state, cache)
                        cache.commit([1])
                    log_e = head.logits(state)[0, 0].log_softmax(-1)
                    full = output.logits[0, root + 1 + step].double()
                    p = torch.softmax(full[target_ids], -1)
                    if full.argmax() in target_ids:
                        total = total - decay**step * (p * log_e).sum() / denominators[step]
                        correct[step] += target_ids[log_e.argmax()] == full.argmax()
                    accepted[step] += torch.minimum(full.softmax(-1)[target_ids], log_e.exp()).sum()
    return total, correct, accepted


def half_vocabulary(kind, dtype):
    """A head on the even ids: half of the expert's choices lie outside."""
    from types import SimpleNamespace

    from tiny import tiny_config

    from dcd_core.heads.eagle3 import Eagle3Head

    t2d = torch.arange(96) % 2 == 0
    vocabulary = SimpleNamespace(d2t=torch.arange(48), t2d=t2d)
    head = Eagle3Head.from_expert(tiny_config(kind), vocabulary, seed=2).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    return head


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_metrics_equal_a_double_loop(kind):
    expert, head = tiny_model(kind, dtype=torch.float64), half_vocabulary(kind, torch.float64)
    samples = toy_samples(4)
    step = HeadStep(expert, head.target_ids, frozenset({STOP}))
    inputs = step.inputs(toy_texts(samples).batch([0, 1, 2, 3]))
    denominators = [7.0, 5.0, 3.0]
    loss, sums = Unroll(head, 3, 0.8)(*inputs, denominators)
    total, correct, accepted = naive_loss(head, expert, samples, denominators, 0.8, 3)
    assert loss.item() == pytest.approx(total.item(), abs=1e-10)
    assert sums[:, 1].tolist() == correct.tolist()
    assert sums[:, 2].tolist() == pytest.approx(accepted.tolist(), abs=1e-6)
    counts = torch.tensor([count_rows(s.input_ids, list(s.answer_spans), frozenset({STOP}), 3) for s in samples])
    assert sums[:, 3].tolist() == counts.sum(0).tolist()
    # outside rows exist, give no loss, but are counted
    assert 0 < (~inputs[3].inside).sum() < len(inputs[3].inside)
    # the gradient, along a random direction, by differences of the double loop
    gradients = torch.autograd.grad(loss, head.parameters())
    torch.manual_seed(0)
    direction = [torch.randn_like(parameter) for parameter in head.parameters()]
    values = []
    for size in (1e-6, -2e-6):
        with torch.no_grad():
            for parameter, change in zip(head.parameters(), direction, strict=True):
                parameter.add_(change, alpha=size)
        values.append(naive_loss(head, expert, samples, denominators, 0.8, 3)[0].item())
    slope = sum((one * two).sum() for one, two in zip(gradients, direction, strict=True)).item()
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)


def test_chunked_loss_is_the_same_loss(monkeypatch):
    expert, head = tiny_model("smol", dtype=torch.float64), half_vocabulary("smol", torch.float64)
    step = HeadStep(expert, head.target_ids, frozenset({STOP}))
    batch = toy_texts(toy_samples(6)).batch(list(range(6)))
    results = []
    for budget in (2**25, 48 * 7):
        monkeypatch.setattr(unroll, "LOGIT_BUDGET", budget)
        loss, sums = Unroll(head, 3)(*step.inputs(batch), [9.0, 9.0, 9.0])
        results.append((loss, sums, torch.autograd.grad(loss, head.parameters())))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-12)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-12)
    assert all(torch.allclose(*pair, atol=1e-12) for pair in zip(results[0][2], results[1][2], strict=True))


def test_row_sums_are_the_divergences_of_the_core():
    torch.manual_seed(0)
    logits, expert = torch.randn(5, 9, dtype=torch.float64), torch.randn(5, 9, dtype=torch.float64)
    everywhere, ones = torch.ones(5, dtype=torch.bool), torch.ones(5, dtype=torch.float64)
    log_p, log_e = expert.log_softmax(-1), logits.log_softmax(-1)
    loss, correct, accepted = row_sums(logits, log_p.exp(), everywhere, ones)
    entropy = -(log_p.exp() * log_p).sum()
    assert torch.allclose(loss - entropy, kl(log_p, log_e).sum())
    assert torch.allclose(accepted, acceptance(log_e, log_p).sum())
    assert correct == (logits.argmax(-1) == expert.argmax(-1)).sum()
    rejected, _, same = row_sums(logits.requires_grad_(), log_p.exp(), everywhere, ones, 1.0)
    assert torch.allclose(rejected, 5 - accepted) and same == accepted
    mixed, _, _ = row_sums(logits, log_p.exp(), everywhere, ones, 0.25)
    assert torch.allclose(mixed, 0.75 * loss + 0.25 * rejected)
    [gradient] = torch.autograd.grad(rejected, logits)
    assert torch.autograd.gradcheck(lambda x: row_sums(x, log_p.exp(), everywhere, ones, 1.0)[0], logits)
    assert float(gradient.abs().max()) > 0.01


def test_a_batch_without_answers_gives_zero_loss_and_zero_gradients():
    """A rank with nothing left at the end of an epoch still takes part in the step."""
    expert, head = tiny_model("smol"), loud_head("smol")
    step = HeadStep(expert, head.target_ids, frozenset({STOP}))
    loss, sums = Unroll(head, 3)(*step.inputs(toy_texts(toy_samples(1)).batch([])), [0.0, 0.0, 0.0])
    loss.backward()
    assert loss.item() == 0.0 and not sums.any()
    gradients = [parameter.grad for parameter in head.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_expert_targets_renormalise_on_the_draft_vocabulary():
    torch.manual_seed(0)
    weight, ids = torch.randn(96, 32), torch.arange(0, 96, 3)
    hidden = torch.randn(1, 6, 32)
    alignment = align([[P, P, P, A, A, E]], [[(3, 6)]], frozenset({E}))
    [targets] = draft_targets([lambda rows: rows @ weight.T], [hidden], alignment, ids)
    # roots 2 and 3 pair with tokens 3 and 4: they learn L_3 and L_4
    logits = hidden[0, 3:5] @ weight.T
    assert torch.allclose(targets.probs, logits[:, ids].softmax(-1))
    assert torch.allclose(targets.mass, logits.softmax(-1)[:, ids].sum(-1))
    assert targets.inside.tolist() == [(row.argmax() % 3 == 0).item() for row in logits]


def identity_gap(expert, head, texts: Texts, stop_ids, steps: int = 4) -> tuple[float, int]:
    """Largest difference, relative to the largest logit, between the trainer's logits of every trained (row, step) and
    the decoder's, fed ground-truth tokens from that root; and how many were compared."""
    step = HeadStep(expert, head.target_ids, frozenset(stop_ids))
    batch = texts.batch(list(range(len(texts))))
    features, embeds, alignment, _ = step.inputs(batch)

    def truth(index, _state):
        return embeds[:, (alignment.rows[0] + index).clamp_max(embeds.shape[1] - 1)]

    gap, count, start = 0.0, 0, 0
    with torch.no_grad():
        unrolled = head.unroll(features, embeds, alignment.rows, steps, truth, packed=alignment.packed)
        trained = [head.logits(state)[0] for state in unrolled]
        for text in batch.texts:
            ids = torch.from_numpy(text).long()[None]
            cache = head.new_cache(1, len(text) + steps)
            for place, (root, last) in enumerate(
                zip((alignment.rows[0] - start).tolist(), alignment.last_step.tolist(), strict=True)
            ):
                if not 0 <= root < len(text):
                    continue
                # as after a verification: the rows up to the root are read with true features
                cache.rollback([min(cache.lengths[0], root)])
                done = cache.lengths[0]
                fused = head.fuse(features[:, start + done : start + root + 1])
                state = head.step(expert.embedding(ids[:, done + 1 : root + 2]), fused, cache)[:, -1:]
                cache.commit([root + 1 - done])
                for index in range(min(last + 1, steps)):
                    if index:
                        state = head.step(expert.embedding(ids[:, [root + 1 + index]]), state, cache)
                        cache.commit([1])
                    logits = trained[index][place]
                    gap = max(gap, ((head.logits(state)[0, 0] - logits).abs().max() / logits.abs().max()).item())
                    count += 1
                cache.rollback([root + 1])
            start += len(text)
    return gap, count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_the_decoder_fed_the_truth_gives_the_trainers_logits(kind, dtype, tolerance):
    """Catches errors of shift, rotary position, mask, embedding and vocabulary map at once."""
    expert, head = tiny_model(kind, dtype=dtype), loud_head(kind, dtype)
    gap, count = identity_gap(expert, head, toy_texts(toy_samples(6, seed=4)), [STOP])
    assert gap <= tolerance and count > 80


DEMO = Path(__file__).resolve().parent.parent / "runs" / "demo"


FINISHED = all((DEMO / name).exists() for name in ("head/metrics.json", "expert/config.json"))


@pytest.mark.skipif(not FINISHED, reason="there is no demo run (make demo)")
def test_train_decode_identity_of_the_demo_head():
    pair = load_pair(str(DEMO / "expert"), dtype="float64", device="cpu")
    head = load_head(DEMO / "head" / "head", pair.expert)
    texts = Texts.load(str(DEMO / "text" / "held_out.parquet"), 512, pair.expert.vocab, first=2)
    gap, count = identity_gap(pair.expert, head, texts, stop_ids(pair.tokenizer, DEMO / "expert"))
    assert gap <= 1e-12 and count > 50


@pytest.mark.parametrize("fault", ["shift", "position", "features", "mask"])
def test_the_identity_sees_each_fault(fault):
    """Negative control: a fault of one place, row or layer is far above the tolerance."""
    expert, head = tiny_model("smol"), loud_head("smol")
    sample = Sample("s", toy_samples(1)[0].input_ids, ((3, 9),))
    ids = torch.from_numpy(sample.input_ids).long()[None]
    features = expert.forward_full(ids, features=True).features
    following = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)
    rows = torch.tensor([[4, 5]])

    def logits(ids=following, features=features, rows=rows, ahead=0):
        embeds = expert.embedding(ids)

        def truth(index, _state):
            return embeds.gather(1, (torch.tensor([[4, 5]]) + index + ahead)[..., None].expand(-1, -1, 32))

        return head.logits(list(head.unroll(features, embeds, rows, 2, truth))[1])

    right = logits()
    wrong = {
        "shift": lambda: logits(ahead=1),
        "position": lambda: logits(rows=rows + 1),
        "features": lambda: logits(features=features.roll(32, dims=-1)),
        "mask": lambda: logits(ids=torch.cat([following[:, :2] + 1, following[:, 2:]], dim=1)),
    }[fault]()
    assert (right - wrong).abs().max() > 1e-2
