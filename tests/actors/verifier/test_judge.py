"""Verdicts: what they say of models' drafts."""

import pytest

from actors.verifier.judge import _of_models
from decoding.drafts.draft import Draft, Proposers
from decoding.drafts.verification import Verdict

HEAD: Proposers = ("eagle3",)
COPY: Proposers = ("ngram",)


@pytest.mark.parametrize(
    ("parents", "proposers", "path", "rejected", "tested", "accepted"),
    [
        ([-1, 0], [HEAD, HEAD], [0, 1], False, 2, 2),
        ([-1, 0], [HEAD, HEAD], [0], True, 2, 1),
        ([-1, 0], [HEAD, HEAD], [], True, 1, 0),
        ([-1, 0], [COPY, COPY], [], True, 0, 0),  # a copy that is wrong says nothing of a head
        ([-1, 0], [COPY, COPY], [0, 1], False, 0, 0),
        ([-1, -1, 0], [HEAD, COPY, HEAD], [1], False, 1, 0),  # the copy beside it was right
        ([-1, -1, 0], [("ngram", "eagle3"), COPY, HEAD], [0], True, 2, 1),
        ([-1, 0], [HEAD, COPY], [0], True, 1, 1),
    ],
)
def test_copies_of_texts_do_not_count_as_drafts_of_models(
    parents: list[int], proposers: list[Proposers], path: list[int], rejected: bool, tested: int, accepted: int
) -> None:
    draft = Draft([5] * len(parents), parents, proposers=proposers)
    assert _of_models(draft, Verdict(path, 7, rejected=rejected)) == (tested, accepted)
