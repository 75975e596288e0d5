"""Loads the endpoints of a configuration: their tokenizers, limits and defaults, but no weights."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from msgspec import structs
from transformers import PreTrainedTokenizerBase

from actors.coordinator.request import Endpoint
from actors.wire.messages import Adapter
from decoding.drafts.options import NgramOptions
from decoding.errors import ConfigError
from decoding.tokenizers.detokenizer import TextDecoder
from decoding.tokenizers.vocabulary import Compatibility, Vocabulary, compare_vocabularies
from deployments.apis.decoder import TokenDecoder, text_decoder
from deployments.apis.formats import kept_tokens, response_template
from deployments.configuration.config import ServerConfig
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.model import ModelConfig
from deployments.configuration.paths import locate, naming
from deployments.configuration.values import load_callable
from deployments.endpoints.bounds import Bounds, StructureChecker
from deployments.endpoints.chat_template import set_chat_template, tools_of
from deployments.endpoints.compressor import Compressor
from deployments.endpoints.encoder import Encoder
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.fields.sampling import SamplingFields
from deployments.strategies.strategy import load_strategy
from engine.loading.settings import (
    SamplingDefaults,
    context_length,
    is_trimmed,
    load_end_tokens,
    load_sampling_defaults,
    load_tokenizer,
    read_header,
    vocabulary_size,
)
from engine.loading.tokenizers import copy_tokenizer, vocabulary_of

_logger = logging.getLogger(__name__)


_Loaded = TypeVar("_Loaded")


def _check_drafter(
    name: str,
    endpoint: EndpointConfig,
    target: tuple[PreTrainedTokenizerBase, int],
    drafter: tuple[PreTrainedTokenizerBase, int],
) -> Compatibility | None:
    """How a drafter's tokens fit the target's, both given as tokenizer and V; None: they are the same."""
    if target[0].get_vocab() == drafter[0].get_vocab():
        return None
    compatibility = compare_vocabularies(vocabulary_of(*target), vocabulary_of(*drafter))
    obstacle = compatibility.drafting_obstacle
    if obstacle:
        raise ConfigError(
            f"endpoints.{name}.drafter: {endpoint.drafter!r} can't draft for {endpoint.target!r}: {obstacle}"
        )
    _logger.warning(
        "endpoints.%s: %s drafts for %s through text: %s", name, endpoint.drafter, endpoint.target, compatibility
    )
    return compatibility


def _check_members(name: str, endpoint: EndpointConfig, config: ServerConfig) -> dict[str, Compatibility]:
    """How members' tokens fit the leader's, by model. Members with the leader's tokens are left out."""
    if not endpoint.others:
        return {}
    leader = _vocabulary(endpoint.target, config)
    compared = {model: compare_vocabularies(leader, _vocabulary(model, config)) for model in endpoint.others}
    different = {model: compatibility for model, compatibility in compared.items() if not compatibility.identical}
    for model, compatibility in different.items():
        obstacle = compatibility.blending_obstacle
        if obstacle is None and endpoint.vocabulary == "shared":
            obstacle = f"its tokens are others: {compatibility}; set vocabulary to union or topk_union"
        if obstacle is not None:
            key = "formula" if endpoint.formula else "amateur" if endpoint.kind == "contrastive" else "members"
            raise ConfigError(f"endpoints.{name}.{key}: {model!r} can't join {endpoint.target!r}: {obstacle}")
        _logger.warning("endpoints.%s: %s joins %s through text: %s", name, model, endpoint.target, compatibility)
    return different


def load_endpoints(config: ServerConfig) -> dict[str, ServedEndpoint]:
    """Load the tokenizers and defaults of every endpoint, by name, the adapters of their targets among them.

    Raises ConfigError if a file can't be loaded, or models that work together have tokens that don't fit.
    """
    served = {
        name: replace(_load_endpoint(name, endpoint, config), max_adapters=config.max_adapters_of(name))
        for name, endpoint in config.endpoints.items()
    }
    adapters = [served[name].with_adapter(adapter) for name in config.endpoints for adapter in _adapters(name, config)]
    return served | {adapted.name: adapted for adapted in adapters}


def _adapters(endpoint: str, config: ServerConfig) -> Iterator[Adapter]:
    served, of_drafter = config.endpoints[endpoint], config.drafter_adapters_of(endpoint)
    for name, path in config.adapters_of(endpoint).items():
        adapter = _adapter(name, path, key=f"models.{served.target}.adapters.{name}")
        if name in of_drafter:
            drafter = _adapter(name, of_drafter[name], key=f"models.{served.drafter}.adapters.{name}")
            adapter = structs.replace(adapter, drafter=drafter)
        if served.heads is not None and name in served.heads.adapters:
            heads = _adapter(name, served.heads.adapters[name], key=f"endpoints.{endpoint}.heads.adapters.{name}")
            adapter = structs.replace(adapter, heads=heads)
        yield adapter


def _adapter(name: str, path: str, *, key: str) -> Adapter:
    from engine.loading.lora import read_lora  # loads torch

    located = locate(path)
    with naming(key):
        return Adapter(name, located, read_lora(located).version)


