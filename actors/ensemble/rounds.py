"""One request's ensemble, seen from its leader: its members, and the logits that came back in each round."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.wire.messages import Ensemble, MemberShare, MemberView, ReplicaAddress
from decoding.blending.blend import (
    attribute_tokens,
    blend,
    keep_candidates,
    rank_others_below,
    replace_empty,
    top_k_union,
)
from decoding.drafts.draft import Draft
from decoding.errors import UnavailableError

_JOIN_TIMEOUT_S = 120.0  # for a member to find a slot and read the prompt


@dataclass(slots=True, eq=False)
class Round:
    """One step of the ensemble. Members are in the order of `EnsembleRounds.models`; index 0 is the leader."""

    step: int
    draft: Draft
    began_s: float  # the end of the round before: messages and the wait for drafts count
    requested_at_s: float
    logits: list[Tensor | None]  # [M] of [K + 1, V] each
    best: list[list[list[int]]]  # [M] of [K + 1] each: the other members' most probable tokens, if wanted
    mask: Tensor | None = None  # [K + 1, ⌈V / 32⌉]
    text_length: int = 0  # of the text that the other members have been sent with it


class EnsembleRounds:
    """The rounds of one request with M members, of which some may be lost."""

    def __init__(self, ensemble: Ensemble) -> None:
        """
        Raises:
            UnavailableError: too few members are there.
        """
        self.options = ensemble.options
        self.models = [ensemble.leader, *(member.model for member in ensemble.members)]
        self._members = ensemble.members
        self.replicas = ["", *(member.address.name if member.address else "" for member in ensemble.members)]
        self.present = [True, *(member.address is not None for member in ensemble.members)]
        self.options.blend.member_weights(self.present)  # raises
        self.read_length = 0  # of the text that all other members have
        self.round: Round | None = None
        self.views: list[tuple[MemberView, ...]] | None = None  # of each token of the last round, if wanted
        self._steps = 0
        self._joined: list[bool] = []
        self._waiting: set[str] = set()  # replicas that have no slot for it, as their last report says
        self._max_lengths = [0] * len(self.models)  # as in Joined
        self._invited_at_s: float | None = None
        self.invitation = 0  # as in Join: how often the members were invited
        self._tokens = [0] * len(self.models)
        self._agreed = [0] * len(self.models)
        self._replies = [0] * len(self.models)
        self._reply_s = [0.0] * len(self.models)
        self.withdraw()

    @property
    def is_invited(self) -> bool:
        """Whether the other members are asked for slots."""
        return self._invited_at_s is not None

    def invite(self, read_length: int, now_s: float) -> None:
        """Note that the members are invited to read a text of that length."""
        self.read_length, self._invited_at_s = read_length, now_s
        self.invitation += 1

    def withdraw(self) -> None:
        """Note that the members are told to forget the request."""
        self.round, self._invited_at_s = None, None
        self._joined = [True, *(False for _ in self.models[1:])]
        self._waiting.clear()

    def note_waiting(self, replica: str, *, waits: bool) -> None:
        """Note whether a member waits for a slot."""
        if waits:
            self._waiting.add(replica)
        else:
            self._waiting.discard(replica)

    @property
    def waits_for_slots(self) -> bool:
        """Whether a round can't begin because a present member has no slot."""
        return not self.is_joined and not self._waiting.isdisjoint(self.others)

    @property
    def is_joined(self) -> bool:
        """Whether all present members have joined."""
        return all(joined for joined, present in zip(self._joined, self.present, strict=True) if present)

    @property
    def is_idle(self) -> bool:
        """Whether a round may begin."""
        return self.round is None and self.is_joined

    @property
    def others(self) -> list[str]:
        """The replicas of the present members, without the leader."""
        pairs = zip(self.replicas, self.present, strict=True)
        return [replica for replica, present in pairs if present and replica]

    @property
    def addresses(self) -> list[ReplicaAddress]:
        """The addresses of `others`."""
        return [member.address for member in self._members if member.address and member.address.name in self.others]

    @property
    def max_length(self) -> int | None:
        """Texts and drafts that all present members can judge are shorter; None: as far as is known, any."""
        pairs = zip(self._max_lengths, self.present, strict=True)
        return min([length for length, present in pairs if present and length], default=None)

    def mark_joined(self, replica: str, max_length: int = 0) -> None:
        """Note that a member has read the text. max_length: as in Joined."""
        if replica in self.others:
            index = self.replicas.index(replica)
            self._joined[index], self._max_lengths[index] = True, max_length
            self._waiting.discard(replica)

    def begin_round(self, draft: Draft, now_s: float, began_s: float) -> None:
        """Begin a round over a draft. began_s: the end of the round before."""
        self._steps += 1
        no_logits: list[Tensor | None] = [None] * len(self.models)
        self.round = Round(self._steps, draft, began_s, now_s, no_logits, [[]] * len(self.models))

    def add_own_logits(self, logits: Tensor, mask: Tensor | None) -> None:
        """Add the leader's logits, [K + 1, V]. mask: [K + 1, ⌈V / 32⌉] what its structure allows."""
        if self.round is not None:
            self.round.mask = mask
            self.round.logits[0] = logits.clone()  # the next forward may overwrite them

    def add_reply(self, replica: str, step: int, logits: Tensor, best: list[list[int]], now_s: float) -> None:
        """Add another member's logits, [K + 1, V or padded]. A reply to an earlier step, or a second one, is ignored.

        Raises:
            ValueError: the reply has a wrong number of positions, or unknown tokens.
        """
        if self.round is None or self.round.step != step or replica not in self.others:
            return
        if len(logits) != len(self.round.draft.tokens) + 1:
            raise ValueError(f"logits of {len(logits)} positions, not {len(self.round.draft.tokens) + 1}")
        if len(best) != len(logits) or any(not 0 <= token < logits.shape[-1] for tokens in best for token in tokens):
            raise ValueError("best tokens that are not those of the logits")
        member = self.replicas.index(replica)
        if self.round.logits[member] is not None:
            return
        self.round.logits[member], self.round.best[member] = logits, best
        self._replies[member] += 1
        self._reply_s[member] += now_s - self.round.requested_at_s

    @property
    def is_complete(self) -> bool:
        """Whether all present members' logits are there."""
        if self.round is None:
            return False
        pairs = zip(self.round.logits, self.present, strict=True)
        return all(logits is not None for logits, present in pairs if present)

    def overdue_replicas(self, now_s: float) -> list[str]:
        """Return the replicas of members that took too long to join or reply."""
        if self.round is not None:
            late = now_s - self.round.requested_at_s > self.options.member_timeout_s
            missing = [logits is None for logits in self.round.logits]
        else:
            late = self._invited_at_s is not None and now_s - self._invited_at_s > _JOIN_TIMEOUT_S
            missing = [not joined for joined in self._joined]
        if not late:
            return []
        return [replica for replica in self.others if missing[self.replicas.index(replica)]]

    def drop(self, replica: str, reason: str) -> None:
        """Go on without a member.

        Raises:
            UnavailableError: the ensemble can't go on without it.
        """
        if replica not in self.others:
            return
        member = self.replicas.index(replica)
        self.present[member] = False
        if not self.options.has_quorum(self.present):
            raise UnavailableError(
                f"member {self.models[member]!r} of the ensemble {reason}; on_member_failure is "
                f"{self.options.on_member_failure!r} and min_members {self.options.min_members}"
            )
        self.options.blend.member_weights(self.present)  # raises, too

    def end_round(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """End the round. tokens: the committed ones; rows: the row of the round's logits from which each was chosen."""
        assert self.round is not None
        if self.options.report_contributions:
            self.views = self._views(self.round, list(rows), list(tokens))
        for member, logits in enumerate(self.round.logits):
            if logits is not None and self.present[member]:
                preferred = logits[list(rows)].argmax(dim=-1).tolist()
                self._tokens[member] += len(tokens)
                self._agreed[member] += sum(a == b for a, b in zip(preferred, tokens, strict=True))
        self.read_length = self.round.text_length
        self.round = None

    def explained(self, error: str) -> str:
        """Return why nothing can be chosen from the round's blend, with the members whose logits are NaN."""
        assert self.round is not None
        pairs = zip(self.models, self.round.logits, strict=True)
        broken = [model for model, logits in pairs if logits is not None and bool(logits.isnan().any())]
        return f"{error}, those of member {', '.join(map(repr, broken))}" if broken else error

    def _views(self, round_: Round, rows: list[int], tokens: list[int]) -> list[tuple[MemberView, ...]]:
        """Return for each token what the members that replied made of it."""
        members = [member for member, present in enumerate(self.present) if present]
        replies = [logits[rows].float() for member in members if (logits := round_.logits[member]) is not None]
        own = replies[0]
        logits = torch.stack([replace_empty(_fit_vocabulary(reply, own.shape[-1]), own) for reply in replies])
        weights = self.options.blend.member_weights(self.present)
        attributions = attribute_tokens(logits, tokens, [weights[member] for member in members])
        names = [self.models[member] for member in members]
        return [
            tuple(MemberView(name, *view) for name, view in zip(names, views, strict=True)) for views in attributions
        ]

    def shares(self) -> list[MemberShare]:
        """Return what each member contributed so far."""
        weights = self.options.blend.member_weights(self.present)
        return [
            MemberShare(
                model=model,
                weight=weights[member],
                tokens=self._tokens[member],
                agreement=self._agreed[member] / max(self._tokens[member], 1),
                latency_s=self._reply_s[member] / max(self._replies[member], 1),
            )
            for member, model in enumerate(self.models)
        ]


def blend_rounds(ensembles: Sequence[EnsembleRounds]) -> Tensor:
    """Return the blended logits of complete rounds, [N, V]: K + 1 rows for each, one round after the other."""
    blended: dict[int, Tensor] = {}  # by index in `ensembles`
    for count in {len(ensemble.models) for ensemble in ensembles}:
        indices = [index for index, ensemble in enumerate(ensembles) if len(ensemble.models) == count]
        blended.update(zip(indices, _blend([ensembles[index] for index in indices]), strict=True))
    return torch.cat([blended[index] for index in range(len(ensembles))])


def _blend(ensembles: Sequence[EnsembleRounds]) -> list[Tensor]:
    """Return [K + 1, V] for each ensemble; all have M members."""
    rounds = [ensemble.round for ensemble in ensembles if ensemble.round is not None]
    owns = [own for round_ in rounds if (own := round_.logits[0]) is not None]
    candidates = [_candidates(ensemble, own) for ensemble, own in zip(ensembles, owns, strict=True)]
    members = [torch.cat(logits) for logits in zip(*map(_member_logits, ensembles, candidates), strict=True)]
    lengths = [len(own) for own in owns]
    positions = [
        (ensemble.options.blend, ensemble.present)
        for ensemble, length in zip(ensembles, lengths, strict=True)
        for _ in range(length)
    ]
    blended = blend(torch.stack(members), positions).split(lengths)
    return [
        logits if chosen is None else rank_others_below(logits, own, chosen)
        for logits, own, chosen in zip(blended, owns, candidates, strict=True)
    ]


def _candidates(ensemble: EnsembleRounds, own: Tensor) -> Tensor | None:
    """Return the tokens on which the members are blended, [K + 1, V] bool; None for all."""
    assert ensemble.round is not None
    count = ensemble.options.best_count
    others = [best for best, present in zip(ensemble.round.best, ensemble.present, strict=True) if present]
    return top_k_union(own, count, others) if count else None


def _member_logits(ensemble: EnsembleRounds, candidates: Tensor | None) -> list[Tensor]:
    """Return [M] of [K + 1, V] each, float32. Those of lost members have no meaning."""
    assert ensemble.round is not None
    own, *others = ensemble.round.logits
    assert own is not None
    members = [own.float(), *(_fit_or_zeros(logits, own) for logits in others)]
    if ensemble.options.vocabulary == "shared":
        return members
    if candidates is not None:
        members = [keep_candidates(logits, candidates) for logits in members]
    contrastive = ensemble.options.blend.kind == "contrastive"  # there a silent amateur finds all tokens equal
    replacement = torch.zeros_like(members[0]) if contrastive else members[0]
    return [members[0], *(replace_empty(logits, replacement) for logits in members[1:])]


def _fit_or_zeros(logits: Tensor | None, own: Tensor) -> Tensor:
    own_size = own.shape[-1]
    return torch.zeros_like(own, dtype=torch.float32) if logits is None else _fit_vocabulary(logits.float(), own_size)


def _fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or pad to [N, V]: models with one vocabulary may pad it to different sizes."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
