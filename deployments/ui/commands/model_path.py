"""How commands take a model: as configurations do. Knows no commands."""

import click

from deployments.configuration.model import locate


def located(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return a model's folder or file on this machine. A click callback.

    Raises:
        ConfigError: as in `locate`.
    """
    return None if value is None else locate(value)
