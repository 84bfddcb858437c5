"""The error that every wrong user input raises."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Bad user input: one sentence that names the file, the key, what was given and what is valid.

    Command lines print it on standard error and exit with 2, without a traceback.
    """


class ReportedError(RuntimeError):
    """A failure at run time that its message explains fully, such as a reward that broke.

    Command lines print it on standard error and exit with 1, without a traceback.
    """


def choices_text(given: str, valid: Iterable[str]) -> str:
    """``"did you mean 'a'? (valid: a, b, c)"`` for messages about an unknown name."""
    names = sorted(valid)
    nearest = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    listed = f"valid: {', '.join(names)}"
    return f"did you mean {nearest[0]!r}? ({listed})" if nearest else listed