def _load_endpoint(name: str, endpoint: EndpointConfig, config: ServerConfig) -> ServedEndpoint:
    target = config.models[endpoint.target]
    for model in endpoint.answering:
        if is_trimmed(_load(read_header, config.models[model])):
            raise ConfigError(
                f"endpoints.{name}: {model!r} has a trimmed vocabulary, so it can only draft; give it as the drafter"
            )
    tokenizer = _tokenizer(endpoint.target, target)
    with naming(f"models.{endpoint.target}.chat_template"):
        set_chat_template(tokenizer, target.chat_template)
    if tools_of(tokenizer) == "built-in":
        _logger.info(
            "endpoints.%s: %s has no chat template with tools, so they are shown in Consort's form",
            name,
            endpoint.target,
        )
    vocab_size, eos_token_ids = _vocab_size(target), _eos_token_ids(target, tokenizer)
    through_text = _check_members(name, endpoint, config)
    same_tokens = [model for model in endpoint.others if model not in through_text]
    if endpoint.drafter is not None:
        drafter = config.models[endpoint.drafter]
        other = _tokenizer(endpoint.drafter, drafter), _vocab_size(drafter)
        compatibility = _check_drafter(name, endpoint, (tokenizer, vocab_size), other)
        if compatibility is None:
            same_tokens.append(endpoint.drafter)
        else:
            through_text[endpoint.drafter] = compatibility
    vocab_size = min([vocab_size, *(_vocab_size(config.models[model]) for model in same_tokens)])
    length = min(_context_length(config.models[model]) for model in (endpoint.target, *endpoint.others))
    colocated = endpoint.drafter in config.colocated_drafter_of(endpoint.target)
    recommended = _load(load_sampling_defaults, target) if endpoint.generation_config else SamplingDefaults()
    given: dict[str, Any] = recommended.given()
    known = {field: value for field, value in given.items() if field in SamplingFields.model_fields}
    strategy_key = f"endpoints.{name}.strategy"
    return ServedEndpoint(
        endpoint=_endpoint(name, endpoint, text_decoder(tokenizer, vocab_size), colocated=colocated),
        config=endpoint,
        encoder=Encoder(tokenizer, model=name, vocab_size=vocab_size, context_length=length),
        token_decoder=TokenDecoder(tokenizer, vocab_size),
        bounds=Bounds(length, recommended.max_tokens, config.http.max_logprobs),
        eos_token_ids=eos_token_ids,
        defaults=endpoint.defaults.with_defaults(SamplingFields.model_construct(**known)),
        structures=StructureChecker(copy_tokenizer(tokenizer), eos_token_ids),
        strategy=None if endpoint.strategy is None else load_strategy(endpoint.strategy, key=strategy_key),
        panel={model: _load_member(model, endpoint, config) for model in endpoint.members if endpoint.synthesizes},
        through_text=through_text,
        decode_turn=_turn_decoder(tokenizer, vocab_size),
        compressor=None if endpoint.compressor is None else _load_compressor(endpoint.compressor, config, tokenizer),
    )


def _load_member(model: str, panel: EndpointConfig, config: ServerConfig) -> ServedEndpoint:
    """Load a member of a panel that has a writer, with the drafts of the first endpoint of which it is the target."""
    endpoints = config.endpoints.values()
    drafting = next((each for each in endpoints if each.target == model and each.drafts), None)
    return _load_endpoint(model, panel.of_member(model, drafting), config)


def _load_compressor(name: str, config: ServerConfig, target: PreTrainedTokenizerBase) -> Compressor:
    model = config.models[name]
    tokenizer = _tokenizer(name, model)
    same = tokenizer.get_vocab() == target.get_vocab()
    return Compressor(name, tokenizer, _context_length(model), has_target_tokens=same)


def _load(load: Callable[..., _Loaded], model: ModelConfig) -> _Loaded:
    return load(locate(model.path), model.revision, trust_remote_code=model.trust_remote_code)


def _endpoint(name: str, endpoint: EndpointConfig, decode: Callable[[list[int]], str], *, colocated: bool) -> Endpoint:
    key, ngram = f"endpoints.{name}.stopping", endpoint.ngram
    return Endpoint(
        name,
        endpoint.target,
        endpoint.drafter,
        endpoint.draft_length,
        decode,
        ngram=None if ngram is None else NgramOptions(ngram.max_tokens),
        corpus=endpoint.corpus is not None,
        heads=None if endpoint.heads is None else endpoint.heads.kind,
        members=endpoint.others if endpoint.strategy is None else (),
        ensemble=endpoint.ensemble_options(),
        colocated=colocated,
        criteria=tuple(load_callable(path, key=key) for path in endpoint.stopping),
    )


def _tokenizer(name: str, model: ModelConfig) -> PreTrainedTokenizerBase:
    try:
        return _load(load_tokenizer, model)
    except ConfigError as error:
        raise ConfigError(f"models.{name}.path: {error}") from error


def _turn_decoder(tokenizer: PreTrainedTokenizerBase, size: int) -> TextDecoder | None:
    """Function from ids to text with the special tokens that the response template looks for; None: there are none."""
    template = response_template(tokenizer)
    kept = frozenset() if template is None else kept_tokens(template, tokenizer)
    return text_decoder(tokenizer, size, hidden=set(tokenizer.all_special_ids) - kept) if kept else None


def _vocab_size(model: ModelConfig) -> int:
    return vocabulary_size(_load(read_header, model))


def _context_length(model: ModelConfig) -> int:
    return context_length(_load(read_header, model), model.max_length)


def _eos_token_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """EOS ids of the generation configuration and of the tokenizer that are tokens of the model."""
    named = {int(eos) for eos in (*_load(load_end_tokens, model), tokenizer.eos_token_id) if eos is not None}
    vocab_size = _vocab_size(model)
    if unknown := sorted(end for end in named if not 0 <= end < vocab_size):
        _logger.warning(
            "%s names end tokens that the model, of %d tokens, can't write: %s", model.path, vocab_size, unknown
        )
    return tuple(sorted(named.difference(unknown)))


def _vocabulary(name: str, config: ServerConfig) -> Vocabulary:
    tokenizer = _tokenizer(name, config.models[name])
    return vocabulary_of(tokenizer, len(tokenizer))
