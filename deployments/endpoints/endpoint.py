"""An endpoint's tokenizers, limits and defaults, which turn HTTP bodies into requests. Loads no weights."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from actors.coordinator.request import Endpoint, Request, new_request_id
from actors.loading.checkpoint import load_sampling_defaults, load_tokenizer
from actors.loading.draft_vocabulary import is_trimmed, vocabulary_size
from actors.loading.gguf import settings_folder
from actors.loading.lora import read_lora
from actors.loading.supported import context_length
from actors.loading.tokenizer_pairs import vocabulary_of
from actors.wire.messages import Adapter
from decoding.beams.options import BeamOptions
from decoding.blending.ensemble_options import EnsembleOptions
from decoding.drafts.ngram import NgramOptions
from decoding.drafts.trie import ProposerName
from decoding.errors import ConfigError, ContextLengthError, InvalidRequestError
from decoding.prompt_positions import PromptPositions
from decoding.sampling.noise import choice_seed
from decoding.sampling.params import SamplingParams
from decoding.tokenizers.alignment import Compatibility
from decoding.tokenizers.vocabulary import Vocabulary
from deployments.compression.compressor import Compressor
from deployments.configuration.config import ServerConfig
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.entry_point import load_callable
from deployments.configuration.model import ModelConfig, locate
from deployments.endpoints.encoder import Encoder
from deployments.endpoints.feasibility import check_feasible
from deployments.endpoints.logprob_budget import LogprobBudget
from deployments.endpoints.structure_checker import StructureChecker
from deployments.endpoints.tokenizer_compatibility import check_drafter, check_members
from deployments.requests.anthropic.messages_request import (
    AnthropicConversation,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from deployments.requests.responses.responses_request import ResponsesRequest
from deployments.requests.sampling_fields import SamplingFields
from deployments.requests.schema import ChatRequest, CompletionRequest, GenerationRequest
from deployments.requests.token_requests import Detokenization, DetokenizeRequest, Tokenization, TokenizeRequest
from deployments.strategies.loading import load_strategy
from deployments.strategies.options import StrategyOptions
from deployments.tokenizers.response_templates import kept_tokens, response_template
from deployments.tokenizers.token_decoder import TokenDecoder, uses_backend


@dataclass(frozen=True, slots=True, eq=False)
class ServedEndpoint:
    """An endpoint with what is needed to prepare requests and to describe their tokens."""

    endpoint: Endpoint
    config: EndpointConfig
    encoder: Encoder  # used by the tokenizing thread only
    token_decoder: TokenDecoder  # used by the threads that write answers
    context_length: int  # tokens, prompt and answer together
    eos_token_ids: tuple[int, ...]
    defaults: SamplingFields
    structures: StructureChecker
    strategy: StrategyOptions | None = None  # chooses among whole answers of the members; None: no choice
    through_text: Mapping[str, Compatibility] = field(default_factory=dict)  # by model with other tokens
    budget: LogprobBudget = field(default_factory=LogprobBudget)
    decode_turn: Callable[[list[int]], str] | None = None  # of the assistant, with the special tokens that delimit it
    compressor: Compressor | None = None  # None: prompts can't be compressed
    parent: str | None = None  # of an adapter: the endpoint that it belongs to
    max_adapters: int = 0  # that may belong to it, if some may be loaded at run time

    def with_adapter(self, adapter: Adapter) -> "ServedEndpoint":
        """Return the endpoint by which an adapter's requests are served: as this one's, with other weights."""
        endpoint = replace(self.endpoint, name=adapter.name, adapter=adapter)
        return replace(self, endpoint=endpoint, parent=self.name, max_adapters=0)

    @property
    def requests_per_answer(self) -> int:
        """Most requests to models that run at once for one answer."""
        return 1 if self.strategy is None else self.strategy.candidates * len(self.config.models)

    @property
    def name(self) -> str:
        return self.endpoint.name

    def token_reports(self) -> dict[str, str]:
        """How tokens fit the target's, in words, by model; models with the target's tokens are left out."""
        return {model: str(compatibility) for model, compatibility in self.through_text.items()}

    def is_ready(self, up: Collection[str]) -> bool:
        """Whether enough members are up to answer. up: models with a live replica."""
        present = [name in up for name in self.config.models]
        leads = present[0] or self.strategy is not None
        return leads and self.endpoint.ensemble.has_quorum(present)

    def prepare(self, body: GenerationRequest, *, seed: int, cache_salt: str = "") -> list[Request]:
        """For each prompt of the body, one request per choice. A beam search repeats the same request instead.

        cache_salt: cached text is shared only with requests of the same salt.

        Raises:
            InvalidRequestError: a prompt is empty, too long or has an unknown token id; a parameter is out of
                range or leaves no token; the chat template refuses the conversation.
        """
        prompts = self.prompts(body)
        shortened = body.shortened_prompts
        positions: list[PromptPositions | None] = [None] * len(prompts)
        if shortened is not None:
            positions = [prompt.positions for prompt in shortened]
        bad_words_ids = self.encoder.words(body.with_defaults(self.defaults).bad_words or ())
        most = self.budget.answer_tokens(body, prompts)
        sampling = cache(partial(self._sampling, body, bad_words_ids, seed))  # checking many token ids takes long
        requests = [
            replace(
                self._request(
                    prompt, body, sampling(self._max_tokens(kept.length if kept else len(prompt), body, most))
                ),
                cache_salt=cache_salt,
                prompt_positions=kept,
            )
            for prompt, kept in zip(prompts, positions, strict=True)
        ]
        if body.searches:
            return [request for request in requests for _ in range(body.choices)]
        return [_choice(request, index) for request in requests for index in range(body.choices)]

    def prompts(self, body: GenerationRequest) -> list[list[int]]:
        """Token ids of the body's prompts; raises InvalidRequestError as `prepare` does."""
        if body.shortened_prompts is not None:
            return [prompt.tokens for prompt in body.shortened_prompts]
        match body:
            case CompletionRequest():
                return [self.encoder.prompt(prompt) for prompt in body.prompt]
            case ChatRequest():
                return [self.encoder.text(self.chat_text(body), "messages", add_special_tokens=False)]
            case ResponsesRequest():
                return [self.encoder.conversation(body.messages, body.switches, tools=body.offered_tools)]
            case MessagesRequest():
                return [self._anthropic_prompt(body)]
            case _:
                raise TypeError(f"a {type(body).__name__} has no prompt")

    def chat_text(self, body: ChatRequest) -> str:
        """Text of a chat's prompt; raises InvalidRequestError if the chat template refuses it."""
        return self.encoder.conversation_text(
            body.messages,
            {**body.switches, **(body.chat_template_kwargs or {})},
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.offered_tools,
        )

    def ignored_fields(self, body: GenerationRequest) -> list[str]:
        """Fields without effect because the chat template has no such switch.

        Raises:
            InvalidRequestError: there are some, and the request is strict.
        """
        switches = body.switches
        thinks = any(switches.values()) or self.token_decoder.has_think_tags
        if not (switches and thinks) or self.encoder.has_switch(switches):
            return []
        if body.strict:
            reason = f"{body.switch_field}: the chat template of {self.name!r} has no switch for it."
            raise InvalidRequestError(reason, field=body.switch_field)
        return [body.switch_field]

    def tokenize(self, body: TokenizeRequest) -> Tokenization:
        """Answer /tokenize; raises InvalidRequestError if the input can't be tokenized."""
        tokens = self.encoder.tokenize(body)
        texts = [self.token_decoder.text_of(token) for token in tokens] if body.return_token_strs else None
        return Tokenization(count=len(tokens), max_model_len=self.context_length, tokens=tokens, token_strs=texts)

    def count_tokens(self, body: CountTokensRequest) -> TokenCount:
        """Answer /v1/messages/count_tokens; raises InvalidRequestError if the chat template refuses it."""
        return TokenCount(input_tokens=len(self._anthropic_prompt(body)))

    def _anthropic_prompt(self, body: AnthropicConversation) -> list[int]:
        return self.encoder.conversation(
            body.chat_messages,
            body.switches,
            add_generation_prompt=not body.continues,
            continue_final_message=body.continues,
            tools=body.offered_tools,
        )

    def detokenize(self, body: DetokenizeRequest) -> Detokenization:
        """Answer /detokenize; raises InvalidRequestError for an unknown token id."""
        self.encoder.check_tokens([("tokens", body.tokens)])
        return Detokenization(prompt=self.token_decoder.decode_with_special(body.tokens))

    def _sampling(
        self, body: GenerationRequest, bad_words_ids: list[tuple[int, ...]], seed: int, max_tokens: int
    ) -> SamplingParams:
        """Checked parameters that all choices of a prompt share."""
        params = body.sampling(
            max_tokens=max_tokens,
            eos_token_ids=self.eos_token_ids,
            seed=seed,
            defaults=self.defaults,
            bad_words_ids=bad_words_ids,
            verification=self.config.verification,
        )
        self.encoder.check_tokens(params.named_tokens())
        check_feasible(params, self.token_decoder.size)
        return params

    def _request(self, prompt: list[int], body: GenerationRequest, params: SamplingParams) -> Request:
        completes = isinstance(body, CompletionRequest)
        return Request(
            self.endpoint if completes else replace(self.endpoint, decode=self.decode_turn or self.endpoint.decode),
            prompt,
            params,
            speculate=body.speculate is not False,
            draft_length=body.draft_length,
            proposers=self._proposers(body),
            seeded=body.seed is not None,
            ensemble=self._ensemble(body),
            timeout_s=self.config.timeout_s if body.timeout_s is None else body.timeout_s,
            may_cache=body.original_prompt_tokens is None,
            beams=self._beams(body, params) if body.searches else None,
        )

    def _proposers(self, body: GenerationRequest) -> frozenset[ProposerName] | None:
        """Return what may draft for the request; None: all that the endpoint has."""
        if body.proposers is None:
            return None
        known = self.endpoint.proposers
        for index, name in enumerate(body.proposers):
            if name not in known:
                offered = ", ".join(known) or "none"
                raise InvalidRequestError(
                    f"proposers.{index}: {name!r} does not draft for {self.name!r}; it has {offered}.",
                    field="proposers",
                )
        return frozenset(body.proposers)

    def _ensemble(self, body: GenerationRequest) -> EnsembleOptions | None:
        """Ensemble options of the request; None: the endpoint's."""
        has_members = self.config.kind in ("ensemble", "contrastive")
        blends = has_members and self.strategy is None
        count = len(self.config.models) if has_members else 0
        changed = body.override_ensemble(
            self.endpoint.ensemble, model=self.name, count=count, blends=self.strategy is None
        )
        if blends and body.return_token_details and body.return_members is not False:
            return replace(changed or self.endpoint.ensemble, report_contributions=True)
        return changed

    def _beams(self, body: GenerationRequest, params: SamplingParams) -> BeamOptions:
        words = self.encoder.force_words(body.force_words or ())
        options = body.beams(choices=body.choices, best_of=body.best_of, force_words_ids=words)
        options.check(max_tokens=params.max_tokens, end_token_ids=params.end_token_ids)
        if self.endpoint.members:
            raise InvalidRequestError("use_beam_search: ensembles don't search.", field="use_beam_search")
        return options

    def _max_tokens(self, length: int, body: GenerationRequest, most: int | None) -> int:
        """Limit of an answer's tokens: the client's, or the default within the context.

        length: tokens of the whole prompt. most: the logprob budget's.
        """
        field, wanted = body.prompt_field, body.wanted_max_tokens
        room = self.context_length - length
        if not length:
            raise InvalidRequestError(f"{field}: should have at least one token.", field=field)
        if room < 1:
            raise ContextLengthError(
                f"{field}: has {length} tokens, but should have 1 to {self.context_length - 1}.", field=field
            )
        if wanted is None:
            return min(body.default_max_tokens or room, room, most or room)
        if body.limit_is_upper_bound:
            return min(wanted, room, most or room)
        if wanted > room:
            raise ContextLengthError(
                f"{field} and max_tokens: {length} + {wanted} tokens don't fit into the context of "
                f"{self.context_length}; set max_tokens to {room} or less, or shorten {field}.",
                field="max_tokens",
            )
        return 1 if body.prompt_only else wanted  # a prompt's log-probabilities come with the first token


