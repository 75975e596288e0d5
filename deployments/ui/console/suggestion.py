"""What a user may have meant by a name that is not known."""

from collections.abc import Collection

from deployments.validation.strict import nearest


def suggestion(name: str, known: Collection[str]) -> str:
    """The names that begin so, or else the nearest one, as the end of a message."""
    fitting = sorted(one for one in known if name and one.startswith(name))
    return f"did you mean {' or '.join(map(repr, fitting))}?" if fitting else nearest(name, known)
