"""The contrastive target: its identities, and every numerical trap on the way to it."""

import math

import pytest
import torch

from dcd_core.contrast import (
    LOG_FLOOR,
    Target,
    choices,
    contrast_signal,
    floor_hits,
    log_z,
    plausible,
    scores,
    target_log_probs,
)
from dcd_core.divergence import kl
from dcd_core.errors import UserError
from dcd_core.rounds import target_rows

INF = math.inf
ALPHAS = (0.1, 0.3, 0.5, 1.0)


def rows(seed: int, count: int = 50, vocab: int = 12, scale: float = 3.0) -> torch.Tensor:
    """Random fp64 logits, not normalised and off by a constant per row."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator, dtype=torch.float64) * scale
    return logits + torch.randn(count, 1, generator=generator, dtype=torch.float64) * 20


P, Q, E = rows(1), rows(2), rows(3)
LOG_P, LOG_Q, LOG_E = (row.log_softmax(-1) for row in (P, Q, E))


def assert_close(left, right, tolerance=1e-11):
    torch.testing.assert_close(left, right, atol=tolerance, rtol=tolerance)


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


# ---- identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_target_is_the_paper_s_equation(alpha):
    expected = (1 + alpha) * LOG_P - alpha * LOG_Q
    assert_close(target_log_probs([P, Q], Target(alpha=alpha)), expected - expected.logsumexp(-1, keepdim=True))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_log_z_is_alpha_times_a_renyi_divergence(alpha):
    order = 1 + alpha
    renyi = (LOG_P.exp() ** order * LOG_Q.exp() ** (1 - order)).sum(-1).log() / (order - 1)
    assert_close(log_z(P, Q, alpha), alpha * renyi)
    assert (log_z(P, Q, alpha) >= 0).all()
    assert_close(log_z(P, P + 7, alpha), torch.zeros(50, dtype=torch.float64))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_lemma_b1(alpha):
    target, constant = target_log_probs([P, Q], Target(alpha=alpha)), log_z(P, Q, alpha)
    assert_close(kl(LOG_P, target), constant - alpha * kl(LOG_P, LOG_Q))
    assert_close(kl(LOG_Q, target), constant + (1 + alpha) * kl(LOG_Q, LOG_P))
    assert_close(kl(LOG_E, target), constant + (1 + alpha) * kl(LOG_E, LOG_P) - alpha * kl(LOG_E, LOG_Q))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_with_a_cutoff_the_identities_hold_on_the_renormalised_allowed_set_only(alpha):
    allowed = plausible(P, 0.1)
    p, q = (row.masked_fill(~allowed, -INF).log_softmax(-1) for row in (P, Q))
    restricted = ((1 + alpha) * p - alpha * q).masked_fill(~allowed, -INF)
    constant = restricted.logsumexp(-1)
    target = target_log_probs([P, Q], Target(alpha=alpha, cutoff=0.1))
    assert_close(kl(p, target), constant - alpha * kl(p, q))
    assert (constant > -1e-12).all()
    assert (kl(LOG_P, target) == INF).any(), "the expert has mass where the target has none"
    p = logs(0.6, 0.35, 0.05)
    kept = scores([p, p], Target(alpha=alpha, cutoff=0.1))
    assert kept.logsumexp(-1).item() == pytest.approx(math.log(0.95)), "not renormalised first: log Z below 0"


@pytest.mark.parametrize("alpha", ALPHAS)
def test_equal_models_give_the_expert(alpha):
    assert_close(target_log_probs([P, P - 3], Target(alpha=alpha)), LOG_P)


def test_alpha_zero_gives_the_expert_bit_for_bit():
    broken = torch.full_like(P, math.nan)
    for dtype in (torch.float32, torch.float64):
        expert = P.to(dtype)
        assert torch.equal(scores([expert, broken.to(dtype)], Target(alpha=0.0)), expert)
        for temperature in (0.0, 0.7, 1.0):
            target = Target(alpha=0.0, temperature=temperature)
            assert torch.equal(target_log_probs([expert, Q.to(dtype)], target), target_log_probs([expert], target))
    assert torch.equal(target_log_probs([P], Target()), LOG_P)


@pytest.mark.parametrize("cutoff", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_logits_and_log_probs_give_one_target(cutoff, temperature):
    target = Target(alpha=0.5, cutoff=cutoff, temperature=temperature)
    raw, normalised = (target_log_probs(pair, target) for pair in ([P, Q], [LOG_P, LOG_Q]))
    assert_close(raw.exp(), normalised.exp())
    assert torch.equal(raw == -INF, normalised == -INF)
    assert torch.equal(choices([P, Q], target), choices([LOG_P, LOG_Q], target))


@pytest.mark.parametrize("mu, temperature", [(0.1, 1.0), (0.3, 0.7), (0.5, 1.0), (0.9, 0.4)])
def test_cos_is_dcd_with_other_numbers(mu, temperature):
    """CoS: softmax((z_p - mu z_q) / T); mu .1 is alpha .111, mu .5 is alpha 1."""
    target = Target(alpha=mu / (1 - mu), temperature=temperature / (1 - mu))
    assert_close(target_log_probs([P, Q], target), ((P - mu * Q) / temperature).log_softmax(-1))


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
def test_proxy_tuning_is_three_weighted_models(strength):
    direct = LOG_P.exp() * (LOG_Q.exp() / LOG_E.exp()) ** strength
    assert_close(
        target_log_probs([P, Q, E], Target(weights=(1.0, strength, -strength))),
        (direct / direct.sum(-1, keepdim=True)).log(),
    )


def test_weights_and_model_temperatures_name_the_other_published_targets():
    li = Target(weights=(1.0, -0.5), temperatures=(1.0, 0.5), cutoff=0.1, temperature=0.8)
    expected = (LOG_P - 0.5 * LOG_Q / 0.5).masked_fill(LOG_P.exp() < 0.1 * LOG_P.exp().amax(-1, keepdim=True), -INF)
    assert_close(target_log_probs([P, Q], li).exp(), (expected / 0.8).softmax(-1))
    assert_close(
        target_log_probs([P, Q], Target(weights=(1.3, -0.3))),
        target_log_probs([P, Q], Target(alpha=0.3)),
    )
    dola = target_log_probs([P, Q], Target(weights=(1.0, -1.0)))
    assert_close(dola, (P - Q).log_softmax(-1))


# ---- numerical traps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
def test_an_id_suppressed_in_both_models_stays_out(alpha):
    p, q = logs(0.5, 0.3, 0.2, 0.0), logs(0.1, 0.6, 0.3, 0.0)
    target = target_log_probs([p, q], Target(alpha=alpha))
    assert target[3] == -INF and not target.isnan().any()
    assert_close(target[:3], target_log_probs([p[:3], q[:3]], Target(alpha=alpha)))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_an_id_that_only_the_amateur_excludes_is_floored(alpha):
    p, q = logs(0.7, 0.2, 0.1), logs(0.8, 0.2, 0.0)
    expected = (1 + alpha) * p - alpha * torch.tensor([q[0], q[1], q[0] - LOG_FLOOR])
    assert_close(target_log_probs([p, q], Target(alpha=alpha)), expected.log_softmax(-1))
    assert floor_hits(p, q, 0.0).item() == 1
    assert floor_hits(p, q, 0.5).item() == 0, "an id outside the plausible set is no hit"


def test_an_id_that_only_the_expert_excludes_stays_out():
    target = target_log_probs([logs(0.6, 0.4, 0.0), logs(0.2, 0.2, 0.6)], Target(alpha=0.5))
    assert target[2] == -INF and target[:2].isfinite().all()


def test_the_floor_is_shift_invariant_and_for_negative_weights_only():
    p, q = logs(0.7, 0.2, 0.1), logs(0.8, 0.2, 0.0)
    assert_close(target_log_probs([p + 40, q - 900], Target(alpha=0.3)), target_log_probs([p, q], Target(alpha=0.3)))
    tuned = target_log_probs([p, q, p], Target(weights=(1.0, 0.5, -0.5)))
    assert tuned[2] == -INF and not tuned.isnan().any(), "a model with a positive weight may exclude an id"


def test_zero_times_infinity_never_happens():
    p, q = logs(0.7, 0.3, 0.0), logs(0.0, 0.0, 1.0)
    assert torch.equal(target_log_probs([p, q], Target(alpha=0.0)), p.log_softmax(-1))
    third = target_log_probs([p, q, q], Target(weights=(1.0, 0.0, 0.0)))
    assert torch.equal(third, p.log_softmax(-1))


@pytest.mark.parametrize("alpha, mass", [(0.1, 5e-8), (0.5, 0.24), (1.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_untruncated_target_promotes_tail_tokens_and_the_cutoff_does_not(alpha, mass, dtype):
    rest = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    p, q = (torch.cat([rest, torch.tensor([tail], dtype=torch.float64)]).log().to(dtype) for tail in (1e-9, 1e-26))
    assert target_log_probs([p, q], Target(alpha=alpha))[3].exp().item() == pytest.approx(mass, rel=0.1)
    assert target_log_probs([p, q], Target(alpha=alpha, cutoff=0.1))[3] == -INF


def test_the_cutoff_is_decided_by_the_untempered_expert():
    p, q = logs(0.6, 0.35, 0.05), logs(0.6, 0.35, 0.05)
    for temperature in (0.25, 1.0, 4.0):
        target = target_log_probs([p, q], Target(alpha=0.5, cutoff=0.1, temperature=temperature))
        assert (target > -INF).tolist() == [True, True, False], "0.05 < 0.1 * 0.6, whatever the temperature"
    assert plausible(p, 0.05).all() and plausible(p, 1.0).tolist() == [True, False, False]
    assert plausible(logs(0.5, 0.5, 0.0), 1.0).tolist() == [True, True, False]


def test_the_cutoff_comes_before_the_temperature_and_after_the_combination():
    target = target_log_probs([P, Q], Target(alpha=0.5, cutoff=0.2, temperature=0.5))
    combined = (1.5 * LOG_P - 0.5 * LOG_Q).masked_fill(~plausible(P, 0.2), -INF) / 0.5
    assert_close(target.exp(), combined.softmax(-1))


def test_the_amateur_cannot_move_the_plausible_set():
    allowed = plausible(P, 0.3)
    for alpha in ALPHAS:
        assert torch.equal(scores([P, Q], Target(alpha=alpha, cutoff=0.3)) > -INF, allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperature_zero_is_the_argmax_of_the_combination_ties_to_the_lowest_id(dtype):
    p = torch.tensor([[0.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]], dtype=dtype)
    q = torch.zeros_like(p)
    target = Target(alpha=0.5, temperature=0.0)
    assert choices([p, q], target).tolist() == [1, 0]
    assert target_log_probs([p, q], target).exp().tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert torch.equal(choices([P, Q], target), (1.5 * P - 0.5 * Q).argmax(-1))


def test_temperature_zero_combines_before_it_chooses():
    """One-hot rows of each model first would choose id 0, the expert's own."""
    p, q = logs(0.5, 0.45, 0.05), logs(0.8, 0.1, 0.1)
    assert choices([p, q], Target(alpha=1.0, temperature=0.0)).item() == 1


