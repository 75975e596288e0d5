"""The policy learns from steps, offers and verdicts, and no estimate is final."""

from types import SimpleNamespace
from typing import cast

import pytest

from actors.ensemble.rounds import EnsembleRounds
from actors.verifier.policy import SpeculationPolicy
from actors.verifier.proposers import Delay
from actors.verifier.rows import TargetRow
from actors.verifier.step_cost import StepCost
from actors.wire.messages import Admit, Ensemble, Member, ReplicaAddress
from decoding.blending.params import EnsembleOptions
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner

STEP_S = 0.030


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> SpeculationPolicy:
    """A policy for a target whose step takes 30 ms, and 1 ms more for each further token."""
    cost = StepCost([1, 101], [STEP_S, STEP_S + 0.1])
    monkeypatch.setattr("actors.verifier.policy.measure_step_cost", lambda runner: cost)
    return new_planner()


def new_planner(*, trees_are_exact: bool = True) -> SpeculationPolicy:
    return SpeculationPolicy(cast(Runner, SimpleNamespace(trees_are_exact=trees_are_exact)), adaptive=True)


def running_row(policy: SpeculationPolicy, request_id: int = 1) -> TargetRow:
    params = SamplingParams(max_tokens=10_000, temperature=0)
    row = TargetRow("c", Admit(request_id, [1, 2, 3], 3, params, 4, drafter=True), acceptance=policy.acceptance)
    row.cached = 2
    return row


class Story:
    """Steps of one row whose drafter takes `token_s` per token and guesses right or not."""

    def __init__(self, policy: SpeculationPolicy) -> None:
        self.policy, self.row, self.now_s = policy, running_row(policy), 0.0

    def step(self, *, token_s: float, right: bool) -> int:
        """Take one step. Returns how many draft tokens it verified."""
        row, policy = self.row, self.policy
        policy.plan([row], {row.key}, self.now_s)
        ready_s = token_s * row.drafts.useful_length
        if row.drafts.useful_length and ready_s <= row.wait_s(self.now_s) + STEP_S:
            self.now_s += min(ready_s, row.wait_s(self.now_s))
            row.drafts.trie.offer(len(row.tokens), [7] * row.drafts.useful_length)
            policy.note_offer(row, self.now_s)
        else:
            self.now_s += row.wait_s(self.now_s)
        draft = policy.choose_drafts([row], self.now_s)[0].tokens
        accepted = len(draft) if right else 0
        policy.note_verdict(row, drafted=len(draft), accepted=accepted)
        policy.note_step(1 + len(draft), STEP_S)
        self.now_s += STEP_S
        row.drafts.trie.commit([7] * accepted + [8])
        row.cached = len(row.tokens) - 1
        return len(draft)


def test_good_drafts_are_used(policy: SpeculationPolicy) -> None:
    story = Story(policy)
    assert sum(story.step(token_s=0.001, right=True) for _ in range(50)) > 150


def test_useless_drafts_are_given_up_and_tried_again_now_and_then(policy: SpeculationPolicy) -> None:
    story = Story(policy)
    lengths = [story.step(token_s=0.001, right=False) for _ in range(600)]
    assert sum(lengths[300:]) < 0.25 * 300
    assert sum(lengths[300:]) > 0


def test_a_useless_drafter_does_not_end_drafting_for_good(policy: SpeculationPolicy) -> None:
    story = Story(policy)
    for _ in range(500):
        story.step(token_s=0.001, right=False)
    lengths = [story.step(token_s=0.001, right=True) for _ in range(500)]
    assert sum(lengths[-100:]) > 300
    fresh = Story(policy)
    assert sum(fresh.step(token_s=0.001, right=True) for _ in range(100)) > 200


def test_a_slow_spell_of_the_drafter_does_not_end_waiting_for_good(policy: SpeculationPolicy) -> None:
    story = Story(policy)
    for _ in range(100):
        story.step(token_s=0.5, right=True)
    lengths = [story.step(token_s=0.001, right=True) for _ in range(600)]
    assert sum(lengths[-100:]) > 300