def _choice(request: Request, index: int) -> Request:
    """Request for the index-th answer to a prompt, with a seed of its own."""
    params = request.params.with_seed(choice_seed(request.params.seed, index))
    return replace(request, params=params, request_id=new_request_id())


def load_endpoints(config: ServerConfig) -> dict[str, ServedEndpoint]:
    """Load the tokenizers and defaults of every endpoint, by name, the adapters of their targets among them.

    Raises:
        ConfigError: a tokenizer, a stopping criterion or an adapter can't be loaded, a drafter can't draft for its
            target, or a member can't join its leader.
    """
    served = {name: _load_endpoint(name, endpoint, config) for name, endpoint in config.endpoints.items()}
    adapters = [served[name].with_adapter(adapter) for name in config.endpoints for adapter in _adapters(name, config)]
    return served | {adapted.name: adapted for adapted in adapters}


def _adapters(endpoint: str, config: ServerConfig) -> Iterator[Adapter]:
    """Yield the adapters that belong to an endpoint."""
    for name, path in config.adapters_of(endpoint).items():
        located = locate(path)
        try:
            yield Adapter(name, located, read_lora(located).version)
        except ConfigError as error:
            raise ConfigError(f"models.{config.endpoints[endpoint].target}.adapters.{name}: {error}") from error


