"""Numbers as a reader wants them: rounded, with their interval, and lists with an "and"."""


def percent(found: dict, digits: int = 1, sign: bool = False) -> str:
    """A share as "83.2% [82.2, 84.1]"; without an interval where there is none."""
    return _with_interval(found, 100, digits, "%", sign)


def points(found: dict, digits: int = 1, sign: bool = False) -> str:
    """A difference of shares in points, "+0.24 [0.21, 0.26]"."""
    return _with_interval(found, 100, digits, "", sign)


def plain(found: dict, digits: int = 2, sign: bool = False) -> str:
    """A number with its interval, "1.95 [1.86, 2.03]"."""
    return _with_interval(found, 1, digits, "", sign)


def count(number: int) -> str:
    """12,800"""
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """ "1 comparison", "1,200 comparisons"."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def listed(items: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _with_interval(found: dict, scale: float, digits: int, unit: str, sign: bool = False) -> str:
    def number(value: float) -> str:
        text = f"{scale * value:{'+' if sign else ''}.{digits}f}"
        return text[1:] if float(text) == 0 and text[0] in "+-" else text

    text = number(found["estimate"]) + unit
    if found["low"] is None or found["low"] == found["high"]:
        return text
    return f"{text} [{number(found['low'])}, {number(found['high'])}]"