def test_a_low_temperature_approaches_temperature_zero():
    cold = target_log_probs([P, Q], Target(alpha=0.5, temperature=1e-3))
    assert torch.equal(cold.argmax(-1), choices([P, Q], Target(alpha=0.5, temperature=0.0)))


def test_rows_over_padded_ids_would_change_the_target():
    """Slicing to the shared real ids comes first: padding with a logit of its own takes mass."""
    padded = torch.cat([P, torch.zeros(50, 4, dtype=torch.float64)], dim=-1)
    assert not torch.allclose(target_log_probs([padded], Target())[:, :12], LOG_P)


@pytest.mark.parametrize("settings", [{}, {"cutoff": 1e-6}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.5}])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_broken_row_is_seen_at_any_id_and_only_there(temperature, settings):
    """Also where one entry of a row is looked at only: a broken score spreads over the whole row."""
    target = Target(alpha=0.1, temperature=temperature, **settings)
    kinds = [(0, math.nan), (0, math.inf)]
    if not target.cutoff:  # with one, what another model says of an excluded id changes nothing
        kinds.append((1, math.nan))
    for vocab in (5, 12, 67):
        ids = torch.arange(vocab) % P.shape[-1]
        for place in range(vocab):
            for which, broken in kinds:
                logits = [P[:6, ids].view(3, 2, vocab).clone(), Q[:6, ids].view(3, 2, vocab).clone()]
                logits[which][1, 1, place] = broken
                assert target_rows(logits, target)[1].tolist() == [False, True, False], (vocab, place, which, broken)


