"""Made-up but consistent records, for tests of tables, plots and the report: no model is involved."""

import numpy as np

from diagnostics.records import POSITIONS, REPLAYS

METHODS = {"ar": 0.0, "cd": 0.0, "expert_sd": 2.0, "scd": 2.4, "dcd_eagle3": 1.5, "dcd_ngram": 0.5}


def positions(prompts: int = 60, length: int = 40, alphas=(0.1, 0.5), seed: int = 0) -> dict[str, np.ndarray]:
    """Columns of a positions table whose signal is mostly small and whose drafter error is mostly large."""
    generator = np.random.default_rng(seed)
    blocks = []
    for alpha in alphas:
        count = prompts * length
        prompt = np.repeat(np.arange(prompts), length)
        signal = generator.lognormal(-1.6 + 0.3 * generator.normal(size=prompts)[prompt], 1.6)
        error = generator.lognormal(0.5, 1.2, size=count)
        error_tv = 1 - np.exp(-0.4 * error)
        headroom = np.clip(alpha * signal * generator.uniform(0.02, 0.12, size=count), 0, 0.9)
        target_tv = np.clip(error_tv + generator.uniform(-1, 1, size=count) * headroom, 0, 1)
        oracle_tv = np.clip(target_tv - generator.uniform(-0.2, 0.5, size=count) * headroom, 0, 1)
        flip = generator.random(count) < headroom
        top1 = generator.random(count) < 0.85 * np.exp(-0.15 * error)
        oracle_top1 = np.where(flip & (error < 1), generator.random(count) < 0.6, top1)
        blocks.append(
            {
                "prompt_id": np.char.add("prompt-", prompt.astype(str)),
                "position": np.tile(np.arange(1, length + 1), prompts),
                "rollout_alpha": np.full(count, alpha),
                "alpha": np.full(count, alpha),
                "signal": signal,
                "signal_applied": alpha * signal,
                "signal_max": signal * generator.uniform(1, 2, size=count),
                "signal_std": signal * 0.7,
                "signal_kl": 0.5 * (alpha * signal * 0.7) ** 2,
                "headroom_tv": headroom,
                "headroom_greedy": np.minimum(1, headroom * generator.uniform(0, 1.5, size=count)),
                "headroom_flip": flip,
                "error_reverse": error,
                "error_forward": error * 0.7,
                "lost_mass": generator.beta(1, 60, size=count),
                "error_tv": error_tv,
                "target_kl": error * 1.1,
                "target_tv": target_tv,
                "target_top1": top1,
                "alignment_gap": generator.normal(0.2, 1.0, size=count),
                "tail_mass": generator.normal(0.0, 0.05, size=count),
                "oracle_kl": error * 1.2,
                "oracle_tv": oracle_tv,
                "oracle_top1": oracle_top1,
            }
        )
    table = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    rows = len(table["signal"])
    table |= {"pair": np.full(rows, "big / small / head"), "dataset": np.full(rows, "held-out")}
    assert set(table) == {c.name for c in POSITIONS if not c.optional}
    return table


def with_drafts(columns: dict[str, np.ndarray], dual: float = 0.02, direct: float = 0.0, seed: int = 1) -> dict:
    """The same positions with dual, direct and stronger drafts and their variances; `dual` is by how much the dual
    draft's distance from the target exceeds the expert-aligned one's, `direct` the direct one's gain."""
    generator = np.random.default_rng(seed)
    count, alpha = len(columns["signal"]), columns["alpha"]
    noise = generator.normal(0, 0.02, size=(4, count))
    found = dict(columns)
    shifts = {"dual": dual, "exact_expert": -0.05, "direct": -direct, "stronger_plain": -0.1, "stronger": -0.09}
    for index, (name, shift) in enumerate(shifts.items()):
        flip = generator.random(count) < 0.03
        found[f"{name}_tv"] = np.clip(columns["target_tv"] + shift + noise[index % 4], 0, 1)
        found[f"{name}_kl"] = np.maximum(0, columns["target_kl"] * (1 + 2 * (shift + noise[index % 4])))
        found[f"{name}_top1"] = np.where(flip, ~columns["target_top1"], columns["target_top1"])
    found["dual_closer"] = found["dual_kl"] < columns["target_kl"]
    found["stronger_error"] = columns["error_reverse"] * 0.3
    found["amateur_error"] = generator.lognormal(0.3, 1.2, size=count)
    found["var_signal"] = columns["signal_std"] ** 2
    found["var_error"] = columns["error_reverse"] * generator.uniform(0.5, 1.5, size=count)
    found["var_amateur_error"] = found["amateur_error"] * generator.uniform(0.5, 1.5, size=count)
    found["cov_signal_error"] = 0.1 * np.sqrt(found["var_signal"] * found["var_error"])
    found["cov_errors"] = 0.2 * np.sqrt(found["var_error"] * found["var_amateur_error"])
    found["rule_left"] = found["var_signal"] - 2 / alpha * found["cov_signal_error"]
    found["rule_right"] = (1 + 2 / alpha) * found["var_error"] + found["var_amateur_error"]
    found["rule_right"] = found["rule_right"] - 2 * (1 + 1 / alpha) * found["cov_errors"]
    assert set(found) == {c.name for c in POSITIONS}
    return found


