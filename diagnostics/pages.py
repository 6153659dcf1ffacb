"""HTML pages from the templates in this folder. No torch."""

import re
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from dcd_core.errors import UserError


def fill_page(template: str, **values) -> str:
    """A page as text. Raises UserError if the template asks for something that is not there."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    environment.filters["split_interval"] = split_interval
    try:
        return environment.get_template(template).render(**values)
    except jinja2.TemplateError as problem:
        raise UserError(f"the template {template} cannot be filled: {problem}") from problem


def breakable(text: str, marks: str = "@+") -> Markup:
    """A name that may go on in the next line after any of these marks in it: dcd_eagle3@ 5x4:10+ deferred."""
    return Markup(re.sub(rf"(?<=[a-z0-9])([{marks}])(?=[a-z0-9])", r"\1<wbr>", str(escape(text))))


def split_interval(text: str) -> tuple[str, str]:
    """A number and its interval: "1.95 [1.86, 2.03]" -> ("1.95", "[1.86, 2.03]"); no interval in any other text."""
    found = re.fullmatch(r"(.*[\d%]) (\[[-+]?[\d.]+, [-+]?[\d.]+\])", text)
    return (found[1], found[2]) if found else (text, "")
