"""Every blend against a slow reference in float64, and properties of all of them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decoding.blending.blend import (
    attribute_tokens,
    blend,
    gate,
    rank_others_below,
    replace_empty,
    top_k_union,
)
from decoding.blending.params import BlendParams
from decoding.errors import InvalidRequestError, UnavailableError
from tests.support.properties import repeatable

Position = tuple[BlendParams, Sequence[bool]]

LEAST = -1e3  # the log-probability of tokens that the amateur rules out
KINDS = ["single", "mixture", "product", "vote", "gated"]
LOGITS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]).log()  # [M, V]
INF = math.inf
OWN = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0]])


def softmax(logits: Sequence[float]) -> list[float]:
    best = max(logits)
    powers = [math.exp(x - best) for x in logits]
    return [power / sum(powers) for power in powers]


def log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def log_softmax(logits: Sequence[float]) -> list[float]:
    total = max(logits) + math.log(sum(math.exp(x - max(logits)) for x in logits))
    return [x - total for x in logits]


def mean(probs: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    return [sum(w * p[t] for w, p in zip(weights, probs, strict=True)) / sum(weights) for t in range(len(probs[0]))]


def mixture_reference(members: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    return [log(x) for x in mean([softmax(member) for member in members], weights)]


def product_reference(members: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    sums = mean([log_softmax(member) for member in members], weights)
    return mixture_reference(members, weights) if max(sums) == -math.inf else sums


def vote_reference(members: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    choices = [max(range(len(member)), key=member.__getitem__) for member in members]
    votes = {c: sum(w for w, d in zip(weights, choices, strict=True) if d == c) for c in choices}
    means = mean([softmax(member) for member in members], weights)
    most = max(votes.values())
    tied = [choice for choice in choices if votes[choice] > most - 1e-5 * sum(weights)]
    winner = next(choice for choice in tied if means[choice] > max(means[c] for c in tied) * (1 - 1e-5))
    voters = [i for i, choice in enumerate(choices) if choice == winner]
    return mixture_reference([members[i] for i in voters], [weights[i] for i in voters])


def contrastive_reference(params: BlendParams, expert: Sequence[float], amateur: Sequence[float]) -> list[float]:
    probs = softmax(expert)
    kept = [x > -math.inf and p >= params.alpha * max(probs) for x, p in zip(expert, probs, strict=True)]
    if params.form == "scaled":
        floored = [max(a, LEAST) for a in log_softmax(amateur)]
        scores = [(1 + params.beta) * e - params.beta * a for e, a in zip(expert, floored, strict=True)]
    else:
        cooled = log_softmax([a / params.amateur_temperature for a in amateur])
        scores = [e - max(a, LEAST) for e, a in zip(log_softmax(expert), cooled, strict=True)]
    return [score if keep else -math.inf for score, keep in zip(scores, kept, strict=True)]


def reference(params: BlendParams, present: Sequence[bool], members: Sequence[Sequence[float]]) -> list[float]:
    """Compute the logits of one position in float64 from the definitions."""
    given = params.weights or (1.0,) * len(members)
    counted = [(m, w) for m, w, there in zip(members, given, present, strict=True) if there and w > 0]
    logits, weights = [m for m, _ in counted], [w for _, w in counted]
    match params.kind:
        case "contrastive":
            return contrastive_reference(params, *logits) if len(logits) == 2 else list(logits[0])
        case "single":
            return list(members[0])
        case "gated" if present[0] and given[0] > 0 and max(softmax(members[0])) >= params.threshold:
            return list(members[0])
        case "mixture" | "gated":
            return mixture_reference(logits, weights)
        case "product":
            return product_reference(logits, weights)
        case _:
            return vote_reference(logits, weights)


def assert_same_distribution(blended: Tensor, expected: Sequence[Sequence[float]]) -> None:
    """Compare logits, both [N, V]."""
    assert not blended.isnan().any()
    want = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(blended.double().log_softmax(-1), want.log_softmax(-1), atol=2e-4, rtol=1e-5)


@st.composite
def settings_of(draw: st.DrawFn, members: int) -> Position:
    """Draw the parameters of one position, and which members are present, at least one."""
    kinds = [*KINDS, "contrastive"] if members == 2 else KINDS
    kind: Any = draw(st.sampled_from(kinds))
    weights: tuple[float, ...] = ()
    present = [True] + [draw(st.booleans()) for _ in range(members - 1)]
    if kind == "contrastive":
        weights = draw(st.sampled_from([(), (1.0, 1.0), (2.0, 0.0)]))
    elif kind != "single" and draw(st.booleans()):
        weights = tuple(draw(st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.7])) for _ in range(members - 1))
        weights = (draw(st.sampled_from([0.1, 1.0, 2.0])), *weights)
    return (
        BlendParams(
            kind=kind,
            weights=weights,
            threshold=draw(st.sampled_from([0.0, 0.31, 0.5, 0.9, 0.99])),
            form=draw(st.sampled_from(["difference", "scaled"])),
            alpha=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
            beta=draw(st.sampled_from([0.0, 0.5, 2.0])),
            amateur_temperature=draw(st.sampled_from([0.5, 1.0, 1.7])),
        ),
        present,
    )


@st.composite
def members_of(draw: st.DrawFn, members: int, positions: int) -> Tensor:
    """Draw logits without ties, [M, N, V]: normal, or far apart, or with tokens ruled out."""
    vocab_size = draw(st.integers(2, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.2, 2.0, 40.0]))
    logits = torch.randn(members, positions, vocab_size, generator=generator) * scale
    if draw(st.booleans()):
        excluded = torch.rand(logits.shape, generator=generator) < 0.4
        excluded.scatter_(-1, torch.randint(vocab_size, (members, positions, 1), generator=generator), False)
        logits = logits.masked_fill(excluded, -math.inf)
    return logits


@repeatable
@given(st.data(), st.integers(1, 4), st.integers(1, 5))
def test_each_position_has_its_own_blend(data: st.DataObject, members: int, positions: int) -> None:
    settings = [data.draw(settings_of(members)) for _ in range(positions)]
    logits = data.draw(members_of(members, positions))
    expected = [
        reference(params, present, logits[:, i].double().tolist()) for i, (params, present) in enumerate(settings)
    ]
    for i, (_, present) in enumerate(settings):
        logits[[m for m, there in enumerate(present) if not there], i] = math.nan  # logits of an absent member
    kept = logits.clone()
    assert_same_distribution(blend(logits, settings), expected)
    torch.testing.assert_close(logits, kept, rtol=0, atol=0, equal_nan=True)


@repeatable
@given(st.data(), st.sampled_from(["difference", "scaled"]))
def test_contrastive_keeps_what_is_plausible_to_the_expert(data: st.DataObject, form: Any) -> None:
    params, _ = data.draw(settings_of(2))
    params = replace(params, kind="contrastive", form=form, weights=())
    logits = data.draw(members_of(2, 1))
    blended = blend(logits, [(params, (True, True))])
    assert_same_distribution(blended, [reference(params, (True, True), logits[:, 0].double().tolist())])
    probs = logits[0].softmax(-1)
    assert not blended[probs < 0.999 * params.alpha * probs.max()].isfinite().any()
    assert blended.isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identical_members_are_that_member_bit_by_bit(kind: Any, dtype: torch.dtype) -> None:
    logits = (torch.randn(20, 50, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    logits[:, ::7] = -math.inf
    for weights in ((), (0.3, 0.6, 0.1)) if kind != "single" else ((),):
        positions = [(BlendParams(kind=kind, weights=weights), (True, True, True))] * 20
        assert torch.equal(blend(logits.expand(3, -1, -1), positions), logits.float())
    alone = [(BlendParams(kind=kind), (True,))] * 20
    assert torch.equal(blend(logits[None], alone), logits.float())


@pytest.mark.parametrize("kind", [*KINDS, "contrastive"])
def test_a_member_that_has_all_the_weight_is_the_blend(kind: Any) -> None:
    logits = torch.randn(2, 20, 50, generator=torch.Generator().manual_seed(2))
    first = [(BlendParams(kind=kind, weights=(1, 0)), (True, True)), (BlendParams(kind=kind), (True, False))]
    for position in first:
        assert torch.equal(blend(logits, [position] * 20), logits[0])
    if kind in ("mixture", "product", "vote", "gated"):
        second = [(BlendParams(kind=kind, weights=(0, 1)), (True, True)), (BlendParams(kind=kind), (False, True))]
        for position in second:
            assert torch.equal(blend(logits, [position] * 20), logits[1])


@pytest.mark.parametrize("kind", ["mixture", "product", "gated"])
@pytest.mark.parametrize("vocab_size", [2047, 2048])
def test_a_position_has_the_same_bits_alone_and_in_company(kind: Any, vocab_size: int) -> None:
    logits = torch.randn(5, 6, vocab_size, generator=torch.Generator().manual_seed(4)) * 3
    position = (BlendParams(kind=kind, weights=(1, 2, 3, 4, 5), threshold=1.0), (True,) * 5)
    alone = blend(logits[:, :1], [position])
    assert torch.equal(blend(logits, [position] * 6)[:1], alone)


def test_the_expert_against_itself() -> None:
    """The difference is constant on plausible tokens; scaled is the expert."""
    logits = torch.randn(1, 10, 50, generator=torch.Generator().manual_seed(3)).expand(2, -1, -1)
    for form, equal in (("difference", torch.zeros(10, 50)), ("scaled", logits[0])):
        params = BlendParams(kind="contrastive", form=form)  # type: ignore[arg-type]
        blended = blend(logits, [(params, (True, True))] * 10)
        plausible = blended.isfinite()
        torch.testing.assert_close(blended[plausible], equal[plausible])
        assert not plausible.all()
        assert plausible.gather(1, logits[0].argmax(-1, keepdim=True)).all()


@pytest.mark.parametrize(
    ("weights", "winner"),
    [((), 1), ((1, 1, 1), 1), ((5, 1, 1), 0), ((2, 1, 1), 0), ((1, 0.5, 0.5), 0), ((0.1, 0.2, 0.3), 1)],
)
def test_a_vote_by_hand(weights: tuple[float, ...], winner: int) -> None:
    """The first member votes for token 0, the others for token 1. At a tie, token 0 has the greater mean."""
    probs = torch.tensor([[0.9, 0.05, 0.05], [0.3, 0.4, 0.3], [0.1, 0.5, 0.4]])
    blended = blend(probs.log()[:, None], [(BlendParams(kind="vote", weights=weights), (True,) * 3)])
    assert blended.argmax() == winner
    voters = [1, 2] if winner else [0]
    shares = torch.tensor(weights or (1.0, 1.0, 1.0))[voters]
    expected = (shares[:, None] * probs[voters]).sum(0) / shares.sum()
    torch.testing.assert_close(blended[0].softmax(-1), expected)


def test_three_tenths_are_a_tie_with_a_tenth_and_two() -> None:
    probs = torch.tensor([[0.4, 0.6, 0.0], [0.4, 0.6, 0.0], [0.9, 0.1, 0.0]])
    params = BlendParams(kind="vote", weights=(0.1, 0.2, 0.3))
    assert blend(probs.log()[:, None], [(params, (True,) * 3)]).argmax() == 0


def test_the_article_s_definition_of_contrastive() -> None:
    """Tokens with a tenth of the expert's best probability, then the largest log expert − log amateur."""
    expert = torch.tensor([0.5, 0.3, 0.06, 0.04, 0.1])
    amateur = torch.tensor([0.6, 0.2, 0.02, 0.001, 0.179])
    batch = [(BlendParams(kind="contrastive"), (True, True))]
    scores = blend(torch.stack([expert, amateur]).log()[:, None], batch)[0]
    assert scores.isfinite().tolist() == [True, True, True, False, True]
    assert scores.argmax() == 2
    torch.testing.assert_close(scores[:3], torch.tensor([0.5 / 0.6, 1.5, 3.0]).log())


