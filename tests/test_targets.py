"""Every published target is one configuration object: its formula, the identities between them, the floor, what stands
in for it provisionally, and what is refused."""

import math

import pytest
import torch
from test_truncation import by_sorting

from dcd_core.contrast import (
    LOG_FLOOR,
    Target,
    choices,
    contrast_signal,
    floor_hits,
    floored,
    plausible,
    scores,
    target_log_probs,
)
from dcd_core.errors import UserError

INF = math.inf


def rows(seed: int, count: int = 50, vocab: int = 12) -> torch.Tensor:
    """Random fp64 logits, not normalised and off by a constant per row."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator, dtype=torch.float64) * 3
    return logits + torch.randn(count, 1, generator=generator, dtype=torch.float64) * 20


P, Q, R = rows(1), rows(2), rows(3)
LOG_P, LOG_Q, LOG_R = (row.log_softmax(-1) for row in (P, Q, R))
SAMPLING = [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 4}, {"temperature": 1.3, "top_p": 0.8}]
PRESETS = {
    "dcd": (Target.dcd, {"alpha": 0.3}),
    "obrien": (Target.obrien, {}),
    "li": (Target.li, {"strength": 0.5, "amateur_temperature": 0.5}),
    "cos": (Target.cos, {"mu": 0.3}),
    "proxy": (Target.proxy, {"strength": 1.5}),
    "guidance": (Target.guidance, {"strength": 0.5}),
}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal probabilities over the same ids."""
    close = torch.allclose(left.exp(), right.exp(), atol=1e-12, rtol=1e-9)
    return left.shape == right.shape and close and torch.equal(left == -INF, right == -INF)


def models_of(name: str) -> list[torch.Tensor]:
    return [P, Q, R] if name == "proxy" else [P, Q]


# ---- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_dcd_is_the_target_of_that_alpha(alpha, sampling):
    assert Target.dcd(alpha, **sampling) == Target(alpha=alpha, **sampling)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_obrien_is_dcd_with_the_mask(sampling):
    """Their mask is on logits, z_p >= max z_p + log 0.1: the same ids."""
    assert Target.obrien(0.7, **sampling) == Target.dcd(0.7, cutoff=0.1, **sampling)
    allowed = P - P.amax(-1, keepdim=True) >= math.log(0.1)
    assert torch.equal(allowed, plausible(P, 0.1)) and torch.equal(allowed, plausible(LOG_P, 0.1))
    default = (1.5 * P - 0.5 * Q).masked_fill(~allowed, -INF).log_softmax(-1)
    assert same(target_log_probs([P, Q], Target.obrien()), default)


