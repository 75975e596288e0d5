"""Encodes texts, conversations and words as token ids, at bounded cost."""

import inspect
from collections.abc import Iterable, Sequence
from itertools import chain, count
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.errors import ContextLengthError, InvalidRequestError
from deployments.endpoints.chat_template import REFUSALS, tools_of
from deployments.fields.conversation import Conversation, Document
from deployments.fields.prompts import TokenizeRequest
from deployments.fields.strict import have_more_values
from deployments.fields.types import Prompt

_MOST_ARGUMENT_VALUES = 100_000  # JSON values in all tool calls of a conversation, which are parsed for the template
_PREFIX_CHARACTERS = 8  # per token of the context; most texts have fewer
_PREFIX_MARGIN = 64  # tokens by which a longer text may merge its prefix
_TEMPLATE_OPTIONS = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


class Encoder:
    """Encoder with a target's tokenizer. Not thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, model: str, vocab_size: int, context_length: int) -> None:
        """model: the endpoint's name, for messages. context_length: in tokens."""
        self.tokenizer = tokenizer
        self._model = model
        self._vocab_size = vocab_size
        self._most_characters = context_length * max(map(len, tokenizer.get_vocab()))
        self._context_length = context_length
        self.tools = tools_of(tokenizer)
        self._added = frozenset(tokenizer.get_added_vocab().values())

    def has_switch(self, variables: Iterable[str]) -> bool:
        """Whether the chat template looks at any of the variables."""
        template = str(self.tokenizer.chat_template or "")
        return any(name in template for name in variables)

    def prompt(self, prompt: Prompt, field: str = "prompt") -> list[int]:
        """Token ids of a text with special tokens; ids stay as they are. Raises as `text` and `check_tokens` do."""
        if isinstance(prompt, str):
            return self.text(prompt, field, add_special_tokens=True)
        self.check_tokens([(field, prompt)])
        return prompt

    def conversation(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation; raises as `render` and `text` do."""
        text = self.render(conversation)
        tokens = self._as_written(text, conversation.written) if conversation.written else None
        return self.text(text, "messages", add_special_tokens=False) if tokens is None else tokens

    def _as_written(self, text: str, written: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[int] | None:
        """Token ids of a text in which earlier answers have the tokens that were sampled; None: they would change it.

        A sampled text may be tokenized otherwise than it was written, and then its KV pages are not found. An answer
        is looked for behind the added token that its prompt ended with, at which texts can be cut without other tokens.
        """
        self._check_length(text, "messages")
        tokens: list[int] = []
        position = 0
        for lead, answer in written:
            own = self._delimited(lead, answer)
            piece = self._decode(own)
            index = text.find(piece, position) if piece else -1
            if index >= 0:
                tokens += [*self._ids(text[position:index], add_special_tokens=False), *own]
                position = index + len(piece)
        tokens += self._ids(text[position:], add_special_tokens=False)
        return tokens if self._decode(tokens) == text else None

    def _delimited(self, lead: Sequence[int], answer: Sequence[int]) -> list[int]:
        """An answer with the added token before it, without those that ended it; []: it can't be told where it is."""
        start = next((index for index in reversed(range(len(lead))) if lead[index] in self._added), None)
        own = [] if start is None else [*lead[start:], *answer]
        while own and own[-1] in self._added:
            own.pop()
        return own if own and max(own) < self._vocab_size else []

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def render(self, conversation: Conversation) -> str:
        """Text of a conversation by the chat template; raises InvalidRequestError if that has no place for it."""
        if not self.tokenizer.chat_template:
            raise InvalidRequestError(f"messages: the model {self._model!r} has no chat template.", field="messages")
        reserved = sorted(conversation.variables.keys() & _TEMPLATE_OPTIONS)
        if reserved:
            reason = f"chat_template_kwargs: {reserved[0]!r} is no variable of chat templates."
            raise InvalidRequestError(reason, field="chat_template_kwargs")
        tools = [tool.model_dump(exclude_none=True) for tool in conversation.tools]
        if tools and self.tools is None:
            raise InvalidRequestError(
                f"tools: the chat template of {self._model!r} has no place for them; leave them out.", field="tools"
            )
        calls = [call for message in conversation.messages for call in message.tool_calls or ()]
        if have_more_values([call.function.arguments.encode() for call in calls], _MOST_ARGUMENT_VALUES):
            reason = f"messages: the arguments of their tool_calls have more than {_MOST_ARGUMENT_VALUES} values."
            raise InvalidRequestError(reason, field="messages")
        options: dict[str, Any] = {
            **conversation.variables,
            "conversation": [message.turn for message in conversation.messages],
            "add_generation_prompt": conversation.add_generation_prompt,
            "continue_final_message": conversation.continue_final_message,
            "tools": tools or None,
        }
        if conversation.documents and self.has_switch(["documents"]):
            options["documents"] = [document.model_dump(exclude_none=True) for document in conversation.documents]
        elif conversation.documents:
            options["conversation"] = _with_documents(options["conversation"], conversation.documents)
        try:
            return str(self.tokenizer.apply_chat_template(tokenize=False, **options))
        except REFUSALS as error:
            reason = f"messages: the model's chat template refuses them: {error}"
            raise InvalidRequestError(reason, field="messages") from error

    def text(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; raises InvalidRequestError if it is far too long or no valid Unicode."""
        self._check_length(text, field)
        try:
            text.encode()  # a chat template can make lone surrogates of a call's arguments
        except UnicodeEncodeError as error:
            reason = f"{field}: should be valid Unicode, without lone surrogates."
            raise InvalidRequestError(reason, field=field) from error
        return self._ids(text, add_special_tokens=add_special_tokens)

    def _check_length(self, text: str, field: str) -> None:
        """Refuse what can't fit into the context, by its length or its beginning, so that tokenizing costs little."""
        begin = text[: self._context_length * _PREFIX_CHARACTERS]
        most = self._context_length + _PREFIX_MARGIN
        if len(text) > self._most_characters or (
            len(text) > len(begin) and len(self._ids(begin, add_special_tokens=False)) > most
        ):
            reason = f"{field}: {len(text)} characters are more than {self._context_length} tokens can hold."
            raise ContextLengthError(reason, field=field)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    def words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Token ids of each bad word at the beginning of a text and after a space, as vLLM defines `bad_words`.

        The spelling after a space counts only if it differs in the first token alone.
        """
        spellings = []
        for bare, spaced in self._spellings(words, "bad_words"):
            spellings.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                spellings.append(spaced)
        return spellings

    def force_words(self, words: Sequence[Sequence[str]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Spellings of all alternatives of each forced word, with and without a space before."""
        return tuple(tuple(dict.fromkeys(chain(*self._spellings(group, "force_words")))) for group in words)

    def _spellings(self, words: Sequence[str], field: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Token ids of each word at a text's beginning and after a space. One tokenizer call for all is much faster."""
        if not words:
            return []
        texts = [space + word.lstrip(" ") for word in words for space in ("", " ")]
        self._check_length(max(texts, key=len), field)
        ids = [tuple(spelling) for spelling in self.tokenizer(texts, add_special_tokens=False, verbose=False).input_ids]
        spellings = list(zip(ids[::2], ids[1::2], strict=True))
        empty = next((word for word, (bare, _) in zip(words, spellings, strict=True) if not bare), None)
        if empty is not None:
            raise InvalidRequestError(f"{field}: {empty!r} has no tokens.", field=field)
        return spellings

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Token ids for /tokenize; raises as `text` and `conversation` do."""
        if body.messages is None:
            special = body.add_special_tokens is not False
            return self.text(body.prompt or "", "prompt", add_special_tokens=special)
        return self.conversation(body.to_conversation())

    def check_tokens(self, named: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Raise InvalidRequestError for the first id that is not the model's. named: fields and their ids."""
        for field, tokens in named:
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
                unknown = next(token for token in tokens if not 0 <= token < self._vocab_size)
                reason = f"{field}: {unknown} is no token id; the model's are 0 to {self._vocab_size - 1}."
                raise InvalidRequestError(reason, field=field)


def _with_documents(turns: Sequence[dict[str, Any]], documents: Sequence[Document]) -> list[dict[str, Any]]:
    """Return a conversation with the documents before the last text of the user.

    Raises InvalidRequestError if the user has said nothing.
    """
    last = max((index for index, turn in enumerate(turns) if turn["role"] == "user"), default=None)
    if last is None:
        reason = "documents: are read before a message of the user, but there is none; add one"
        raise InvalidRequestError(reason, field="documents")
    titles = [f": {document.title}" if document.title else "" for document in documents]
    texts = zip(count(1), titles, documents)
    shown = "".join([f"Document {number}{title}\n{document.text}\n\n" for number, title, document in texts])
    return [turn | {"content": shown + turn["content"]} if index == last else turn for index, turn in enumerate(turns)]