def test_a_first_term_without_weight_still_says_what_is_plausible() -> None:
    logits = torch.tensor([[[0.5, 0.4, 0.1]], [[0.1, 0.2, 0.7]], [[0.3, 0.3, 0.4]]]).log()
    for alpha, kept in ((0.5, [True, True, False]), (0.0, [True] * 3)):
        params = BlendParams(kind="formula", weights=(0, 1, 0), alpha=alpha)
        blended = blend(logits, [(params, (True,) * 3)])[0]
        assert blended.isfinite().tolist() == kept
        assert torch.equal(blended[kept], logits[1, 0, kept])


def test_blends_of_few_and_of_many_members_in_one_batch() -> None:
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(5))
    few, many = (BlendParams(), (True,)), (BlendParams(kind="formula", weights=(1.5, -1, 0.5)), (True,) * 3)
    blended = blend(logits, [few, many])
    assert torch.equal(blended[0], blend(logits[:1, :1], [few])[0])
    assert torch.equal(blended[1], blend(logits[:, 1:], [many])[0])


def test_members_that_agree_on_nothing_are_mixed() -> None:
    logits = torch.tensor([[[0.0, -math.inf, -math.inf]], [[-math.inf, 1.0, -math.inf]]])
    blended = blend(logits, [(BlendParams(kind="product"), (True, True))])
    torch.testing.assert_close(blended.softmax(-1), torch.tensor([[0.5, 0.5, 0.0]]))