def dual_replays(positions: dict, gamma: int = 5, dual: float = 0.0, seed: int = 2) -> dict[str, list]:
    """Replays that fit `with_drafts` positions; `dual` is what the dual draft adds to a per-token rate of .5."""
    generator = np.random.default_rng(seed)
    keys = ("pair", "dataset", "prompt_id", "alpha")
    texts = dict.fromkeys(zip(*(np.asarray(positions[key]).tolist() for key in keys), strict=True))
    rates = {("target", gamma): 0.5, ("target", 2 * gamma): 0.5, ("dual", gamma): 0.5 + dual}
    rates |= {("oracle", gamma): 0.52, ("exact_expert", gamma): 0.7}
    rows = []
    for text in texts:
        luck = generator.normal(0, 0.02)
        for (draft, drafts), rate in rates.items():
            rounds = 25
            hits = generator.random((rounds, drafts)) < rate + luck
            accepted = int(np.cumprod(hits, axis=1).sum())
            counts = {"rounds": rounds, "accepted": accepted, "emitted": accepted + rounds}
            rows.append(dict(zip(keys, text, strict=True)) | {"draft": draft, "gamma": drafts} | counts)
    return {name: [row[name] for row in rows] for name in rows[0]}


def rounds(prompts: int = 20, alphas=(0.1, 0.5), repeats: int = 2, gamma: int = 5, tokens: int = 64, seed: int = 0):
    """Columns of a rounds table: two costs per pass, accepted drafts by a constant acceptance per method."""
    generator = np.random.default_rng(seed)
    rows = []
    for alpha in alphas:
        for repeat in range(repeats):
            for prompt in range(prompts):
                for method, length in METHODS.items():
                    if method in ("ar", "expert_sd") and alpha != alphas[0]:
                        continue
                    rows += _answer(
                        method, length * (1.1 - 0.4 * alpha), alpha, repeat, prompt, gamma, tokens, generator
                    )
    return {name: [row[name] for row in rows] for name in rows[0]}


def _answer(method, length, alpha, repeat, prompt, gamma, tokens, generator):
    rate = 1 - 1 / (1 + length)
    free = method in ("ar", "expert_sd")
    done, found = 1, []
    while done < tokens:
        drafted = 0 if method in ("ar", "cd") else min(gamma, tokens - done)
        accepted = 0
        while accepted < drafted and generator.random() < rate:
            accepted += 1
        emitted = min(accepted + 1, tokens - done)
        noise = generator.lognormal(0, 0.05)
        draft_s = {"scd": 0.016, "dcd_ngram": 0.0002}.get(method, 0.003) * drafted * noise
        found.append(
            {
                "run": f"alpha={'any' if free else alpha} repeat={repeat}",
                "method": method,
                "prompt_id": f"prompt-{prompt}",
                "sample": 0,
                "round": len(found),
                "drafted": drafted,
                "accepted": accepted,
                "emitted": emitted,
                "draft_s": draft_s,
                "expert_s": 0.038 * noise,
                "amateur_s": 0.0 if method in ("ar", "expert_sd", "scd") else 0.022 * noise,
                "rest_s": 0.002 * noise,
                "expert_passes": 1,
                "amateur_passes": 1,
            }
        )
        done += emitted
    return found


def replays(
    prompts: int = 60,
    train_alphas=(0.0, 0.1, 0.3, 0.5),
    infer_alphas=(0.0, 0.1, 0.3, 0.5),
    seeds=(0, 1, 2),
    effect: float = 0.0,
    seed_deviation: float = 0.0,
    noise: float = 0.02,
    headroom: float = 0.02,
    official: bool = True,
    seed: int = 0,
) -> dict[str, list]:
    """Columns of a replays table: L falls with infer-alpha, and differs by `effect` (a share of L) wherever a drafter
    was trained on the contrast."""
    generator = np.random.default_rng(seed)
    drafters = [("family", f"alpha_{t:g}_seed_{s}", "dual_input", "dual", t, s) for t in train_alphas for s in seeds]
    if official:
        drafters.append(("official", "official", "eagle3", "expert_only", 0.0, 0))
    skill = {name: 1 + generator.normal() * seed_deviation for _, name, *_ in drafters}
    columns: dict[str, list] = {}
    for index in range(prompts):
        length, rounds = generator.gamma(16, 0.125), int(generator.integers(18, 30))
        for infer in infer_alphas:
            flips = float(generator.binomial(60, min(1.0, 2 * headroom * infer)))
            for group, name, kind, reads, train, own in drafters:
                here = length * (1 - 0.3 * infer) * (1 + (effect if train else 0.0)) * skill[name]
                accepted = int(rounds * max(0.0, here * (1 + noise * generator.normal())) + generator.random())
                acceptance = 60 * min(1.0, 0.25 * here + 0.1 * noise * generator.normal())
                row = {
                    "pair": "big / small",
                    "dataset": "held-out",
                    "prompt_id": f"prompt-{index}",
                    "infer_alpha": infer,
                    "group": group,
                    "drafter": name,
                    "kind": kind,
                    "input": reads,
                    "train_alpha": train,
                    "seed": own,
                    "rounds": rounds,
                    "accepted": accepted,
                    "emitted": accepted + rounds,
                    "history_alpha": 0.0,
                    "positions": 60,
                    "acceptance": max(0.0, acceptance),
                    "top1": float(int(max(0.0, acceptance))),
                    "headroom_tv": 60 * headroom * infer,
                    "headroom_flip": flips,
                }
                for key, value in row.items():
                    columns.setdefault(key, []).append(value)
    assert set(columns) == {c.name for c in REPLAYS}
    return columns
