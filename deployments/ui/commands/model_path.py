"""How commands take a model: as configurations do. Knows no commands."""

from pathlib import Path

import click

from deployments.configuration.model import locate


def located(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return a model's folder or file on this machine. A click callback.

    Raises:
        ConfigError: as in `locate`.
    """
    return value if value is None or Path(value).exists() else locate(value)