def _load_endpoint(name: str, endpoint: EndpointConfig, config: ServerConfig) -> ServedEndpoint:
    target = config.models[endpoint.target]
    for model in (endpoint.target, *endpoint.others):
        if is_trimmed(_header(config.models[model])):
            raise ConfigError(
                f"endpoints.{name}: {model!r} has a trimmed vocabulary, so it can only draft; give it as the drafter"
            )
    tokenizer = _tokenizer(endpoint.target, target)
    vocab_size, eos_token_ids = _vocab_size(target), _eos_token_ids(target, tokenizer)
    others = {model: _vocabulary(model, config) for model in endpoint.others}
    through_text = check_members(name, endpoint, _vocabulary(endpoint.target, config), others)
    same_tokens = [model for model in endpoint.others if model not in through_text]
    if endpoint.drafter is not None:
        drafter = config.models[endpoint.drafter]
        other = _tokenizer(endpoint.drafter, drafter), _vocab_size(drafter)
        compatibility = check_drafter(name, endpoint, (tokenizer, vocab_size), other)
        if compatibility is None:
            same_tokens.append(endpoint.drafter)
        else:
            through_text[endpoint.drafter] = compatibility
    vocab_size = min([vocab_size, *(_vocab_size(config.models[model]) for model in same_tokens)])
    length = min(_context_length(config.models[model]) for model in (endpoint.target, *endpoint.others))
    colocated = endpoint.drafter in config.colocated_drafter_of(endpoint.target)
    return ServedEndpoint(
        _endpoint(name, endpoint, _text_decoder(tokenizer), colocated=colocated),
        endpoint,
        Encoder(tokenizer, model=name, vocab_size=vocab_size, context_length=length),
        TokenDecoder(tokenizer, vocab_size),
        length,
        eos_token_ids,
        endpoint.defaults.with_defaults(_recommended(target)) if endpoint.generation_config else endpoint.defaults,
        StructureChecker(copy.deepcopy(tokenizer), eos_token_ids),
        None if endpoint.strategy is None else load_strategy(endpoint.strategy, key=f"endpoints.{name}.strategy"),
        through_text,
        LogprobBudget(config.http.max_logprobs, config.http.max_logprobs_per_request),
        _turn_decoder(tokenizer),
        None if endpoint.compressor is None else _load_compressor(endpoint.compressor, config, tokenizer),
        max_adapters=config.max_adapters_of(name),
    )