def test_a_new_rows_wait_does_not_prolong_the_others(policy: SpeculationPolicy) -> None:
    old, new = running_row(policy, 1), running_row(policy, 2)
    policy.plan([old], {old.key}, 1.0)
    deadline_s = old.drafts.deadline_s
    policy.plan([old, new], {new.key}, 1.01)
    assert old.drafts.deadline_s == deadline_s
    assert new.drafts.deadline_s > deadline_s


def test_leaders_plan_with_what_the_slowest_member_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With slow members more draft tokens pay than by the cost of the leader's own steps."""
    sizes = [1, 2, 3, 4, 5]
    cost = StepCost(sizes, [0.02 + 0.01 * size for size in sizes])
    monkeypatch.setattr("actors.verifier.policy.measure_step_cost", lambda runner: cost)
    policy = new_planner()
    alone, leader = running_row(policy, 1), running_row(policy, 2)
    leader.ensemble = EnsembleRounds(Ensemble("leader", [Member("m", ReplicaAddress("m", "m"))], EnsembleOptions()))
    for _ in range(100):
        for size in sizes:
            policy.note_step(size, cost(size))
            policy.note_ensemble_round(size, 0.2 + 0.01 * size)
    for row in (alone, leader):
        policy.plan([row], {row.key}, 0.0)
    assert 0 < alone.drafts.useful_length < leader.drafts.useful_length == 4


def test_heads_draft_as_much_as_pays_for_the_time_that_drafting_takes(policy: SpeculationPolicy) -> None:
    row = running_row(policy)
    row.drafts.drafter, row.drafts.expected, row.drafts.heads = False, False, True
    lengths = []
    for token_s in (0.0, 0.01, 0.1):
        for _ in range(100):
            policy.note_drafting(Delay(token_s, token_s))
        policy.plan([row], {row.key}, 0.0)
        lengths.append(row.drafts.in_step_length)
    assert lengths[0] == 4 > lengths[1] > lengths[2] == 0
    for _ in range(1000):
        policy.plan([row], set(), 0.0)
    assert row.drafts.in_step_length > 0  # the estimate fades


