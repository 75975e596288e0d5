"""Documents that an answer should rest on."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from deployments.fields.strict import StrictModel, Text


class Document(StrictModel):
    """A text that the answer should rest on."""

    title: Text | None = None
    text: Text


def with_documents(turns: Sequence[dict[str, Any]], documents: Sequence[Document]) -> list[dict[str, Any]]:
    """Return a conversation with the documents before the last text of the user."""
    last = max((index for index, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    titles = [f": {document.title}" if document.title else "" for document in documents]
    texts = zip(count(1), titles, documents)
    shown = "".join([f"Document {number}{title}\n{document.text}\n\n" for number, title, document in texts])
    return [turn | {"content": shown + turn["content"]} if index == last else turn for index, turn in enumerate(turns)]
