"""Several answers to one request, member colours, and tool calls, in a real Chromium."""

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.playground.driving import send, tokens_of, wait_until_done
from tests.playground.fake_server import STEPS, TEXT, Fake

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLED = [
    {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}},
    {"id": "call-2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
]


def choose_blend(page: "Page") -> None:
    page.locator("#endpoint").select_option("blend")


def set_tools(page: "Page", text: str) -> None:
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Functions", exact=True).fill(text)


def test_tokens_of_a_blend_are_coloured_by_member(page: "Page") -> None:
    colours = page.get_by_label("Colours", exact=True)
    assert colours.locator("[value=member]").is_disabled()
    choose_blend(page)
    assert colours.input_value() == "member"
    send(page, "Add two numbers.")
    wait_until_done(page)
    marks = page.locator(".card .token").evaluate_all("spans => spans.map((span) => span.dataset.member)")
    texts = [text for step in STEPS for text, _ in step]
    expected = ["agreed" if " " in text else "0" if text == "return" else "1" for text in texts]
    names = dict(zip(marks, expected, strict=True))
    assert [names[mark] for mark in marks] == expected
    assert len(names) == 3
    assert page.locator("#legend").inner_text().split() == ["agreed", "8", "qwen", "1", "llama", "4"]
    page.get_by_label("Colours", exact=True).select_option("by origin")
    assert page.locator("#legend").inner_text().split()[:4] == ["accepted", "·", "n-gram", "1"]
    page.locator("#endpoint").select_option("first")
    assert colours.input_value() == "source"


def test_what_members_thought_of_a_token_is_told(page: "Page") -> None:
    choose_blend(page)
    send(page, "Add two numbers.")
    wait_until_done(page)
    page.locator(".token", has_text="return").hover()
    words = page.get_by_role("tooltip").inner_text()
    assert re.search(r"qwen\s+90 %, p 61 % ✓\s+llama\s+10 %, p 78 %$", words)
    page.get_by_role("group", name="Tokens of the answer").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#announcer").inner_text() == "def: plain; qwen 20 %, llama 80 %"


def test_several_answers_stand_side_by_side_and_one_is_gone_on_with(page: "Page", fake: Fake) -> None:
    page.get_by_label("Answers", exact=True).fill("3")
    send(page, "Add two numbers.")
    wait_until_done(page, 3)
    assert fake.bodies[0]["n"] == 3
    for index in range(3):
        assert "".join(text for text, _ in tokens_of(page.locator(".card").nth(index))) == TEXT
    assert page.locator(".together").inner_text().startswith("3 answers: 39 tokens · ")
    assert re.search(r"Steps\s+6\s+Tokens\s+13|6\s+Steps\s+13\s+Tokens", page.locator("#statistics").inner_text())
    radios = page.get_by_role("radio", name="Choose")
    assert [radios.nth(index).is_checked() for index in range(3)] == [True, False, False]
    radios.first.focus()
    page.keyboard.press("ArrowDown")
    assert radios.nth(1).is_checked()
    send(page, "Go on.")
    wait_until_done(page, 6)
    roles = [turn["role"] for turn in fake.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert [radios.nth(index).is_disabled() for index in range(6)] == [True] * 3 + [False] * 3


def test_an_answer_is_only_compared_alone(page: "Page", fake: Fake) -> None:
    page.get_by_role("switch", name="Compare").click()
    page.get_by_label("Answers", exact=True).fill("2")
    send(page, "Add two numbers.")
    assert "leave this blank" in page.locator(".field .wrong").inner_text()
    assert fake.bodies == []


def test_a_refusal_of_several_answers_is_told_once(page: "Page") -> None:
    page.get_by_label("Answers", exact=True).fill("3")
    page.get_by_label("Temperature", exact=True).fill("9")
    send(page, "Add two numbers.")
    page.get_by_role("alert").wait_for()
    assert page.get_by_role("alert").count() == 1


def test_calls_are_shown_and_their_results_sent(page: "Page", fake: Fake) -> None:
    set_tools(page, json.dumps(TOOLS))
    send(page, "call")
    wait_until_done(page)
    assert fake.bodies[0]["tools"] == TOOLS
    assert page.locator(".call-name").all_inner_texts() == ["weather", "clock"]
    assert page.locator(".call-arguments").all_inner_texts() == ['{\n  "city": "Ulm"\n}', "{}"]
    assert page.locator(".card > .answer-text .card-text").inner_text() == "Well."
    assert page.locator(".raw .card-text").is_hidden()
    page.get_by_label("Result of call 1").fill("sunny")
    page.get_by_label("Result of call 2").focus()
    page.keyboard.type("noon")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # on the button
    wait_until_done(page, 2)
    question, turn, *results = fake.bodies[1]["messages"]
    assert question["content"] == "call"
    assert turn == {"role": "assistant", "content": "Well. ", "tool_calls": CALLED}
    assert results == [
        {"role": "tool", "tool_call_id": "call-1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call-2", "content": "noon"},
    ]
    page.get_by_role("button", name="Regenerate").last.click()
    wait_until_done(page, 2)
    assert fake.bodies[2] == fake.bodies[1]
    send(page, "Thanks.")
    wait_until_done(page, 3)
    roles = [turn["role"] for turn in fake.bodies[3]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]


def test_what_is_said_after_a_call_takes_its_results_along(page: "Page", fake: Fake) -> None:
    set_tools(page, json.dumps(TOOLS))
    send(page, "call")
    wait_until_done(page)
    page.get_by_label("Result of call 1").fill("sunny")
    send(page, "And tomorrow?")
    wait_until_done(page, 2)
    contents = [turn["content"] for turn in fake.bodies[1]["messages"]]
    assert contents == ["call", "Well. ", "sunny", "", "And tomorrow?"]
    assert page.get_by_role("button", name="Send results").is_hidden()


@pytest.mark.parametrize(("text", "problem"), [("{}", "should be a JSON array"), ("[", "This is not JSON")])
def test_tools_that_make_no_sense_are_not_sent(page: "Page", fake: Fake, text: str, problem: str) -> None:
    set_tools(page, text)
    send(page, "Add two numbers.")
    assert problem in page.locator(".field .wrong").inner_text()
    assert fake.bodies == []


def test_completions_have_no_tools(page: "Page", fake: Fake) -> None:
    set_tools(page, json.dumps(TOOLS))
    page.locator("label", has_text="Completion").click()
    assert page.get_by_text("Tools", exact=True).is_hidden()
    page.locator("#text").fill("Add")
    page.locator("#send").click()
    wait_until_done(page)
    assert "tools" not in fake.bodies[0]
