"""The endpoints of a configuration with the sizes of their models, from the checkpoints' headers. Loads no weights."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from decoding.errors import ConfigError
from deployments.configuration.config import ServerConfig
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.model import MAX_LENGTH, ModelConfig, locate
from deployments.configuration.paths import positions_of, read_header


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """An endpoint, with its models described as text."""

    endpoint: str
    target: str
    drafter: str
    draft_length: int
    context_length: int | None  # None: that of a checkpoint which is not here


def catalogue(config: ServerConfig) -> list[CatalogueEntry]:
    """Describe every endpoint of the configuration; raises ConfigError if a checkpoint's header is damaged."""
    return [
        CatalogueEntry(
            endpoint=name,
            target=" + ".join(_description(model, config) for model in endpoint.models),
            drafter=" + ".join(_drafters(endpoint, config)) or "–",
            draft_length=endpoint.draft_length if endpoint.drafts else 0,
            context_length=_least([_context_length(config.models[model]) for model in endpoint.models]),
        )
        for name, endpoint in config.endpoints.items()
    ]


def parameter_count(folder: Path) -> int:
    """Count the parameters of the checkpoint in the folder; 0 if it has no safetensors files."""
    return sum(_parameters_in(file) for file in folder.glob("*.safetensors"))


def _least(lengths: list[int | None]) -> int | None:
    known = [length for length in lengths if length is not None]
    return min(known) if len(known) == len(lengths) else None


def _context_length(model: ModelConfig) -> int | None:
    """Return the most tokens of a request; None if only the missing checkpoint tells."""
    folder = Path(locate(model.path))
    if model.max_length is not None or not (folder / "config.json").is_file():
        return model.max_length
    positions = positions_of(read_header(folder))
    return None if positions is None else min(positions, MAX_LENGTH)


def _description(name: str, config: ServerConfig) -> str:
    model: ModelConfig = config.models[name]
    count = parameter_count(Path(locate(model.path)))
    size = f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    return f"{name} ({size}, {model.path})" if count else f"{name} ({model.path})"


def _drafters(endpoint: EndpointConfig, config: ServerConfig) -> Iterator[str]:
    if endpoint.drafter is not None:
        yield _description(endpoint.drafter, config)
    if endpoint.heads is not None:
        yield f"{endpoint.heads.kind} heads ({endpoint.heads.path})"
    if endpoint.ngram is not None:
        yield "n-grams"


def tensors_in(file: Path) -> dict[str, tuple[list[int], int]]:
    """Return the shape and the bytes of each tensor in a safetensors file, by name.

    The header is a JSON document that follows its length in 8 bytes.

    Raises:
        ConfigError: it is no safetensors file.
    """
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        offsets = {name: tensor["data_offsets"] for name, tensor in tensors.items()}
        return {name: (tensor["shape"], offsets[name][1] - offsets[name][0]) for name, tensor in tensors.items()}
    except (OSError, ValueError, KeyError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{file} is not a safetensors file: {error}") from error


def _parameters_in(file: Path) -> int:
    return sum(math.prod(shape) for shape, _ in tensors_in(file).values())
