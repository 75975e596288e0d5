"""Beam search on tables: cases by hand, comparison with all possible texts, groups."""

import math
from collections import Counter

import pytest
import torch

from decoding.beams.options import BeamOptions, EarlyStopping
from decoding.beams.search import BeamSearch, Fork, beam_noise
from decoding.errors import InvalidRequestError
from decoding.sampling.noise import gumbel
from decoding.sampling.noise_keys import noise_key
from tests.support.beam_worlds import log_prob, random_world, ranked, search, table, texts

END = 0


THEN_END = [1.0, 0.0, 0.0]
GARDEN = table(
    {(): [0.1, 0.5, 0.4], (1,): [0.2, 0.4, 0.4], (2,): [0.9, 0.05, 0.05], (1, 1): [0.5, 0.3, 0.2]}, others=THEN_END
)


def test_two_beams_find_what_greedy_decoding_misses() -> None:
    """By hand: greedy takes 1 (0.5), but 2 END has 0.4 · 0.9 = 0.36, more than any text that begins with 1."""
    options = BeamOptions(num_beams=2, num_return_sequences=2, length_penalty=0.0, early_stopping="never")
    best = search(GARDEN, options, max_tokens=3, end=END)
    assert [hypothesis.tokens for hypothesis in best] == [[2, END], [1, 2, END]]
    assert [math.exp(hypothesis.score) for hypothesis in best] == pytest.approx([0.36, 0.2])
    assert [hypothesis.finish for hypothesis in best] == ["stop", "stop"]


def test_what_forks() -> None:
    beams = BeamSearch(BeamOptions(num_beams=2), max_tokens=3, end_token_ids=[END])
    assert beams.advance(torch.tensor([[0.1, 0.5, 0.4]]).log()) == Fork([0, 0], [1, 2])
    assert beams.live == [[1], [2]]
    both_from_the_second = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.35, 0.45]]).log()
    assert beams.advance(both_from_the_second) == Fork([1, 1], [2, 1])
    assert beams.live == [[2, 2], [2, 1]]
    assert beams.advance(torch.tensor([[0.3, 0.3, 0.4], [0.2, 0.4, 0.4]]).log()) == Fork([], [])
    assert beams.done
    assert [(hypothesis.tokens, hypothesis.finish) for hypothesis in beams.best()] == [([1, END], "stop")]


@pytest.mark.parametrize(("early_stopping", "steps"), [(True, 2), (False, 3), ("never", 4)])
def test_when_it_stops(early_stopping: EarlyStopping, steps: int) -> None:
    """By hand, two beams, length penalty 1.

    END is finished at once, with log 0.35. After two steps 2 END is too, with log 0.18 / 2 = −0.86: enough for True.
    After three, 1 1 END takes the place of END, and the live text has log 0.0486 / 3 = −1.01, which is no gain: enough
    for False. But it would be −0.76 at max_tokens, 4: not enough for "never".
    """
    world = table(
        {(): [0.35, 0.45, 0.2], (1,): [0.1, 0.9, 0.0], (2,): [0.9, 0.1, 0.0], (1, 1): [0.8, 0.12, 0.08]},
        others=THEN_END,
    )
    options = BeamOptions(num_beams=2, early_stopping=early_stopping)
    taken: list[list[list[int]]] = []
    search(world, options, max_tokens=4, end=END, steps=taken)
    assert len(taken) == steps


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
def test_wide_beams_find_the_best_of_all_texts(seed: int, length_penalty: float) -> None:
    world = random_world(seed, 4)
    options = BeamOptions(num_beams=81, num_return_sequences=10, length_penalty=length_penalty, early_stopping="never")
    best = search(world, options, max_tokens=4, end=END)
    expected = ranked(world, texts(4, 4, END), length_penalty)[:10]
    assert [hypothesis.tokens for hypothesis in best] == [text for _, text in expected]
    assert [hypothesis.score for hypothesis in best] == pytest.approx([score for score, _ in expected], abs=1e-5)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("num_beams", [1, 2, 3, 5])
def test_scores_and_ends_are_those_of_the_texts(early_stopping: EarlyStopping, num_beams: int) -> None:
    for seed in range(20):
        world = random_world(seed, 6)
        options = BeamOptions(num_beams=num_beams, num_return_sequences=num_beams, early_stopping=early_stopping)
        best = search(world, options, max_tokens=7, end=END)
        assert len(best) == num_beams == len({tuple(hypothesis.tokens) for hypothesis in best})
        assert [hypothesis.score for hypothesis in best] == sorted(
            (hypothesis.score for hypothesis in best), reverse=True
        )
        for hypothesis in best:
            assert hypothesis.log_prob == pytest.approx(log_prob(world, hypothesis.tokens), abs=1e-5)
            assert hypothesis.score == pytest.approx(hypothesis.log_prob / len(hypothesis.tokens))
            assert END not in hypothesis.tokens[:-1]
            assert hypothesis.finish == ("stop" if hypothesis.tokens[-1] == END else "length")
            assert hypothesis.finish == "stop" or len(hypothesis.tokens) == 7


def test_what_is_impossible_is_never_chosen() -> None:
    """Only two texts have any probability, but there are eight beams."""
    world = table({(): [0.0, 1.0, 0.0], (1,): [0.5, 0.0, 0.5]}, others=THEN_END)
    options = BeamOptions(num_beams=8, num_return_sequences=8)
    best = search(world, options, max_tokens=3, end=END)
    assert sorted(hypothesis.tokens for hypothesis in best) == [[1, END], [1, 2, END]]


