"""HTML pages from the templates in this folder. No torch."""

from pathlib import Path

import jinja2

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
    try:
        return environment.get_template(template).render(**values)
    except jinja2.TemplateError as problem:
        raise UserError(f"the template {template} cannot be filled: {problem}") from problem
