"""A plan and a configuration in words, before anything is loaded."""

from collections.abc import Iterator
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from deployments.configuration.config import ServerConfig
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.model import MAX_LENGTH, ModelConfig
from deployments.configuration.paths import locate, parameter_count, positions_of, read_header
from deployments.planning.plan import GIB, Assignment, Plan

_FEW = GIB // 10  # bytes, below which they are shown in MiB
_ROUND = 1000  # tokens: the number is an estimate


def plan_lines(plan: Plan, config: ServerConfig) -> list[str]:
    """Return a line for each model, one for what drafts, and the plan's notes."""
    models = sorted(plan.models.values(), key=lambda model: model.drafts_for is not None)
    lines = [_model_line(model, config) for model in models]
    return [*lines, *_draft_lines(config), *plan.notes]


def configured_table(config: ServerConfig) -> Table:
    """Return what clients can ask for, and the models behind it."""
    table = Table("model", "target", "drafter", "draft length", "context", box=SIMPLE)
    for name, endpoint in config.endpoints.items():
        lengths = [_context_length(config.models[model]) for model in endpoint.models]
        table.add_row(
            name,
            " + ".join(_description(model, config) for model in endpoint.models),
            " + ".join(_drafters(endpoint, config)) or "–",
            str(endpoint.draft_length if endpoint.drafts else 0),
            "–" if None in lengths else str(min(length for length in lengths if length is not None)),
        )
    return table


def _context_length(model: ModelConfig) -> int | None:
    """Return the most tokens of a request; None if only a checkpoint that is not here tells."""
    folder = Path(locate(model.path))
    if model.max_length is not None or not (folder / "config.json").is_file():
        return model.max_length
    positions = positions_of(read_header(folder))
    return None if positions is None else min(positions, MAX_LENGTH)


def _description(name: str, config: ServerConfig) -> str:
    path = config.models[name].path
    count = parameter_count(Path(locate(path)))
    size = f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    return f"{name} ({size}, {path})" if count else f"{name} ({path})"


def _drafters(endpoint: EndpointConfig, config: ServerConfig) -> Iterator[str]:
    if endpoint.drafter is not None:
        yield _description(endpoint.drafter, config)
    if endpoint.heads is not None:
        yield f"{endpoint.heads.kind} heads ({endpoint.heads.path})"
    if endpoint.ngram is not None:
        yield "n-grams"


def _model_line(model: Assignment, config: ServerConfig) -> str:
    replicas = config.models[model.name].replicas
    sizes = [
        *([] if model.weights_bytes is None else [f"{_size(model.weights_bytes)} of weights"]),
        *([] if model.kv_tokens is None else [f"about {_rounded(model.kv_tokens):,} tokens of KV"]),
    ]
    copies = f"{replicas} replicas " if replicas > 1 else ""
    role = "drafter" if model.drafts_for is not None else "target"
    text = f"{role} {model.name}: {copies}{_where(model)}"
    return ", ".join([text, *sizes]) + (", each" if replicas > 1 and sizes else "")


def _where(model: Assignment) -> str:
    if model.colocated_with is not None:
        return f"in the replicas of {model.colocated_with}"
    if model.gpus:
        return f"on GPU {', '.join(map(str, model.gpus))}"
    if model.num_gpus:
        return f"on {model.num_gpus:g} GPU"
    threads = model.threads or max(int(model.num_cpus), 1)
    return f"on {threads} CPU thread{'s' if threads > 1 else ''}"


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= _FEW else f"{size / 2**20:.1f} MiB"


def _rounded(tokens: int) -> int:
    return tokens // _ROUND * _ROUND if tokens >= 10 * _ROUND else tokens


def _draft_lines(config: ServerConfig) -> Iterator[str]:
    """Say where heads draft, or n-grams alone: a drafter would do more."""
    for name, endpoint in config.endpoints.items():
        if endpoint.heads is not None:
            yield f"{endpoint.heads.kind} heads {endpoint.heads.path}: in the replicas of {endpoint.target}"
        elif endpoint.ngram is not None and endpoint.drafter is None:
            yield f"drafts for {name}: n-grams of the text alone; `consort train drafter` makes a drafter for it"
