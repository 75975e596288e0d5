"""How commands take a model: as configurations do. Knows no commands."""

from pathlib import Path

import click


def located(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return a model's folder or file on this machine. A click callback.

    Raises:
        ConfigError: as in `locate`.
    """
    from deployments.configuration.paths import locate  # imports pydantic, which `--help` does without

    return value if value is None or Path(value).exists() else locate(value)
