"""One request's ensemble, seen from its leader: its members, and the logits that came back in each round."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

import torch
from torch import Tensor

from actors.wire.messages import Ensemble, Member, MemberShare, MemberView
from decoding.blending.blend import attribute_tokens, blend, rank_others_below, replace_empty, top_k_union
from decoding.drafts.draft import Draft
from decoding.errors import UnavailableError
from engine.model.hidden_states import EarlyExit

_JOIN_TIMEOUT_S = 120.0  # for a member to find a slot and read the prompt


@dataclass(slots=True, eq=False)
class Participant:
    """A member of an ensemble, and what it has contributed to one request. The first of all is the leader."""

    term: Member
    present: bool = True  # not lost
    joined: bool = True  # has read the text
    waits: bool = False  # has no slot for the request, as its last report says
    max_length: int = 0  # as in Joined
    logits: Tensor | None = None  # [K + 1, V] of this round
    best: list[list[int]] = field(default_factory=list)  # [K + 1] its most probable tokens in this round, if wanted
    tokens: int = 0  # committed ones to which it contributed
    agreed: int = 0  # these that it preferred
    preferred: tuple[bool, ...] = ()  # of the last round's committed tokens, which of them
    replies: int = 0
    reply_s: float = 0.0  # of all replies

    @property
    def replica(self) -> str:
        """Its replica's name; empty for what the leader's model reads, and without a replica."""
        return "" if self.term.address is None else self.term.address.name

    def offset(self, prompt_length: int) -> int:
        """Return by how many tokens its text is longer than the leader's, whose prompt has so many."""
        return 0 if self.term.prompt is None else len(self.term.prompt) - prompt_length


