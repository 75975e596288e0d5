"""Checks whether a runner can serve a model: its configuration, its modules, and its logits for a few tokens.

A runner keeps the keys and values of every token in slots, and concatenates the tokens of all rows. So the layers must
depend on positions, keys and values only, or carry a state of a kind that `engine/model/state_layers.py` knows.
"""

import inspect

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from decoding.errors import ConfigError
from engine.loading.settings import length_limits
from engine.model.kv_pages import KVPages
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from engine.model.state_layers import carries_known_states

# Kinds of attention that run; kinds of layers without attention are checked as modules.
_ATTENTION_KINDS = {"attention", "chunked_attention", "full_attention", "linear_attention", "sliding_attention"}
_STATES = "gated delta rules (as in Qwen3.5), Mamba 1 and 2 (Jamba, Granite 4-H) and short convolutions (LFM2)"
_LENGTHS = (5, 9)  # tokens of the test's two calls
_TOLERANCES = {torch.float32: 0.01}  # of the logits, relative to their own variation
_LOOSE = 0.3  # for other types: rounding gives a few per cent, a text that is ignored gives 1


def check_config(config: PretrainedConfig, *, max_length: int) -> None:
    """Raise ConfigError if the configuration shows that a runner can't serve the model."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ConfigError(f"{config.model_type} models have an encoder; only decoder-only models can be served")
    kinds = {kind for kind in getattr(text, "layer_types", None) or () if "attention" in kind}
    if unknown := sorted(kinds - _ATTENTION_KINDS):
        can_run = ", ".join(sorted(_ATTENTION_KINDS))
        raise ConfigError(f"it has layers of kind {', '.join(unknown)}; only {can_run} can run")
    if _uses_alibi(text):
        raise ConfigError("it biases attention by distance (ALiBi), which attention over KV slots does not support")
    for problem, limit in length_limits(text):
        if max_length > limit:
            raise ConfigError(f"{problem} beyond {limit} tokens; lower max_length from {max_length} to {limit}")


def check_modules(model: PreTrainedModel, *, max_length: int) -> None:
    """Raise ConfigError if the model's class or layers show that a runner can't serve it.

    model: may be on the meta device.
    """
    name = type(model).__name__
    kinds = set(getattr(model.config, "layer_types", None) or ("unknown",))
    carries_states = model._is_stateful and not kinds <= {"attention", "full_attention"}
    if (carries_states or "linear_attention" in kinds) and not carries_known_states(model):
        raise ConfigError(f"{name} carries a state from token to token in its own way; only {_STATES} can run")
    if not model._can_set_attn_implementation():
        raise ConfigError(f"{name} computes attention itself, not through transformers' AttentionInterface")
    for path, module in model.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise ConfigError(f"{name} is no decoder: in {path}, tokens see those that come after them")
    window = getattr(model.config, "sliding_window", None)
    if window and window < max_length and _windows_only_masks(model):
        raise ConfigError(
            f"{name} does not pass its window of {window} tokens to its attention; lower max_length from {max_length} "
            f"to {window}"
        )


def try_out(model: PreTrainedModel) -> KVPages:
    """Compare the logits of a few tokens over slots with those of the model's plain forward.

    Returns the cache that was used, which shows what each layer keeps.

    Raises ConfigError if the logits differ, or the model's forward does not run.
    """
    runner = Runner(model, slots=2, max_length=sum(_LENGTHS), max_query=max(_LENGTHS))
    if runner.device.type == "cuda":
        runner.use_graphs(capture=lambda run: run)
    tokens = [(7 + 131 * position) % runner.vocab_size for position in range(sum(_LENGTHS))]
    try:
        expected = _plain(model, tokens)
        actual = _over_slots(runner, tokens)
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ConfigError(f"{type(model).__name__} does not run over KV slots: {error}") from error
    possible = (expected != -torch.inf).any(dim=0)  # [V]; a drafter may lack tokens
    actual, expected = actual[:, possible], expected[:, possible]
    is_quantized = getattr(model, "quantization_method", None) is not None
    tolerance = _LOOSE if is_quantized else _TOLERANCES.get(model.dtype, _LOOSE)
    difference = _difference(actual, expected, is_exact=tolerance != _LOOSE)
    if not difference <= tolerance:
        raise ConfigError(
            f"{type(model).__name__} gives other logits over KV slots than without: they differ by "
            f"{difference:.1%} of their own variation, and {tolerance:.0%} would be rounding"
        )
    return runner.cache


def _difference(actual: Tensor, expected: Tensor, *, is_exact: bool) -> float:
    """Return the difference of logits, relative to their own variation. actual, expected: [T, V].

    is_exact: over all tokens. Otherwise the median over the tokens of each call: where one rare token follows another,
    rounding alone may change logits completely.
    """
    error, variation = actual - expected, expected - expected.mean(dim=-1, keepdim=True)
    if is_exact:
        return float(error.norm() / variation.norm())
    first, second = (error.norm(dim=-1) / variation.norm(dim=-1)).split(_LENGTHS)
    return max(float(first[1:].median()), float(second.median()))  # a text's first token attends to itself alone


@torch.inference_mode()
def _plain(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Return the float32 logits [T, V] of the text, without a cache."""
    ids = torch.tensor([tokens], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits.float()


def _over_slots(runner: Runner, tokens: list[int]) -> Tensor:
    """Return the float32 logits [T, V] of the text in two calls, the first beside another row."""
    first, second = _LENGTHS
    before = runner.logits([RowInput(0, 0, tokens[:3]), RowInput(1, 0, tokens[:first])])[3:].clone()
    after = runner.logits([RowInput(1, first, tokens[first : first + second])])
    return torch.cat([before, after])


def _windows_only_masks(model: PreTrainedModel) -> bool:
    """Return whether the model makes masks with a window but passes no window to its attention, which gets no masks."""
    codes = [inspect.unwrap(type(module).forward).__code__ for module in model.modules()]
    arguments = {name for code in codes for names in code.co_consts if isinstance(names, tuple) for name in names}
    masks = any("create_sliding_window_causal_mask" in code.co_names for code in codes)
    return masks and "sliding_window" not in arguments


def _uses_alibi(config: PretrainedConfig) -> bool:
    """Return whether attention uses ALiBi. Bloom always does; Falcon and MPT have a switch."""
    switches = (getattr(config, "alibi", False), getattr(getattr(config, "attn_config", None), "alibi", False))
    return config.model_type == "bloom" or any(switches)
