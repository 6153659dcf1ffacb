"""What transformers runs for `model.generate(..., custom_generate=FOLDER, trust_remote_code=True)`.

transformers copies this file elsewhere before it imports it, so the work is done by the installed package.
"""

from dcd_core.custom_generate import generate_from_folder


def generate(model, **arguments):
    """See dcd_core.custom_generate."""
    return generate_from_folder(model, **arguments)