@dataclass(slots=True, eq=False)
class Round:
    """One step of the ensemble."""

    step: int
    draft: Draft
    began_s: float  # the end of the round before: messages and the wait for drafts count
    requested_at_s: float
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
        members = [Member(ensemble.leader, None, is_own=True), *ensemble.members]
        self.members = [Participant(each, each.is_there) for each in members]  # [M]
        self.leader = self.members[0]
        self.own = [each for each in self.members if each.term.is_own and not each.term.layers]  # the leader first
        self.early = [each for each in self.members if each.term.is_own and each.term.layers]
        self._weights()  # raises
        self.read_length = 0  # of the text that all other members have
        self.round: Round | None = None
        self.views: list[tuple[MemberView, ...]] | None = None  # of each token of the last round, if wanted
        self._steps = 0
        self._invited_at_s: float | None = None
        self.invitation = 0  # as in Join: how often the members were invited
        self.withdraw()

    @property
    def present(self) -> list[bool]:
        """[M] whether each member takes part."""
        return [member.present for member in self.members]

    @property
    def others(self) -> dict[str, Participant]:
        """The present members that other replicas run, by replica."""
        return {member.replica: member for member in self.members if member.present and member.replica}

    def _weights(self) -> tuple[float, ...]:
        """Return the members' weights, [M]. Raises UnavailableError if too few are present."""
        return self.options.blend.member_weights(self.present)

    @property
    def is_invited(self) -> bool:
        return self._invited_at_s is not None

    def invite(self, read_length: int, now_s: float) -> None:
        self.read_length, self._invited_at_s = read_length, now_s
        self.invitation += 1

    def withdraw(self) -> None:
        self.round, self._invited_at_s = None, None
        for member in self.others.values():
            member.joined = member.waits = False

    @property
    def waits_for_slots(self) -> bool:
        """Whether a round can't begin because a present member has no slot."""
        return not self.is_joined and any(member.waits for member in self.others.values())

    @property
    def is_joined(self) -> bool:
        return all(member.joined for member in self.members if member.present)

    @property
    def is_idle(self) -> bool:
        return self.round is None and self.is_joined

    @property
    def max_length(self) -> int | None:
        """Texts and drafts that all present members can judge are shorter; None: as far as is known, any."""
        return min([member.max_length for member in self.members if member.present and member.max_length], default=None)

    def mark_joined(self, replica: str, max_length: int = 0) -> None:
        """Note that a member has read the text. max_length: as in Joined."""
        member = self.others.get(replica)
        if member is not None:
            member.joined, member.waits, member.max_length = True, False, max_length

    def begin_round(self, draft: Draft, now_s: float, began_s: float) -> None:
        self._steps += 1
        self.round = Round(self._steps, draft, began_s, now_s)
        for member in self.members:
            member.logits, member.best = None, []

    def add_own_logits(self, logits: Tensor, mask: Tensor | None) -> None:
        """Add what the leader's model made of each text, [T · (K + 1), V]: the leader's own, then those of `own`.

        mask: [K + 1, ⌈V / 32⌉] what its structure allows.
        """
        if self.round is not None:
            self.round.mask = mask
            kept = logits.clone() if self.others else logits  # the next forward may overwrite them
            for member, own in zip(self.own, kept.chunk(len(self.own)), strict=True):
                member.logits = own

    def add_early_logits(self, exit_: EarlyExit, hidden: Tensor) -> None:
        """Add what earlier layers make of the leader's own text. hidden: [K + 1, k · H] as for `EarlyExit.logits`."""
        assert self.leader.logits is not None
        for member in self.early:
            member.logits = exit_.logits(hidden, member.term.layers, self.leader.logits)

    def add_reply(self, replica: str, step: int, logits: Tensor, best: list[list[int]], now_s: float) -> None:
        """Add another member's logits, [K + 1, V or padded]. A reply to an earlier step, or a second one, is ignored.

        Raises ValueError if the reply has a wrong number of positions, or unknown tokens.
        """
        member = self.others.get(replica)
        if self.round is None or self.round.step != step or member is None:
            return
        if len(logits) != len(self.round.draft.tokens) + 1:
            raise ValueError(f"logits of {len(logits)} positions, not {len(self.round.draft.tokens) + 1}")
        if len(best) != len(logits) or any(not 0 <= token < logits.shape[-1] for tokens in best for token in tokens):
            raise ValueError("best tokens that are not those of the logits")
        if member.logits is None:
            member.logits, member.best = logits, best
            member.replies += 1
            member.reply_s += now_s - self.round.requested_at_s

    @property
    def is_complete(self) -> bool:
        return self.round is not None and all(each.logits is not None for each in self.members if each.present)

    def overdue_replicas(self, now_s: float) -> list[str]:
        """Return the replicas of members that took too long to join or reply."""
        if self.round is not None:
            late = now_s - self.round.requested_at_s > self.options.member_timeout_s
            missing = [replica for replica, member in self.others.items() if member.logits is None]
        else:
            late = self._invited_at_s is not None and now_s - self._invited_at_s > _JOIN_TIMEOUT_S
            missing = [replica for replica, member in self.others.items() if not member.joined]
        return missing if late else []

    def drop(self, replica: str, reason: str) -> None:
        """Go on without a present member. Raises UnavailableError if the ensemble can't."""
        member = self.others[replica]
        member.present = False
        if not self.options.has_quorum(self.present):
            raise UnavailableError(
                f"member {member.term.model!r} of the ensemble {reason}; on_member_failure is "
                f"{self.options.on_member_failure!r} and min_members {self.options.min_members}"
            )
        self._weights()  # raises, too

    def end_round(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """End the round. tokens: the committed ones; rows: the row of the round's logits from which each was chosen."""
        assert self.round is not None
        if self.options.report_contributions:
            self.views = self._views(list(rows), list(tokens))
        index = torch.tensor([rows, tokens])
        for member in self.members:
            member.preferred = ()
            if member.logits is not None and member.present:
                preferred = member.logits[index[0], index[1]] == member.logits.amax(dim=-1)[index[0]]
                member.preferred = tuple(preferred.tolist())
                member.tokens += len(tokens)
                member.agreed += sum(member.preferred)
            member.logits = None
        self.read_length = self.round.text_length
        self.round = None

    def explained(self, error: str) -> str:
        """Return why nothing can be chosen from the round's blend, with the members whose logits are NaN."""
        broken = [
            repr(each.term.model) for each in self.members if each.logits is not None and each.logits.isnan().any()
        ]
        return f"{error}, those of member {', '.join(broken)}" if broken else error

    def _views(self, rows: list[int], tokens: list[int]) -> list[tuple[MemberView, ...]]:
        """Return for each token what the members that replied made of it."""
        replies = [each.logits[rows].float() for each in self.members if each.present and each.logits is not None]
        own = replies[0]
        logits = torch.stack([replace_empty(_fit_vocabulary(reply, own.shape[-1]), own) for reply in replies])
        names = [each.term.model for each in self.members if each.present]
        weights = [weight for weight, is_there in zip(self._weights(), self.present, strict=True) if is_there]
        attributions = attribute_tokens(logits, tokens, weights)
        return [
            tuple(MemberView(name, *view) for name, view in zip(names, views, strict=True)) for views in attributions
        ]

    def shares(self) -> list[MemberShare]:
        return [
            MemberShare(
                *(each.term.model, weight, each.tokens, each.agreed / max(each.tokens, 1)),
                latency_s=each.reply_s / max(each.replies, 1),
                preferred=each.preferred if len(each.preferred) > 1 else (),
            )
            for each, weight in zip(self.members, self._weights(), strict=True)
        ]


@torch.inference_mode()
def blend_rounds(ensembles: Sequence[EnsembleRounds]) -> Tensor:
    """Return the blended logits of complete rounds, [N, V]: K + 1 rows for each, one round after the other."""
    owns = [own for ensemble in ensembles if (own := ensemble.leader.logits) is not None]
    candidates = [*map(_candidates, ensembles, owns)]
    most = max([len(ensemble.members) for ensemble in ensembles])
    members = zip(*map(_member_logits, ensembles, owns, candidates, repeat(most)), strict=True)
    logits = torch.cat([*chain.from_iterable(members)]).view(most, -1, owns[0].shape[-1])
    pairs = zip(ensembles, owns, strict=True)
    blended = blend(logits, [(each.options.blend, each.present) for each, own in pairs for _ in range(len(own))])
    for rows, own, chosen in zip(blended.split([*map(len, owns)]), owns, candidates, strict=True):
        if chosen is not None:
            rows.copy_(rank_others_below(rows, own, chosen))
    return blended


def _candidates(ensemble: EnsembleRounds, own: Tensor) -> Tensor | None:
    """Return the tokens on which the members are blended, [K + 1, V] bool; None for all."""
    count = ensemble.options.best_count
    return top_k_union(own, count, [member.best for member in ensemble.members if member.present]) if count else None


def _member_logits(ensemble: EnsembleRounds, own: Tensor, candidates: Tensor | None, count: int) -> list[Tensor]:
    """Return [count] of [K + 1, V] each, float32. Those of lost members, and of more than it has, have no meaning."""
    lacking = [None] * (count - len(ensemble.members))
    known = [own, *(member.logits for member in ensemble.members[1:]), *lacking]
    members = [_fit_vocabulary(own if logits is None else logits, own.shape[-1]).float() for logits in known]
    if ensemble.options.vocabulary == "shared":
        return members
    if candidates is not None:
        members = [logits.masked_fill(~candidates, -math.inf) for logits in members]
    first, *others = members
    adds_up = ensemble.options.blend.kind in ("contrastive", "formula")  # there a silent member finds all tokens equal
    replacement = torch.zeros_like(first) if adds_up else first
    return [first, *(replace_empty(logits, replacement) for logits in others)]


def _fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or pad to [N, V]: models with one vocabulary may pad it to different sizes."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