def test_a_gate_is_unsure_below_the_threshold() -> None:
    logits = torch.tensor([[0.6, 0.4], [0.6, 0.4], [1.0, 0.0], [0.5, 0.5]]).log()
    weights = gate(torch.stack([logits, logits]), torch.ones(2, 4), torch.tensor([0.59, 0.61, 1.0, 0.0]))
    assert weights.tolist() == [[1, 1, 1, 1], [0, 1, 0, 0]]


def test_weights_are_renormalised_over_those_that_answered() -> None:
    params = BlendParams(weights=(1, 2, 5))
    assert params.member_weights((True, True, True)) == (0.125, 0.25, 0.625)
    assert params.member_weights((False, True, True)) == pytest.approx((0, 2 / 7, 5 / 7))
    assert BlendParams().member_weights((True, False, True)) == (0.5, 0, 0.5)
    assert BlendParams(kind="single").member_weights((True, False, True)) == (1, 0, 0)


@pytest.mark.parametrize(
    ("params", "present"),
    [
        (BlendParams(), (False, False)),
        (BlendParams(weights=(1, 0)), (False, True)),
        (BlendParams(kind="single"), (False, True)),
        (BlendParams(kind="contrastive"), (False, True)),
    ],
)
def test_a_blend_of_nothing(params: BlendParams, present: Sequence[bool]) -> None:
    with pytest.raises(UnavailableError, match=params.kind):
        blend(torch.zeros(len(present), 1, 4), [(params, present)])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "average"),
        ("form", "ratio"),
        ("weights", (0.0, 0.0)),
        ("weights", (1.0, -0.5)),
        ("weights", (1.0, math.nan)),
        ("weights", (1.0, math.inf)),
        ("weights", (1e308, 1e308)),
        ("threshold", 1.1),
        ("threshold", math.nan),
        ("alpha", -0.1),
        ("alpha", 2),
        ("beta", -1),
        ("beta", math.inf),
        ("amateur_temperature", 0),
        ("amateur_temperature", math.nan),
    ],
)
def test_a_value_out_of_range_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        BlendParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "members", "field"),
    [
        (BlendParams(weights=(1, 2)), 3, "weights"),
        (BlendParams(kind="contrastive"), 3, "kind"),
        (BlendParams(kind="contrastive"), 1, "kind"),
        (BlendParams(kind="contrastive", weights=(0.7, 0.3)), 2, "weights"),
        (BlendParams(kind="contrastive", weights=(0, 1)), 2, "weights"),
        (BlendParams(kind="single", weights=(0.5, 0.5)), 2, "weights"),
    ],
)
def test_what_does_not_fit_the_members_names_its_field(params: BlendParams, members: int, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        params.require_members(members)
    assert caught.value.field == field


def test_shares_of_a_mixture_are_posterior_probabilities_of_the_members() -> None:
    contributions = attribute_tokens(LOGITS[:, None].expand(2, 3, 3), [0, 1, 2], [0.75, 0.25])
    for token, views in enumerate(contributions):
        probabilities = [float(LOGITS[member, token].exp()) for member in range(2)]
        total = 0.75 * probabilities[0] + 0.25 * probabilities[1]
        assert [math.exp(logprob) for logprob, _, _ in views] == pytest.approx(probabilities)
        assert [share for _, _, share in views] == pytest.approx(
            [0.75 * probabilities[0] / total, 0.25 * probabilities[1] / total]
        )
    assert [[agreed for _, agreed, _ in views] for views in contributions] == [
        [True, False],
        [False, True],
        [False, False],
    ]


def test_members_that_rule_a_token_out_or_do_not_count_have_no_share() -> None:
    logits = torch.tensor([[[0.0, -math.inf]], [[0.0, 0.0]], [[0.0, 0.0]]])
    assert [share for _, _, share in attribute_tokens(logits, [1], [0.5, 0.0, 0.5])[0]] == [0, 0, 1]
    assert [share for _, _, share in attribute_tokens(logits[:1], [1], [1.0])[0]] == [0]


def test_candidates_are_the_best_of_each() -> None:
    union = top_k_union(OWN, 2, [[[4], [0, 4]], [[], [1]]])
    assert union.tolist() == [[True, True, False, False, True], [True, True, False, True, True]]
    assert top_k_union(OWN, 9, []).all()


def test_all_else_is_far_below_in_the_leaders_order() -> None:
    candidates = top_k_union(OWN, 2, [])
    blended = torch.tensor([[-INF, -0.1, -INF, -INF, -INF], [-INF, -INF, -INF, -3.0, -0.5]])
    ranked = rank_others_below(blended, OWN, candidates)
    assert ranked[0, :2].tolist() == pytest.approx([-INF, -0.1])
    assert ranked[0, 2:].tolist() == pytest.approx([-10002.1, -10003.1, -10004.1])
    assert ranked[1, 3:].tolist() == [-3.0, -0.5]
    assert ranked[1, :3].argmax() == 2
    assert ranked[1, :3].max() < -1e4


def test_the_leader_replaces_a_member_without_logits() -> None:
    logits = torch.tensor([[-INF] * 5, [1.0, -INF, -INF, -INF, -INF]])
    assert replace_empty(logits, OWN).tolist() == [OWN[0].tolist(), logits[1].tolist()]


def test_a_members_padding_is_no_candidate() -> None:
    own = torch.tensor([[3.0, 2.0, 1.0]])
    assert top_k_union(own, 1, [[[1, 3]]]).tolist() == [[True, True, False]]
