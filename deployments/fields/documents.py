"""Documents that an answer should rest on."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from decoding.errors import InvalidRequestError
from deployments.fields.strict import StrictModel, Text


class Document(StrictModel):
    """A text that the answer should rest on."""

    title: Text | None = None
    text: Text


def with_documents(turns: Sequence[dict[str, Any]], documents: Sequence[Document]) -> list[dict[str, Any]]:
    """Return a conversation with the documents before the last text of the user.

    Raises:
        InvalidRequestError: the user has said nothing.
    """
    last = max((index for index, turn in enumerate(turns) if turn["role"] == "user"), default=None)
    if last is None:
        reason = "documents: are read before a message of the user, but there is none; add one"
        raise InvalidRequestError(reason, field="documents")
    titles = [f": {document.title}" if document.title else "" for document in documents]
    texts = zip(count(1), titles, documents)
    shown = "".join([f"Document {number}{title}\n{document.text}\n\n" for number, title, document in texts])
    return [turn | {"content": shown + turn["content"]} if index == last else turn for index, turn in enumerate(turns)]