def _load_compressor(name: str, config: ServerConfig, target: PreTrainedTokenizerBase) -> Compressor:
    model = config.models[name]
    tokenizer = _tokenizer(name, model)
    same = tokenizer.get_vocab() == target.get_vocab()
    return Compressor(name, tokenizer, _context_length(model), has_target_tokens=same)


def _recommended(model: ModelConfig) -> SamplingFields:
    """Sampling defaults of the checkpoint's generation configuration."""
    given = load_sampling_defaults(locate(model.path), model.revision).given()
    fields: dict[str, Any] = {name: value for name, value in given.items() if name in SamplingFields.model_fields}
    return SamplingFields.model_construct(**fields)


def _endpoint(name: str, endpoint: EndpointConfig, decode: Callable[[list[int]], str], *, colocated: bool) -> Endpoint:
    key, ngram = f"endpoints.{name}.stopping", endpoint.ngram
    return Endpoint(
        name,
        endpoint.target,
        endpoint.drafter,
        endpoint.draft_length,
        decode,
        ngram=None if ngram is None else NgramOptions(longest=ngram.max_tokens, shared=ngram.shared),
        heads=None if endpoint.heads is None else endpoint.heads.kind,
        members=endpoint.others if endpoint.strategy is None else (),
        ensemble=endpoint.ensemble_options(),
        colocated=colocated,
        criteria=tuple(load_callable(path, key=key) for path in endpoint.stopping),
    )


