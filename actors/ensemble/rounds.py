"""One request's ensemble, seen from its leader: who is in it, what was asked, and what came back.

Knows nothing of messages, links or how a blend is sampled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.wire.messages import Ensemble, MemberShare, MemberView
from decoding.blending.attribution import attribute_tokens
from decoding.blending.blend import BlendBatch, blend
from decoding.blending.union import keep_candidates, rank_others_below, replace_empty, top_k_union
from decoding.drafts.trie import Draft
from decoding.errors import UnavailableError

_JOIN_TIMEOUT_S = 120.0  # to find a slot and read the prompt


@dataclass(slots=True, eq=False)
class Round:
    """One step of the ensemble. Members are counted from the leader on, which is 0."""

    step: int
    draft: Draft
    began_s: float  # the wait for drafts before it included
    asked_at_s: float
    logits: list[Tensor | None]  # [M] of [K + 1, V] each
    best: list[list[list[int]]]  # [M] of [K + 1] each: the other members' most probable tokens, if these are wanted
    mask: Tensor | None = None  # [K + 1, ⌈V / 32⌉]


class EnsembleRounds:
    """M members, of which some may be gone."""

    def __init__(self, ensemble: Ensemble, now_s: float) -> None:
        self.options = ensemble.options
        self.models = [ensemble.leader, *(member.model for member in ensemble.members)]
        self.replicas = ["", *(one.address.name if one.address else "" for one in ensemble.members)]
        self.present = [True, *(one.address is not None for one in ensemble.members)]
        self.told = 0  # how many tokens of the text the others know
        self.round: Round | None = None
        self.views: list[list[MemberView]] | None = None  # of each token of the round before, if they are wanted
        self._steps = 0
        self._joined = [True, *(False for _ in ensemble.members)]
        self._began_s = now_s
        self._tokens = [0] * len(self.models)
        self._agreed = [0] * len(self.models)
        self._answers = [0] * len(self.models)
        self._answering_s = [0.0] * len(self.models)

    @property
    def joined(self) -> bool:
        """Whether all that are left are ready to be asked."""
        return all(joined for joined, there in zip(self._joined, self.present, strict=True) if there)

    @property
    def others(self) -> list[str]:
        """The replicas of the other members that are left."""
        pairs = zip(self.replicas, self.present, strict=True)
        return [replica for replica, there in pairs if there and replica]

    def join(self, replica: str) -> None:
        """A member is ready."""
        if replica in self.others:
            self._joined[self.replicas.index(replica)] = True

    def begin(self, draft: Draft, now_s: float, began_s: float) -> None:
        """Ask all about a draft. began_s: when the wait for it began."""
        self._steps += 1
        nobody: list[Tensor | None] = [None] * len(self.models)
        self.round = Round(self._steps, draft, began_s, now_s, nobody, [[]] * len(self.models))

    def take_own(self, logits: Tensor, mask: Tensor | None) -> None:
        """The leader's own answer, [K + 1, V]. mask: [K + 1, ⌈V / 32⌉] what its structure allows."""
        if self.round is not None:
            self.round.mask = mask
            self.round.logits[0] = logits

    def take(self, replica: str, step: int, logits: Tensor, best: list[list[int]], now_s: float) -> None:
        """Another member's answer, [K + 1, V or so]; one to an earlier step, or a second one, is ignored.

        Raises:
            ValueError: it has another number of positions, or tokens that are none.
        """
        if self.round is None or self.round.step != step or replica not in self.others:
            return
        if len(logits) != len(self.round.draft.tokens) + 1:
            raise ValueError(f"logits of {len(logits)} positions, not {len(self.round.draft.tokens) + 1}")
        if len(best) != len(logits) or any(not 0 <= token < logits.shape[-1] for tokens in best for token in tokens):
            raise ValueError("best tokens that are not those of the logits")
        at = self.replicas.index(replica)
        if self.round.logits[at] is not None:
            return
        self.round.logits[at], self.round.best[at] = logits, best
        self._answers[at] += 1
        self._answering_s[at] += now_s - self.round.asked_at_s

    @property
    def complete(self) -> bool:
        """Whether everybody who is left has answered."""
        if self.round is None:
            return False
        return all(logits is not None for logits, there in zip(self.round.logits, self.present, strict=True) if there)

    def overdue(self, now_s: float) -> list[str]:
        """The replicas of members that took too long."""
        if self.round is not None:
            late = now_s - self.round.asked_at_s > self.options.member_timeout_s
            missing = [logits is None for logits in self.round.logits]
        else:
            late = now_s - self._began_s > _JOIN_TIMEOUT_S
            missing = [not joined for joined in self._joined]
        if not late:
            return []
        return [replica for replica in self.others if missing[self.replicas.index(replica)]]

    def lose(self, replica: str, reason: str) -> None:
        """A member is gone.

        Raises:
            UnavailableError: the ensemble can't go on without it.
        """
        if replica not in self.others:
            return
        at = self.replicas.index(replica)
        self.present[at] = False
        if not self.options.has_quorum(self.present):
            raise UnavailableError(
                f"member {self.models[at]!r} of the ensemble {reason}; on_member_failure is "
                f"{self.options.on_member_failure!r} and min_members {self.options.min_members}"
            )
        self.options.blend.member_weights(self.present)  # raises, too

    def close(self, places: Sequence[int], tokens: Sequence[int]) -> None:
        """End the round. tokens: what was committed after the positions `places`, of which 0 is the text's end."""
        assert self.round is not None
        if self.options.report_contributions:
            self.views = self._views(self.round, list(places), list(tokens))
        for at, logits in enumerate(self.round.logits):
            if logits is not None and self.present[at]:
                chosen = logits[list(places)].argmax(dim=-1).tolist()
                self._tokens[at] += len(tokens)
                self._agreed[at] += sum(a == b for a, b in zip(chosen, tokens, strict=True))
        self.round = None

    def _views(self, round_: Round, places: list[int], tokens: list[int]) -> list[list[MemberView]]:
        """What those who answered thought of each token."""
        there = [(at, logits) for at, logits in enumerate(round_.logits) if logits is not None and self.present[at]]
        own = there[0][1][places].float()
        logits = torch.stack([replace_empty(_fitted(one[places].float(), own.shape[-1]), own) for _, one in there])
        weights = self.options.blend.member_weights(self.present)
        found = attribute_tokens(logits, tokens, [weights[at] for at, _ in there])
        names = [self.models[at] for at, _ in there]
        return [[MemberView(name, *one) for name, one in zip(names, views, strict=True)] for views in found]

    def shares(self) -> list[MemberShare]:
        """What each member contributed so far."""
        weights = self.options.blend.member_weights(self.present)
        return [
            MemberShare(
                model=model,
                weight=weights[at],
                tokens=self._tokens[at],
                agreement=self._agreed[at] / max(self._tokens[at], 1),
                latency_s=self._answering_s[at] / max(self._answers[at], 1),
            )
            for at, model in enumerate(self.models)
        ]


