"""The text side of an endpoint: tokenizer, chat template, limits. Turns prompts into requests; loads no weights."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import jinja2
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from actors.loading import load_tokenizer
from actors.request import Endpoint, Request
from decoding.errors import ConfigError, InvalidRequestError
from deployments.config import EndpointConfig, ModelConfig, ServerConfig, locate
from deployments.schema import ChatRequest, CompletionRequest, GenerationRequest, Prompt


@dataclass(frozen=True, slots=True, eq=False)
class ServedEndpoint:
    """An endpoint, and what it takes to prepare its requests. Tokenizers are used by one thread at a time."""

    endpoint: Endpoint
    tokenizer: PreTrainedTokenizerBase
    context_length: int  # tokens, prompt and answer together
    vocab_size: int  # prompts hold ids below it
    longest_token: int  # characters
    eos_token_ids: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.endpoint.name

    def prepare(self, body: GenerationRequest, *, seed: int) -> list[Request]:
        """One request for each prompt in the body.

        Raises:
            InvalidRequestError: a prompt is empty, too long or has an unknown token id; a parameter is out of
                range; a conversation doesn't suit the model's chat template.
        """
        match body:
            case CompletionRequest():
                prompts = [self._encode(prompt) for prompt in body.prompt]
            case ChatRequest():
                prompts = [self._encode_chat(body)]
            case _:
                raise TypeError(f"a {type(body).__name__} has no prompt")
        return [self._request(prompt, body, seed) for prompt in prompts]

    def _encode(self, prompt: Prompt) -> list[int]:
        """Token ids: a text as the tokenizer does by default, ids as they are."""
        if isinstance(prompt, str):
            return self._tokenize(prompt, "prompt", add_special_tokens=True)
        wrong = next((token for token in prompt if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"prompt: {wrong} is no token id; the model's are 0 to {self.vocab_size - 1}.", field="prompt"
            )
        return prompt

    def _encode_chat(self, body: ChatRequest) -> list[int]:
        """The conversation up to where the assistant begins to speak."""
        if not self.tokenizer.chat_template:
            raise InvalidRequestError(f"messages: the model {self.name!r} has no chat template.", field="messages")
        plain = [{"role": message.role, "content": message.text} for message in body.messages]
        try:
            text = str(self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True))
        except jinja2.TemplateError as error:
            reason = f"messages: the model's chat template refuses them: {error}"
            raise InvalidRequestError(reason, field="messages") from error
        return self._tokenize(text, "messages", add_special_tokens=False)

    def _tokenize(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > self.context_length * self.longest_token:  # before it takes long to find out
            raise InvalidRequestError(
                f"{field}: {len(text)} characters are more than {self.context_length} tokens can hold.", field=field
            )
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids)

    def _request(self, prompt: list[int], body: GenerationRequest, seed: int) -> Request:
        field, wanted = body.prompt_field, body.wanted_max_tokens
        room = self.context_length - len(prompt)
        if not prompt or room < 1:
            raise InvalidRequestError(
                f"{field}: has {len(prompt)} tokens, but should have 1 to {self.context_length - 1}.", field=field
            )
        if wanted is None:
            wanted = min(body.default_max_tokens or room, room)
        elif wanted > room:
            raise InvalidRequestError(
                f"{field} and max_tokens: {len(prompt)} + {wanted} tokens don't fit into the context of "
                f"{self.context_length}; set max_tokens to {room} or less, or shorten {field}.",
                field="max_tokens",
            )
        params = body.sampling(max_tokens=wanted, eos_token_ids=self.eos_token_ids, seed=seed)
        return Request(self.endpoint, prompt, params, speculate=body.speculate is not False)


def load_endpoints(config: ServerConfig) -> dict[str, ServedEndpoint]:
    """Every endpoint's text side, by name.

    Raises:
        ConfigError: a tokenizer can't be loaded, or a drafter's vocabulary is not its target's.
    """
    return {name: _load_endpoint(name, endpoint, config) for name, endpoint in config.endpoints.items()}


def _load_endpoint(name: str, endpoint: EndpointConfig, config: ServerConfig) -> ServedEndpoint:
    target = config.models[endpoint.target]
    tokenizer = _tokenizer(endpoint.target, target)
    vocab_size = _vocab_size(target)
    if endpoint.drafter is not None:
        drafter = config.models[endpoint.drafter]
        _check_vocabularies(name, endpoint, tokenizer, _tokenizer(endpoint.drafter, drafter))
        vocab_size = min(vocab_size, _vocab_size(drafter))
    return ServedEndpoint(
        Endpoint(name, endpoint.target, endpoint.drafter, endpoint.draft_length, _decoder(tokenizer)),
        tokenizer,
        target.max_length,
        vocab_size,
        max(map(len, tokenizer.get_vocab())),
        _eos_token_ids(target, tokenizer),
    )


def _tokenizer(name: str, model: ModelConfig) -> PreTrainedTokenizerBase:
    try:
        return load_tokenizer(locate(model.path), model.revision)
    except ConfigError as error:
        raise ConfigError(f"models.{name}.path: {error}") from error


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Ids to text, with a tokenizer of its own: texts are encoded and decoded in different threads."""
    own = copy.deepcopy(tokenizer)
    return lambda ids: str(own.decode(ids, skip_special_tokens=True))


def _vocab_size(model: ModelConfig) -> int:
    config = AutoConfig.from_pretrained(locate(model.path), revision=model.revision)
    return int(config.get_text_config().vocab_size)


def _eos_token_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Where answers end: the generation configuration's EOS ids, and the tokenizer's."""
    try:
        revision = model.revision or "main"
        configured = GenerationConfig.from_pretrained(locate(model.path), revision=revision).eos_token_id
    except OSError:  # many checkpoints have none
        configured = None
    ids = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({int(eos) for eos in (*ids, tokenizer.eos_token_id) if eos is not None}))


def _check_vocabularies(
    name: str, endpoint: EndpointConfig, target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase
) -> None:
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    differing = [token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)]
    if differing:
        token = min(differing)
        raise ConfigError(
            f"endpoints.{name}.drafter: {endpoint.drafter!r} has another vocabulary than {endpoint.target!r}: "
            f"{len(differing)} tokens differ, {token!r} is {theirs.get(token)} in the drafter and {ours.get(token)} "
            f"in the target"
        )