def _tokenizer(name: str, model: ModelConfig) -> PreTrainedTokenizerBase:
    try:
        return load_tokenizer(locate(model.path), model.revision, trust_remote_code=model.trust_remote_code)
    except ConfigError as error:
        raise ConfigError(f"models.{name}.path: {error}") from error


def _text_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Function from ids to text, with a copy of the tokenizer: encoding runs in another thread."""
    copied = copy.deepcopy(tokenizer)
    if uses_backend(copied):  # half the time for the same text
        return partial(copied.backend_tokenizer.decode, skip_special_tokens=True)
    return lambda ids: str(copied.decode(ids, skip_special_tokens=True))


def _turn_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str] | None:
    """Function from ids to text with the special tokens that the response template looks for; None: there are none."""
    template = response_template(tokenizer)
    kept = frozenset() if template is None else kept_tokens(template, tokenizer)
    if not kept:
        return None
    copied, hidden = copy.deepcopy(tokenizer), set(tokenizer.all_special_ids) - kept
    return lambda ids: str(copied.decode([token for token in ids if token not in hidden], skip_special_tokens=False))


def _vocab_size(model: ModelConfig) -> int:
    return vocabulary_size(_header(model))


def _context_length(model: ModelConfig) -> int:
    return model.max_length or context_length(_header(model), None)


def _header(model: ModelConfig) -> PretrainedConfig:
    path, trusted = settings_folder(locate(model.path)), model.trust_remote_code
    header: PretrainedConfig = AutoConfig.from_pretrained(path, revision=model.revision, trust_remote_code=trusted)
    return header


def _eos_token_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """EOS ids of the generation configuration and of the tokenizer."""
    try:
        revision = model.revision or "main"
        configured = GenerationConfig.from_pretrained(
            settings_folder(locate(model.path)), revision=revision
        ).eos_token_id
    except OSError:  # many checkpoints have none
        configured = None
    ids = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({int(eos) for eos in (*ids, tokenizer.eos_token_id) if eos is not None}))


def _vocabulary(name: str, config: ServerConfig) -> Vocabulary:
    tokenizer = _tokenizer(name, config.models[name])
    return vocabulary_of(tokenizer, len(tokenizer))
