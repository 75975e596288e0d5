"""Turns HTTP bodies into requests, with an endpoint's tokenizers, limits and defaults. Loads nothing."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial

from actors.coordinator.request import Endpoint, Request, new_request_id
from actors.wire.messages import Adapter
from decoding.beams.options import BeamOptions
from decoding.blending.params import EnsembleOptions
from decoding.drafts.draft import ProposerName
from decoding.errors import ContextLengthError, InvalidRequestError, UnknownModelError
from decoding.sampling.noise_keys import choice_seed
from decoding.sampling.params import SamplingParams
from decoding.tokenizers.vocabulary import Compatibility
from deployments.apis.chat.request import ChatRequest
from deployments.apis.completions.request import CompletionRequest
from deployments.apis.decoder import TokenDecoder
from deployments.apis.messages.request import CountTokensRequest, TokenCount
from deployments.configuration.endpoint import EndpointConfig
from deployments.endpoints.bounds import Bounds, StructureChecker, check_feasible
from deployments.endpoints.compressor import Compressor
from deployments.endpoints.encoder import Encoder
from deployments.endpoints.formulas import Formula, FormulaReader
from deployments.fields.generation import ConversationRequest, GenerationRequest
from deployments.fields.prompts import Detokenization, DetokenizeRequest, Tokenization, TokenizeRequest
from deployments.fields.sampling import SamplingFields
from deployments.fields.strict import nearest
from deployments.strategies.strategy import StrategyOptions


@dataclass(frozen=True, slots=True, eq=False)
class ServedEndpoint:
    """An endpoint with what is needed to prepare requests and to describe their tokens."""

    endpoint: Endpoint
    config: EndpointConfig
    encoder: Encoder  # used by the tokenizing thread only
    token_decoder: TokenDecoder  # used by the threads that write answers
    bounds: Bounds
    eos_token_ids: tuple[int, ...]
    defaults: SamplingFields
    structures: StructureChecker
    strategy: StrategyOptions | None = None  # what becomes of whole answers of the members; None: there are none
    panel: Mapping[str, "ServedEndpoint"] = field(default_factory=dict)  # members from whose answers the target writes
    through_text: Mapping[str, Compatibility] = field(default_factory=dict)  # by model with other tokens
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

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together."""
        return self.bounds.context_length

    def may_resume(self, body: GenerationRequest) -> bool:
        """Whether the answer is a stream whose text depends on the request and its seed alone, event by event."""
        verification = body.verification or self.config.verification
        is_stream = body.stream and isinstance(body, CompletionRequest | ChatRequest)
        return bool(is_stream) and self.strategy is None and verification == "coupled"

    def token_reports(self) -> dict[str, str]:
        """How tokens fit the target's, in words, by model; models with the target's tokens are left out."""
        return {model: str(compatibility) for model, compatibility in self.through_text.items()}

    def is_ready(self, up: Collection[str]) -> bool:
        """Whether enough members can answer. up: models with a live replica, or that get one when requests wait."""
        present = [name in up for name in self.config.models]
        leads = self.endpoint.target in up or (self.strategy is not None and not self.panel)
        return leads and self.endpoint.ensemble.has_quorum(present)

    def prepare(self, body: GenerationRequest, *, seed: int, cache_salt: str = "") -> list[Request]:
        """For each prompt of the body, one request per choice. A beam search repeats the same request instead.

        Raises InvalidRequestError for what the model, its chat template or the configuration can't serve.

        cache_salt: cached text is shared only with requests of the same salt.
        """
        prompts = self.prompts(body)
        shortened = body.compressed and body.compressed.prompts
        kept = [prompt.positions for prompt in shortened] if shortened else [None] * len(prompts)
        whole_lengths = [len(prompt) if p is None else p.length for prompt, p in zip(prompts, kept, strict=True)]
        formulas = [self._formula(body, prompt) for prompt in prompts]
        own = [(length, body.prompt_field) for length in whole_lengths]
        longest = [
            length if formula is None else formula.longest_prompt(*length)
            for length, formula in zip(own, formulas, strict=True)
        ]
        limits = self.bounds.answer_tokens(body, [len(prompt) for prompt in prompts], longest)
        bad_words_ids = self.encoder.words(body.with_defaults(self.defaults).bad_words or ())
        sampling = cache(partial(self._sampling, body, bad_words_ids, seed))  # checking many token ids takes long
        requests = [
            replace(
                self._request(prompt, body, sampling(limit), formula), cache_salt=cache_salt, prompt_positions=positions
            )
            for prompt, limit, positions, formula in zip(prompts, limits, kept, formulas, strict=True)
        ]
        if body.searches:
            return [request for request in requests for _ in range(body.choices)]
        return [_choice(request, index) for request in requests for index in range(body.choices)]

    def member_request(self, body: GenerationRequest, index: int, *, seed: int, max_tokens: int) -> Request:
        """Return the request for the body's prompt of that index, with at most so many tokens to answer with.

        Raises InvalidRequestError as `prepare` does.
        """
        prompt = self.prompts(body)[index]
        room = self.context_length - len(prompt)
        if room < 1:
            reason = f"has {len(prompt)} tokens, but should have 1 to {self.context_length - 1} for {self.name!r}."
            raise ContextLengthError(f"{body.prompt_field}: {reason}", field=body.prompt_field)
        bad_words_ids = self.encoder.words(body.with_defaults(self.defaults).bad_words or ())
        params = self._sampling(body, bad_words_ids, seed, min(max_tokens, room))
        return self._request(prompt, body, replace(params, logprobs=None))

    def prompts(self, body: GenerationRequest) -> list[list[int]]:
        """Token ids of the body's prompts; raises InvalidRequestError as `prepare` does."""
        if body.compressed and body.compressed.prompts:
            return [prompt.tokens for prompt in body.compressed.prompts]
        match body:
            case CompletionRequest():
                return [self.encoder.prompt(prompt) for prompt in body.prompt]
            case ConversationRequest():
                return [self.encoder.conversation(body.to_conversation())]
            case _:
                raise TypeError(f"a {type(body).__name__} has no prompt")

    def ignored_fields(self, body: GenerationRequest) -> list[str]:
        """Fields without effect because the chat template has no such switch; an error if the request is strict."""
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
        return TokenCount(input_tokens=len(self.encoder.conversation(body.to_conversation())))

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

    def _formula(self, body: GenerationRequest, prompt: list[int]) -> Formula | None:
        """Return the formula of a request for one prompt; None: it has none. Raises InvalidRequestError."""
        fields = body.wanted_formula(self.config.formula)
        if fields is None:
            return None
        field = body.formula_field
        for holds, reason in (
            (self.strategy is None, f"the model {self.name!r} chooses among whole answers"),
            (self.config.kind in ("plain", "speculative"), f"the model {self.name!r} blends its members"),
            (body.compressed is None, "has no place beside prompt_compression"),
        ):
            if not holds:
                raise InvalidRequestError(f"{field}: {reason}.", field=field)
        return FormulaReader(self.encoder, self.name, self.config.models, self.context_length).read(
            fields, body, prompt
        )

    def _request(
        self, prompt: list[int], body: GenerationRequest, params: SamplingParams, formula: Formula | None = None
    ) -> Request:
        decode = None if isinstance(body, CompletionRequest) else self.decode_turn
        return Request(
            self.endpoint if decode is None else replace(self.endpoint, decode=decode),
            prompt,
            params,
            speculate=body.speculate is not False,
            draft_length=body.draft_length,
            proposers=self._proposers(body),
            prediction=self._prediction(body),
            seeded=body.seed is not None,
            streamed=bool(body.stream),
            ensemble=self._ensemble(body, formula),
            terms=formula.terms if formula else None if self.config.formula is None else (),
            timeout_s=self.config.timeout_s if body.timeout_s is None else body.timeout_s,
            may_cache=body.compressed is None,
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

    def _prediction(self, body: GenerationRequest) -> list[int]:
        """Return the tokens of the answer that the client expects, as many as the context has room for."""
        if not isinstance(body, ChatRequest) or body.prediction is None:
            return []
        return self.encoder.text(body.prediction.text, "prediction.content", add_special_tokens=False)

    def _ensemble(self, body: GenerationRequest, formula: Formula | None) -> EnsembleOptions | None:
        """Ensemble options of the request; None: the endpoint's."""
        has_members = self.config.kind in ("ensemble", "contrastive")
        blends = (has_members and self.strategy is None) or formula is not None
        count = len(self.config.models) if has_members else 0
        options = self.endpoint.ensemble if formula is None else replace(self.endpoint.ensemble, blend=formula.blend)
        changed = body.override_ensemble(options, model=self.name, count=count, blends=self.strategy is None)
        if blends and body.return_token_details and body.return_members is not False:
            return replace(changed or options, report_contributions=True)
        return changed if formula is None else changed or options

    def _beams(self, body: GenerationRequest, params: SamplingParams) -> BeamOptions:
        words = self.encoder.force_words(body.force_words or ())
        options = body.beams(choices=body.choices, best_of=body.best_of, force_words_ids=words)
        options.check(max_tokens=params.max_tokens, end_token_ids=params.end_token_ids)
        if self.endpoint.members:
            raise InvalidRequestError("use_beam_search: ensembles don't search.", field="use_beam_search")
        return options


def _choice(request: Request, index: int) -> Request:
    """Request for the index-th answer to a prompt, with a seed of its own."""
    params = request.params.with_seed(choice_seed(request.params.seed, index))
    return replace(request, params=params, request_id=new_request_id())


def find_endpoint(name: str, endpoints: Mapping[str, ServedEndpoint]) -> ServedEndpoint:
    """Return the endpoint of that name; raises UnknownModelError if there is none."""
    if name not in endpoints:
        raise UnknownModelError(f"model: there is no model {name!r}; {nearest(name, endpoints)}", field="model")
    return endpoints[name]