def test_what_drafting_costs_is_remembered_during_plain_decoding(
    policy: SpeculationPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = running_row(policy)
    row.drafts.drafter, row.drafts.expected, row.drafts.heads = False, False, True
    for _ in range(100):
        policy.note_drafting(Delay(0.1, 0.1))
    with monkeypatch.context() as resting:
        resting.setattr(policy, "speculates", lambda: False)
        for _ in range(1000):
            policy.plan([row], set(), 0.0)
    policy.plan([row], {row.key}, 0.0)
    assert row.drafts.in_step_length == 0


def test_a_hiccup_while_heads_draft_does_not_stop_them(policy: SpeculationPolicy) -> None:
    row = running_row(policy)
    lengths = []
    for token_s in (*[0.001] * 20, 0.5):
        policy.note_drafting(Delay(token_s, token_s))
        policy.plan([row], {row.key}, 0.0)
        lengths.append(row.drafts.in_step_length)
    assert lengths[-1] == lengths[-2] > 0


def test_the_time_of_heads_does_not_let_a_drafter_in_another_process_rest(policy: SpeculationPolicy) -> None:
    row = running_row(policy)
    row.drafts.heads = True
    for _ in range(10):
        policy.note_drafting(Delay(0.1, 0.1))
    policy.plan([row], {row.key}, 0.0)
    assert row.drafts.in_step_length == 0
    assert row.drafts.wanted_length == row.drafts.useful_length == 4
    assert row.wait_s(0.0) > 0


def test_more_is_verified_once_time_was_spent_on_the_step(policy: SpeculationPolicy) -> None:
    row = running_row(policy)
    row.drafts.trie.offer(3, [5, 6, 7, 8], None, [0.5, 0.2, 0.2, 0.2])
    counts = [len(policy.choose_drafts([row], 0.0, drafting_s=drafting_s)[0].tokens) for drafting_s in (0.0, 0.1, 1.0)]
    assert counts[0] < counts[1] <= counts[2]


def speculated_share(
    policy: SpeculationPolicy, *, drafted_step_s: float, tokens: float, prompts_s: float = 0.0
) -> float:
    """Return the share of the steps after the first minute that were speculated.

    Each step has eight rows, and takes 30 ms without drafts. Before it, 64 tokens of prompts take 0.2 s.

    drafted_step_s: seconds of a step with drafts.
    tokens: committed per row by a step with drafts.
    prompts_s: seconds by which drafters slow the prompts down; 0: there are no prompts.
    """
    rows = [running_row(policy, request_id) for request_id in range(8)]
    policy.active_rows, seconds, shares = len(rows), 0.0, []
    while seconds < 180:
        speculates = policy.speculates()
        prefill_s = 0.2 + prompts_s * speculates
        if prompts_s:
            policy.note_prefill(64, prefill_s)
        step_s = drafted_step_s if speculates else STEP_S
        policy.note_step(24 if speculates else 8, step_s)
        policy.note_round(rows, round(8 * tokens) if speculates else 8, step_s, drafted=speculates)
        seconds += step_s + prefill_s * (prompts_s > 0)
        shares += [speculates] * (seconds > 60)
    return sum(shares) / len(shares)


def test_a_step_that_commits_nothing_is_no_part_of_a_comparison(policy: SpeculationPolicy) -> None:
    """As one whose only row was cancelled, or wanted its prompt's log-probabilities alone."""
    policy.note_round([running_row(policy)], 0, STEP_S, drafted=False)
    assert policy.speculates()


def test_steps_that_practice_slows_are_no_part_of_a_comparison(policy: SpeculationPolicy) -> None:
    """A trial of drafts that was lost to the start of a server would not be repeated for a minute or more."""
    rows = [running_row(policy)]
    for _ in range(9):
        policy.note_round(rows, 1, 20 * STEP_S, drafted=policy.speculates())
    assert not policy.speculates()
    policy.take_cost(StepCost([1, 101], [STEP_S, STEP_S + 0.1]))
    assert policy.speculates()


def test_what_drafters_take_from_every_step_is_not_taken_for_the_cost_of_plain_ones(policy: SpeculationPolicy) -> None:
    """Drafts slow decoding down by a third, but would win against plain steps at the cost of steps with drafts."""
    assert speculated_share(policy, drafted_step_s=2.8 * STEP_S, tokens=2) < 0.05


def test_what_drafters_take_from_prompts_counts(policy: SpeculationPolicy) -> None:
    """Drafts speed up the steps, but slow down the prompts by more."""
    assert speculated_share(policy, drafted_step_s=1.5 * STEP_S, tokens=2) > 0.9
    slowed = new_planner()
    assert speculated_share(slowed, drafted_step_s=1.5 * STEP_S, tokens=2, prompts_s=0.6) < 0.05


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize(("trees_are_exact", "expected"), [(True, [[5, 8, 6]]), (False, [[5, 6]])])
def test_chains_are_verified_where_trees_round_differently(trees_are_exact: bool, expected: list[list[int]]) -> None:
    policy = new_planner(trees_are_exact=trees_are_exact)
    row = running_row(policy)
    row.drafts.trie.offer(3, [5, 8, 6], [-1, -1, 0], [0.9, 0.8, 0.5])
    row.drafts.wanted_length = 3
    assert [draft.tokens for draft in policy.choose_drafts([row], 0.0)] == expected


def test_a_delay_of_the_machine_makes_no_work_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow forward with a short chunk makes more tokens look cheaper than fewer."""
    sizes = [1, 2, 3, 5, 9, 17, 33, 65, 129]
    cost = StepCost(sizes, [STEP_S + 0.001 * tokens for tokens in sizes])
    monkeypatch.setattr("actors.verifier.policy.measure_step_cost", lambda runner: cost)
    policy = new_planner()
    work_s: list[float] = []
    monkeypatch.setattr(policy.trial, "note", lambda *given, **values: work_s.append(values["work_s"]))
    monkeypatch.setattr(type(policy.trial), "is_resting", True)
    policy.active_rows = 8
    rows = [running_row(policy, request_id) for request_id in range(8)]
    for seconds, prompt_tokens in ((3.0, 1), (STEP_S, 100), (STEP_S, 100), (STEP_S, 60)):
        policy.note_round(rows, 8, seconds, drafted=False, prompt_tokens=prompt_tokens)
    assert min(work_s) > 0