def blended(ensembles: Sequence[EnsembleRounds]) -> Tensor:
    """[N, V] the target distributions' logits of all complete rounds, K + 1 of each, one after the other."""
    parts: dict[int, Tensor] = {}
    for count in {len(ensemble.models) for ensemble in ensembles}:
        alike = [at for at, ensemble in enumerate(ensembles) if len(ensemble.models) == count]
        parts.update(zip(alike, _blend([ensembles[at] for at in alike]), strict=True))
    return torch.cat([parts[at] for at in range(len(ensembles))])


def _blend(ensembles: Sequence[EnsembleRounds]) -> list[Tensor]:
    """[K + 1, V] of each; all have M members."""
    rounds = [ensemble.round for ensemble in ensembles if ensemble.round is not None]
    owns = [own for one in rounds if (own := one.logits[0]) is not None]
    candidates = [_candidates(ensemble, own) for ensemble, own in zip(ensembles, owns, strict=True)]
    members = [torch.cat(logits) for logits in zip(*map(_members, ensembles, candidates), strict=True)]
    lengths = [len(own) for own in owns]
    positions = [
        (ensemble.options.blend, ensemble.present)
        for ensemble, length in zip(ensembles, lengths, strict=True)
        for _ in range(length)
    ]
    logits = blend(torch.stack(members), BlendBatch.build(positions, owns[0].device)).split(lengths)
    return [
        one if chosen is None else rank_others_below(one, own, chosen)
        for one, own, chosen in zip(logits, owns, candidates, strict=True)
    ]


def _candidates(ensemble: EnsembleRounds, own: Tensor) -> Tensor | None:
    """[K + 1, V] bool: the tokens that the members are blended on; None: all."""
    assert ensemble.round is not None
    count = ensemble.options.best_count
    others = [best for best, there in zip(ensemble.round.best, ensemble.present, strict=True) if there]
    return top_k_union(own, count, others) if count else None


def _members(ensemble: EnsembleRounds, candidates: Tensor | None) -> list[Tensor]:
    """[M] of [K + 1, V] each, float32; what is said of those that are gone has no meaning."""
    assert ensemble.round is not None
    own, *others = ensemble.round.logits
    assert own is not None
    found = [own.float(), *(_or_zeros(logits, own) for logits in others)]
    if ensemble.options.vocabulary == "shared":
        return found
    if candidates is not None:
        found = [keep_candidates(logits, candidates) for logits in found]
    contrasted = ensemble.options.blend.kind == "contrastive"  # with an amateur that finds all alike
    instead = torch.zeros_like(found[0]) if contrasted else found[0]
    return [found[0], *(replace_empty(logits, instead) for logits in found[1:])]


def _or_zeros(logits: Tensor | None, own: Tensor) -> Tensor:
    return torch.zeros_like(own, dtype=torch.float32) if logits is None else _fitted(logits.float(), own.shape[-1])


def _fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """[N, V]: vocabularies that are the same may be padded to other sizes."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