def test_drawn_continuations_are_those_of_the_seed() -> None:
    world = random_world(3, 6)
    options = BeamOptions(num_beams=3, num_return_sequences=3)
    drawn = [search(world, options, max_tokens=6, end=END, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_single_step_draws_without_replacement() -> None:
    """Two of four tokens: each pair is as frequent as with sequential draws. False-alarm probability: at most 1e-7.

    20 000 seeds; the standard error of a share is at most 0.0036, and 6 of them are allowed.
    """
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    keys = [noise_key(seed, 5) for seed in range(20_000)]
    drawn = (probs.log() + gumbel(torch.tensor(keys, dtype=torch.int32), 4)).topk(2).indices.tolist()
    for seed, pair in enumerate(drawn[:200]):  # of the two that are drawn, the more probable one goes on
        beams = BeamSearch(BeamOptions(num_beams=1), max_tokens=2)
        assert beams.advance(probs.log()[None], beam_noise(seed, 5, 1, 4)).tokens == [min(pair)]
    pairs = Counter(map(frozenset, drawn))
    for a, b in [(0, 1), (0, 3), (2, 3)]:
        first_prob, second_prob = float(probs[a]), float(probs[b])
        expected = first_prob * second_prob / (1 - first_prob) + second_prob * first_prob / (1 - second_prob)
        assert pairs[frozenset({a, b})] / 20_000 == pytest.approx(expected, abs=6 * 0.0036)


def test_beams_see_independent_noise() -> None:
    noise = beam_noise(7, 11, 3, 5)
    assert noise.unique().numel() == 15
    assert torch.equal(noise[:2], beam_noise(7, 11, 2, 5))
    assert not torch.equal(noise, beam_noise(7, 12, 3, 5))


def test_groups_by_hand() -> None:
    """Two groups of one beam, penalty 1: to the second, 1 has log 0.5 − 1, so it takes 2; then nothing is equal."""
    options = BeamOptions(num_beams=2, num_return_sequences=2, num_beam_groups=2, diversity_penalty=1.0)
    steps: list[list[list[int]]] = []
    best = search(GARDEN, options, max_tokens=2, end=END, steps=steps)
    assert steps == [[[1], [2]], []]
    assert [hypothesis.tokens for hypothesis in best] == [[2, END], [1, 1]]
    assert best[0].log_prob == pytest.approx(math.log(0.36))
    assert best[1].log_prob == pytest.approx(math.log(0.2))


@pytest.mark.parametrize("seed", range(5))
def test_the_first_group_is_an_ordinary_search_and_the_penalty_counts_in_the_others(seed: int) -> None:
    world = random_world(seed, 8)
    alone: list[list[list[int]]] = []
    search(world, BeamOptions(num_beams=2, early_stopping="never"), max_tokens=5, steps=alone)
    options = BeamOptions(
        num_beams=6, num_return_sequences=6, num_beam_groups=3, diversity_penalty=50.0, early_stopping="never"
    )
    steps: list[list[list[int]]] = []
    best = search(world, options, max_tokens=5, steps=steps)
    for grouped, ordinary in zip(steps, alone, strict=True):
        assert grouped[:2] == ordinary
        chosen = [{text[-1] for text in grouped[start : start + 2]} for start in range(0, len(grouped), 2)]
        assert sum(map(len, chosen)) == len(set().union(*chosen))
    assert len({tuple(hypothesis.tokens) for hypothesis in best}) == 6


def test_what_several_groups_found_comes_last() -> None:
    world = table({(): [0.0, 0.99, 0.01], (1,): [1.0, 0.0, 0.0]}, others=THEN_END)
    options = BeamOptions(num_beams=2, num_return_sequences=2, num_beam_groups=2, diversity_penalty=0.1)
    assert [hypothesis.tokens for hypothesis in search(world, options, max_tokens=4, end=END)] == [[1, END], [1, END]]
    wider = BeamOptions(num_beams=4, num_return_sequences=3, num_beam_groups=2, diversity_penalty=0.1)
    assert [hypothesis.tokens for hypothesis in search(world, wider, max_tokens=4, end=END)] == [
        [1, END],
        [2, END],
        [1, END],
    ]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("num_beams", {"num_beams": 0}),
        ("num_beams", {"num_beams": 1000}),
        ("num_return_sequences", {"num_beams": 2, "num_return_sequences": 3}),
        ("length_penalty", {"num_beams": 2, "length_penalty": math.nan}),
        ("num_beam_groups", {"num_beams": 4, "num_beam_groups": 3}),
        ("num_beam_groups", {"num_beams": 4, "num_beam_groups": 0}),
        ("diversity_penalty", {"num_beams": 4, "num_beam_groups": 2}),
        ("diversity_penalty", {"num_beams": 4, "diversity_penalty": -1.0}),
        ("force_words", {"num_beams": 4, "force_words_ids": ((),)}),
        ("force_words", {"num_beams": 4, "force_words_ids": (((),),)}),
    ],
)
def test_impossible_options_are_refused(field: str, options: dict) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        BeamOptions(**options)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [50.1, -300, 1e308, math.inf, math.nan])
def test_length_penalties_are_bounded(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="length_penalty must be from -50 to 50"):
        BeamOptions(num_beams=2, length_penalty=value)


@pytest.mark.parametrize("value", [-1, 1e39, math.inf, math.nan])
def test_diversity_penalties_are_bounded(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="diversity_penalty must be from 0"):
        BeamOptions(num_beams=2, num_beam_groups=2, diversity_penalty=value)
