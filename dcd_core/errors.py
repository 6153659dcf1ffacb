"""The one exception that means: the input is wrong, and here is what to do about it."""


class UserError(ValueError):
    """Bad input from outside: a flag, a file, a model folder.

    The message says what is wrong, where, and what to do. Entry scripts print it as one line, `error: ...`, and exit
    with code 2 (see dcd_core.config.run_entry); anything else that escapes an entry script is a bug and keeps its
    traceback.
    """
