"""The options of `consort serve MODEL`, named as vLLM's where it has them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from deployments.planning.model_server import ModelServer

_Command = TypeVar("_Command", bound=Callable[..., Any])
DTYPES = {"auto": "auto", "float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
DTYPES |= {"float": "float32", "half": "float16"}  # as vLLM calls them, too
_QUANTIZATIONS = {"int4": "int4", "int8": "int8", "nf4": "nf4", "bitsandbytes": "nf4"}
_KV_DTYPES = DTYPES | {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
_COUNT = click.IntRange(1)

# Options whose value is a key of the target, of both models, or of something else.
_TARGET_KEYS = {
    "activations": "activations",
    "chat_template": "chat_template",
    "max_model_len": "max_length",
    "max_num_seqs": "slots",
    "quantization": "quantization",
    "replicas": "replicas",
    "revision": "revision",
    "tensor_parallel_size": "tensor_parallel",
}
_SHARED_KEYS = {"dtype": "dtype", "kv_cache_dtype": "kv_dtype", "trust_remote_code": "trust_remote_code"}
_VALUES = {"dtype": DTYPES, "kv_cache_dtype": _KV_DTYPES, "quantization": _QUANTIZATIONS}

_OPTIONS = (
    click.option(
        "--drafter", metavar="MODEL|none|auto", help="A model that drafts. auto: heads that come with MODEL, n-grams."
    ),
    click.option("--served-model-name", metavar="NAME", multiple=True, help="What clients ask for; may be repeated."),
    click.option("--dtype", type=click.Choice(list(DTYPES)), help="Of the weights; auto: as stored."),
    click.option("--quantization", "-q", type=click.Choice(list(_QUANTIZATIONS)), help="Of the target's weights."),
    click.option("--activations", type=click.Choice(["int8"]), help="Of the target, beside integer weights on a CPU."),
    click.option("--max-model-len", "--max-length", type=_COUNT, help="Tokens of a request, prompt and answer."),
    click.option("--max-num-seqs", type=_COUNT, help="The most requests that run at once."),
    click.option("--tensor-parallel-size", "--tensor-parallel", "-tp", type=_COUNT, help="Devices for each layer."),
    click.option("--replicas", "--data-parallel-size", "-dp", type=_COUNT, help="Copies of the target."),
    click.option(
        "--gpu-memory-utilization", type=click.FloatRange(0, 1, min_open=True), help="Share of each GPU for a model."
    ),
    click.option("--kv-cache-dtype", type=click.Choice(list(_KV_DTYPES)), help="Of the KV cache."),
    click.option("--draft-length", type=click.IntRange(0), help="Most draft tokens of a step."),
    click.option("--chat-template", metavar="FILE", help="Or its text; else the model's own."),
    click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), help="auto: GPUs where there are any."),
    click.option("--revision", help="Branch, tag or commit on the Hub."),
    click.option("--trust-remote-code", is_flag=True, help="Run the Python code that comes with the model."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How `consort serve` serves, whatever it serves; None: as configured."""

    host: str | None
    port: int | None
    api_key: str | None
    insecure: bool
    max_queue_wait: float | None  # seconds
    dry_run: bool
    print_config: bool
    address: str | None  # of a Ray cluster
    log_level: str | None  # None shows no logs

    @classmethod
    def take(cls, values: dict[str, Any]) -> "ServeOptions":
        """Take these out of a command's values, which click names."""
        return cls(**{field.name: values.pop(field.name) for field in fields(cls)})


def model_options(command: _Command) -> _Command:
    """Add the options for a MODEL to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def model_server(model: str, options: Mapping[str, Any]) -> "ModelServer":
    """Return how to serve a model. options: those of `model_options`, by name."""
    from deployments.planning.model_server import ModelServer

    given = {name: _VALUES.get(name, {}).get(value, value) for name, value in given_options(options).items()}
    shared = {key: given[name] for name, key in _SHARED_KEYS.items() if name in given}
    if given.get("device", "auto") != "auto":
        shared |= {"device": given["device"]}
    target = {key: given[name] for name, key in _TARGET_KEYS.items() if name in given}
    return ModelServer(
        model=model,
        drafter=given.get("drafter", "auto"),
        served_names=given.get("served_model_name", ()),
        draft_length=given.get("draft_length"),
        target_keys={"slots": "auto", **shared, **target},
        drafter_keys={"slots": target.get("slots", "auto"), **shared},
    )


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None and value is not False and value != ()}


def flag(name: str) -> str:
    """Return an option as it is typed."""
    return f"--{name.replace('_', '-')}"