# ---- the signal ------------------------------------------------------------------------------------------------------


def test_the_signal_is_taken_at_the_target_s_choice_from_normalised_rows():
    best = (1.5 * P - 0.5 * Q).argmax(-1, keepdim=True)
    expected = (LOG_P - LOG_Q).gather(-1, best).squeeze(-1).abs()
    assert_close(contrast_signal(P, Q, Target(alpha=0.5)), expected)
    assert_close(contrast_signal(P + 5, Q - 5, Target(alpha=0.5, temperature=0.0)), expected)


def test_the_signal_stays_finite_where_the_amateur_excludes_the_choice():
    signal = contrast_signal(logs(0.9, 0.1), logs(0.0, 1.0), Target(alpha=0.1))
    assert signal.item() == pytest.approx(LOG_FLOOR + math.log(0.9))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"alpha": -0.1}, "alpha must be a finite number >= 0, got -0.1"),
        ({"alpha": INF}, "alpha must be"),
        ({"alpha": math.nan}, "alpha must be"),
        ({"temperature": -1.0}, "temperature must be a finite number >= 0, got -1.0"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"temperature": INF}, "temperature must be"),
        ({"cutoff": -0.1}, r"cutoff must lie in \[0, 1\], got -0.1"),
        ({"cutoff": 1.5}, "cutoff must lie"),
        ({"cutoff": math.nan}, "cutoff must lie"),
        ({"weights": (0.0, 1.0)}, "weights must be finite and the expert's"),
        ({"weights": (-1.0, 1.0)}, "weights must be finite"),
        ({"weights": (1.0, INF)}, "weights must be finite"),
        ({"weights": ()}, "weights must be finite"),
        ({"temperatures": (1.0, 0.0)}, "model temperatures must be finite and > 0"),
        ({"temperatures": (1.0, math.nan)}, "model temperatures must be"),
    ],
)
def test_values_outside_their_range_are_refused_by_name(fields, message):
    with pytest.raises(UserError, match=message):
        Target(**fields)


def test_a_number_of_models_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match="3 models need explicit weights"):
        scores([P, Q, E], Target(alpha=0.1))
    with pytest.raises(UserError, match="2 models, but 3 weights and 2 temperatures"):
        scores([P, Q], Target(weights=(1.0, 0.5, -0.5)))
    with pytest.raises(UserError, match="2 models, but 2 weights and 1 temperatures"):
        scores([P, Q], Target(alpha=0.1, temperatures=(1.0,)))
