"""Predicted speed from acceptance and latencies: the cost model of [DCD, App. D].

Latencies t_e (one drafter pass), t_p (expert), t_q (amateur) in any one unit; L is the accepted length (the extra token
not counted), gamma the draft length. Each function gives tokens per unit of time; a speed-up is a ratio of two.
"""

from __future__ import annotations

from scipy.optimize import brentq

from dcd_core.errors import UserError


def acceptance_rate(accepted_length: float, gamma: int) -> float:
    """The rate rho that gives this accepted length when positions are independent: L = sum_{i=1..gamma} rho^i.

    Raises:
        UserError: L outside [0, gamma].
    """
    if not 0 <= accepted_length <= gamma:
        raise UserError(f"accepted length {accepted_length} lies outside [0, gamma = {gamma}]")
    if accepted_length in (0, gamma):
        return accepted_length / gamma
    return brentq(lambda rho: sum(rho**i for i in range(1, gamma + 1)) - accepted_length, 0.0, 1.0, xtol=1e-12)


def vanilla(t_p: float, t_q: float) -> float:
    """Vanilla contrastive decoding: 1 / (t_p + t_q). With t_q = 0, the expert alone."""
    return 1.0 / (t_p + t_q)


def dcd(accepted_length: float, gamma: int, t_e: float, t_p: float, t_q: float) -> float:
    """DCD: (L + 1) / (gamma t_e + t_p + t_q); n-gram drafting has t_e = 0, expert-only speculation t_q = 0."""
    return (accepted_length + 1) / (gamma * t_e + t_p + t_q)


def scd(accepted_length: float, gamma: int, t_p: float, t_q: float) -> float:
    """SCD with delayed drafting: (L + 1) / ((gamma + rho^gamma) t_q + t_p)."""
    rho = acceptance_rate(accepted_length, gamma)
    return (accepted_length + 1) / ((gamma + rho**gamma) * t_q + t_p)


def cos(accepted_length: float, gamma: int, t_p: float, t_q: float, rho_p: float = 0.9, gamma_p: int = 1) -> float:
    """CoS: (L + 1) / ((gamma - rho_p^gamma_p rho_q^gamma_q + rho_q^gamma_q) t_q + t_p), with gamma_q = gamma."""
    passed = acceptance_rate(accepted_length, gamma) ** gamma
    return (accepted_length + 1) / ((gamma - rho_p**gamma_p * passed + passed) * t_q + t_p)


def split(base: tuple[float, float], method: tuple[float, float]) -> tuple[float, float]:
    """Multiplicative split of a speed ratio [DCD, Tab. 10]: (length factor, time factor), from (L, seconds per round).

    Their product is the speed-up of ``method`` over ``base``: (L_m + 1)/(L_b + 1) * T_b/T_m.
    """
    return (method[0] + 1) / (base[0] + 1), base[1] / method[1]
