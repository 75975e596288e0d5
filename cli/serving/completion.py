"""`consort --install-completion`: writes the script that lets a shell complete commands and options."""

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_CONSORT_COMPLETE"  # click answers completions when it is set


def install_completion(context: click.Context, parameter: click.Parameter, shell: str | None) -> None:
    """Write the script for a shell, say how it is found, and end. A click callback."""
    if shell is None or context.resilient_parsing:
        return
    if shell == "auto":
        shell = Path(os.environ.get("SHELL", "")).name
    completion = get_completion_class(shell) if shell in _SHELLS else None
    if completion is None:
        raise click.BadParameter(f"should be {', '.join(_SHELLS)}, not {shell!r}", context, parameter)
    file, advice = _script(shell)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(completion(context.command, {}, "consort", _VARIABLE).source(), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"can't write {file}: {error.strerror}") from error
    click.echo(f"wrote {file}; {advice}")
    context.exit()


def _script(shell: str) -> tuple[Path, str]:
    """Return the file where a shell looks for the script, and what is left to do."""
    match shell:
        case "bash":
            folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
            file = folder / "bash-completion" / "completions" / "consort"
            return file, f"new shells use it, or without the package bash-completion: source {file}"
        case "zsh":
            return Path.home() / ".zfunc" / "_consort", "in ~/.zshrc: fpath+=~/.zfunc; autoload -Uz compinit; compinit"
        case _:
            folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
            return folder / "fish" / "completions" / "consort.fish", "new shells use it"