@pytest.mark.parametrize("amateur_temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_li_tempers_the_amateur_alone_and_masks(amateur_temperature, temperature):
    target = Target.li(0.8, amateur_temperature, temperature=temperature)
    q = (Q / amateur_temperature).log_softmax(-1)
    combined = (LOG_P - 0.8 * q).masked_fill(LOG_P.exp() < 0.1 * LOG_P.exp().amax(-1, keepdim=True), -INF)
    assert same(target_log_probs([P, Q], target), (combined / temperature).log_softmax(-1))
    assert torch.equal(choices([P, Q], Target.li(0.8, amateur_temperature)), combined.argmax(-1))


@pytest.mark.parametrize("mu", [0.0, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0])
def test_cos_is_dcd_with_other_numbers(mu, temperature):
    """mu .1 is alpha .111, mu .5 is alpha 1."""
    target = Target.cos(mu, temperature)
    assert target == Target.dcd(mu / (1 - mu), temperature=temperature / (1 - mu))
    raw = P - mu * Q
    if temperature:
        assert same(target_log_probs([P, Q], target), (raw / temperature).log_softmax(-1))
    assert torch.equal(choices([P, Q], target), raw.argmax(-1))
    assert Target.cos(0.5).alpha == 1.0 and Target.cos(0.1).alpha == pytest.approx(1 / 9)


def test_cos_truncates_the_same_distribution():
    for cut in ({"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.6}):
        expected = by_sorting((P - 0.3 * Q) / 0.8, cut.get("top_k", 0), cut.get("top_p", 1.0)).log_softmax(-1)
        assert same(target_log_probs([P, Q], Target.cos(0.3, 0.8, **cut)), expected)


@pytest.mark.parametrize("strength", [0.0, 0.5, 2.0])
def test_proxy_multiplies_by_the_ratio_of_the_small_models(strength):
    direct = LOG_P.exp() * (LOG_Q.exp() / LOG_R.exp()) ** strength
    assert same(target_log_probs([P, Q, R], Target.proxy(strength)), (direct / direct.sum(-1, keepdim=True)).log())
    assert same(target_log_probs([P, Q, Q - 4], Target.proxy(strength)), LOG_P)


def test_guidance_is_dcd_of_two_prefixes():
    """The formula of classifier-free guidance: log p- + gamma (log p+ - log p-), gamma = 1 + strength."""
    guided = LOG_Q + 1.5 * (LOG_P - LOG_Q)
    assert same(target_log_probs([P, Q], Target.guidance(0.5)), guided.log_softmax(-1))
    assert Target.guidance(0.5, top_k=3) == Target.dcd(0.5, top_k=3)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", PRESETS)
def test_logits_and_log_probs_give_one_target(name, sampling):
    make, fields = PRESETS[name]
    models, target = models_of(name), make(**fields, **sampling)
    assert same(target_log_probs(models, target), target_log_probs([row.log_softmax(-1) for row in models], target))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_the_other_fields(name):
    make, fields = PRESETS[name]
    target = make(**fields, temperature=0.5, top_k=3, top_p=0.9, cutoff=0.2)
    assert (target.top_k, target.top_p, target.cutoff) == (3, 0.9, 0.2)
    assert target.temperature == pytest.approx(0.5 / 0.7 if name == "cos" else 0.5)
    assert (target_log_probs(models_of(name), target) > -INF).sum(-1).max() <= 3


# ---- the floor reads the plausible set only --------------------------------------------------------------------------


@pytest.mark.parametrize("replacement", [-INF, -1e4, 1e4, INF, math.nan])
@pytest.mark.parametrize("name", ["obrien", "li", "proxy"])
def test_with_a_cutoff_no_excluded_id_of_another_model_changes_anything(name, replacement):
    make, fields = PRESETS[name]
    models, target = [row.clone() for row in models_of(name)], make(**fields, cutoff=0.1)
    for row in models[1:]:
        row[:, 0] -= 100.0  # below the floor
    allowed = plausible(models[0], target.cutoff)
    assert not allowed.all() and allowed[:, 0].any()
    changed = [models[0], *(row.masked_fill(~allowed, replacement) for row in models[1:])]
    assert torch.equal(scores(models, target), scores(changed, target))
    for temperature in (0.0, 0.7):
        at = make(**fields, temperature=temperature, cutoff=0.1)
        assert torch.equal(target_log_probs(models, at), target_log_probs(changed, at))


def test_the_floor_stands_below_the_best_allowed_id():
    p = torch.tensor([0.6, 0.39, 0.01], dtype=torch.float64).log()
    q = torch.tensor([-20.0, -90.0, 50.0], dtype=torch.float64)
    allowed = plausible(p, 0.1)
    assert floored(q, allowed).tolist() == [-20.0, -80.0, 50.0] and floored(q).tolist() == [-10.0, -10.0, 50.0]
    assert scores([p, q], Target(alpha=0.5, cutoff=0.1)).tolist() == pytest.approx(
        [1.5 * p[0].item() + 10.0, 1.5 * p[1].item() + 40.0, -INF]
    )
    assert floor_hits(p, q, 0.1).item() == 1 and floor_hits(p, q, 0.0).item() == 2
    signal = contrast_signal(p, q, Target(alpha=0.5, cutoff=0.1))
    assert signal.item() == pytest.approx(p[1].item() + 20.0 + LOG_FLOOR + 50.0)


def test_an_amateur_that_excludes_every_plausible_id_says_nothing():
    p = torch.tensor([0.6, 0.39, 0.01], dtype=torch.float64).log()
    q = torch.tensor([-INF, -INF, 0.0], dtype=torch.float64)
    target = target_log_probs([p, q], Target(alpha=1.0, cutoff=0.1))
    assert same(target, (2 * p).masked_fill(~plausible(p, 0.1), -INF).log_softmax(-1))
    assert floor_hits(p, q, 0.1).item() == 2


# ---- provisional tokens and the strength of a contrast ---------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", PRESETS)
def test_where_all_models_agree_the_provisional_target_is_the_target(name, sampling):
    make, fields = PRESETS[name]
    if name == "li":
        fields = {"strength": 0.4, "amateur_temperature": 0.5}  # weights that sum to 0.2
    target = make(**fields, **sampling)
    alone = target.provisional()
    agreeing = [P + shift for shift in range(len(models_of(name)))]
    assert same(target_log_probs([P], alone), target_log_probs(agreeing, target))
    assert (alone.temperature, alone.cutoff, alone.top_k, alone.top_p) == (
        target.temperature,
        target.cutoff,
        target.top_k,
        target.top_p,
    )
    assert alone.provisional() == alone and alone.contrast_weight(1) == 0.0


@pytest.mark.parametrize("strength, amateur_temperature", [(1.0, 1.0), (0.5, 0.5), (0.1, 0.1), (1.0, 0.5)])
def test_where_the_weights_cancel_the_expert_keeps_its_own(strength, amateur_temperature):
    target = Target.li(strength, amateur_temperature, temperature=0.7)
    assert target.provisional() == Target(weights=(1.0,), cutoff=0.1, temperature=0.7)
    tempered = Target(weights=(2.0, -3.0), temperatures=(4.0, 1.0))
    assert tempered.provisional().weights == (0.5,)


def test_the_provisional_weight_of_two_and_three_models_is_exactly_1():
    for value in (0.0, 0.1, 0.3, 0.7, 1.1, 3.3):
        for target in (Target.dcd(value), Target.proxy(value), Target(weights=(1 + value, -value))):
            assert target.provisional().weights == (1.0,)
    assert Target(alpha=0.5, temperatures=(1.0, 2.0)).provisional().weights == (1.25,)


def test_how_strongly_a_contrast_can_move_a_score():
    assert Target.dcd(0.3).contrast_weight(2) == 0.3 and Target.dcd(0.3).contrast_weight(1) == 0.0
    assert Target.li(0.5, 0.25).contrast_weight(2) == 2.0
    assert Target.proxy(1.5).contrast_weight(3) == 3.0
    with pytest.raises(UserError, match="2 models, but 3 weights"):
        Target.proxy(1.5).contrast_weight(2)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Target.dcd(1e40), "alpha must be at most 1e+06, got 1e+40"),
        (lambda: Target.dcd(-0.1), "alpha must be a finite number >= 0, got -0.1"),
        (lambda: Target.dcd(math.nan), "alpha must be a finite number >= 0, got nan"),
        (lambda: Target.obrien(-1.0), "beta must be a finite number >= 0, got -1.0"),
        (lambda: Target.obrien(cutoff=1.1), r"cutoff must lie in [0, 1], got 1.1"),
        (lambda: Target.li(math.inf), "strength must be a finite number >= 0, got inf"),
        (lambda: Target.li(0.5, 0.0), "model temperatures must be finite and > 0, got (1.0, 0.0)"),
        (lambda: Target.cos(1.0), "mu must lie in [0, 1) (alpha = mu / (1 - mu)), got 1.0"),
        (lambda: Target.cos(-0.1), "mu must lie in [0, 1) (alpha = mu / (1 - mu)), got -0.1"),
        (lambda: Target.cos(math.nan), "mu must lie in [0, 1) (alpha = mu / (1 - mu)), got nan"),
        (lambda: Target.cos(0.5, -1.0), "temperature must be a finite number >= 0, got -1.0"),
        (lambda: Target.proxy(-0.5), "strength must be a finite number >= 0, got -0.5"),
        (lambda: Target.guidance(math.nan), "strength must be a finite number >= 0, got nan"),
        (lambda: Target(top_k=-1), "top_k must be a whole number >= 0 (0 keeps every id), got -1"),
        (lambda: Target(top_p=0.0), "top_p must lie in (0, 1] (1 keeps every id), got 0.0"),
        (lambda: Target(top_p=1.1), "top_p must lie in (0, 1] (1 keeps every id), got 1.1"),
        (lambda: Target(top_p=math.nan), "top_p must lie in (0, 1] (1 keeps every id), got nan"),
        (lambda: scores([P, Q], Target.proxy(1.0)), "2 models, but 3 weights and 2 temperatures"),
        (lambda: scores([P], Target.li(1.0)), "1 models, but 2 weights and 2 temperatures"),
        (lambda: scores([P, Q, R], Target.dcd(0.1)), "3 models need explicit weights"),
    ],
)
def test_refusals_are_one_line(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value) == message
