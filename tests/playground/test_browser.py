"""The page in a real Chromium, by its keyboard and by its pointer, against a server that makes its answers up."""

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.playground.driving import send, tokens_of, wait_until_done
from tests.playground.fake_server import CACHED_SEED, KEY, STEPS, TEXT, Fake

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

pytestmark = pytest.mark.browser

SOURCES = [source for step in STEPS for _, source in step]


def tint(page: "Page", source: str) -> str:
    return str(page.locator(f".card .token.{source}").first.evaluate("span => getComputedStyle(span).backgroundColor"))


def test_tokens_are_coloured_by_how_they_came_to_be(page: "Page", fake: Fake) -> None:
    send(page, "Add two numbers.")
    wait_until_done(page)
    assert tokens_of(page.locator(".card")) == [pair for step in STEPS for pair in step]
    tints = {source: tint(page, source) for source in SOURCES}
    assert len(set(tints.values())) == 4
    page.get_by_label("Colours", exact=True).select_option("none")
    assert {tint(page, source) for source in SOURCES} == {"rgba(0, 0, 0, 0)"}
    assert fake.bodies[0] == {
        "model": "first",
        "messages": [{"role": "user", "content": "Add two numbers."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_details": True,
    }


def test_statistics_and_the_chart_by_position(page: "Page") -> None:
    send(page, "Add two numbers.")
    wait_until_done(page)
    figures = page.locator("#statistics").inner_text()
    assert re.search(r"Acceptance rate\s+58 %", figures)
    assert re.search(r"Acceptance length\s+2\.17", figures)
    assert re.search(r"Tokens/s\s+[\d.]+", figures)
    announced = page.locator("#chart svg").get_attribute("aria-label")
    assert announced == "Drafts accepted up to position 1: 80 %, position 2: 40 %, position 3: 20 %."
    legend = " ".join(page.locator("#legend").inner_text().split())
    assert legend == "accepted · n-gram 1 accepted · drafter 1 accepted 5 recovered 3 bonus 2 plain 1"
    assert re.search(r"n-gram\s+2\s+1, 50 %\s+drafter\s+10\s+6, 60 %", page.locator("#proposers").inner_text())


def test_acceptance_does_not_depend_on_how_chunks_were_cut(page: "Page") -> None:
    joined: list[dict[str, Any]] = [{"source": source} for source in [*SOURCES, "accepted"]]
    positions = page.evaluate(
        """async (tokens) => {
            const { stepsOf } = await import("/page/answers/answer.js");
            const { byPosition } = await import("/page/figures/speculation.js");
            return byPosition(stepsOf(tokens));
        }""",
        joined,
    )
    assert [(p["position"], p["accepted"], p["reached"], p["drafts"]) for p in positions] == [
        (1, 5, 6, 6),
        (2, 2, 3, 6),
        (3, 1, 2, 6),
    ]


def test_tokens_lose_what_a_stop_string_took_back(page: "Page") -> None:
    texts = page.evaluate(
        """async (choices) => {
            const { Answer } = await import("/page/answers/answer.js");
            const answer = new Answer(0);
            for (const choice of choices) answer.take({ choices: [{ index: 0, ...choice }] }, 1);
            answer.settle();
            return answer.tokens.map(({ text }) => text);
        }""",
        [
            {"text": "a", "token_details": [{"id": 1, "text": "a ST", "source": "plain"}]},
            {"text": " ", "token_details": [{"id": 2, "text": "OP", "source": "plain"}], "finish_reason": "stop"},
        ],
    )
    assert texts == ["a ", ""]


def test_members_of_an_ensemble_and_what_they_contributed(page: "Page") -> None:
    assert page.get_by_text("Members", exact=True).is_hidden()
    send(page, "ensemble")
    wait_until_done(page)
    cells = page.locator("#members td").all_inner_texts()
    assert cells == ["qwen", "75 %", "90 %", "llama (gone)", "25 %", "–"]


def test_what_the_members_of_a_panel_said(page: "Page") -> None:
    send(page, "panel")
    wait_until_done(page)
    said = page.locator(".proposals details")
    assert said.locator("summary").all_inner_texts() == ["qwen", "llama"]
    assert not said.nth(1).get_by_text("Four.").is_visible()
    said.nth(1).locator("summary").click()
    assert said.nth(1).locator(".card-text").inner_text() == "Four.\nOr *five*."
    assert page.locator("#members td").first.inner_text() == "qwen (writer)"
    assert "".join(text for text, _ in tokens_of(page.locator(".card"))) == TEXT


def test_a_conversation_goes_on_and_the_last_answer_can_be_had_again(page: "Page", fake: Fake) -> None:
    for count, text in enumerate(["One.", "Two."], 1):
        send(page, text)
        wait_until_done(page, count)
    page.get_by_role("button", name="Regenerate").last.click()
    wait_until_done(page, 2)
    turns = [("user", "One."), ("assistant", TEXT), ("user", "Two.")]
    assert [(turn["role"], turn["content"]) for turn in fake.bodies[2]["messages"]] == turns
    assert fake.bodies[2] == fake.bodies[1]


def test_comparing_shows_both_answers_and_whether_they_are_the_same(page: "Page", fake: Fake) -> None:
    page.get_by_role("switch", name="Compare").click()
    send(page, "Add two numbers.")
    wait_until_done(page, 2)
    assert page.locator(".verdict").inner_text().startswith("Same text")  # and how fast this machine was
    assert {source for _, source in tokens_of(page.locator(".card").nth(1))} == {"plain"}
    assert all("tokens/s" in speed for speed in page.locator(".card .speed").all_inner_texts())
    drafted, plain = fake.bodies
    assert (drafted["speculate"], plain["speculate"]) == (True, False)
    assert drafted["seed"] == plain["seed"]


def test_each_of_two_compared_answers_can_be_copied(page: "Page") -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("switch", name="Compare").click()
    send(page, "differ")
    wait_until_done(page, 2)
    for card, text in enumerate([TEXT, f"{TEXT}!"]):
        page.locator(".card").nth(card).get_by_role("button", name="Copy", exact=True).click()
        page.wait_for_function("async (text) => (await navigator.clipboard.readText()) === text", arg=text)


def test_speeds_are_not_compared_where_an_answer_was_cached(page: "Page") -> None:
    page.get_by_role("switch", name="Compare").click()
    page.get_by_label("Seed", exact=True).fill(str(CACHED_SEED))
    send(page, "Add two numbers.")
    wait_until_done(page, 2)
    assert "cache" in page.locator(".verdict").inner_text()
    assert page.locator(".card .speed").all_inner_texts() == ["cached", "cached"]


def test_the_verdict_does_not_blame_drafts_that_never_ran(page: "Page") -> None:
    page.get_by_role("switch", name="Compare").click()
    send(page, "rest")
    wait_until_done(page, 2)
    verdict = page.locator(".verdict").inner_text()
    assert re.search(r"no drafts ran, so the difference in speed, [\d.]+ ×, is not theirs", verdict)
    assert "Drafts rest: the server measured 0.82 × the speed" in verdict
    assert "no drafts in 13 steps" in page.locator(".summary").first.inner_text()
    assert "no drafts" not in page.locator(".summary").last.inner_text()


@pytest.mark.parametrize("order", ["in turn", "at once"])
def test_comparing_marks_where_texts_differ(page: "Page", order: str) -> None:
    page.get_by_role("switch", name="Compare").click()
    page.get_by_label("Compare", exact=True).last.select_option(order)
    send(page, "differ")
    wait_until_done(page, 2)
    assert f"from character {len(TEXT) + 1} on" in page.locator(".verdict").inner_text()
    assert page.locator(".token.differs").all_inner_texts() == ["!"]


def test_stopping_hangs_up_and_keeps_what_is_there(page: "Page", fake: Fake) -> None:
    send(page, "endless")
    page.locator(".card .token").nth(5).wait_for()
    page.get_by_role("button", name="Stop").click()
    wait_until_done(page)
    assert fake.hung_up.wait(5)
    assert page.locator(".card .summary").inner_text().startswith("stopped · ")
    assert page.get_by_role("button", name="Send").is_visible()


def test_everything_works_by_keyboard_alone(page: "Page", fake: Fake) -> None:
    page.keyboard.type("Add two")  # the text field has the focus
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("numbers.")
    page.keyboard.press("Enter")
    wait_until_done(page)
    assert fake.bodies[0]["messages"][0]["content"] == "Add two\nnumbers."
    page.keyboard.type("endless")
    page.keyboard.press("Enter")
    page.locator(".card").nth(1).locator(".token").nth(5).wait_for()
    page.keyboard.press("Escape")
    wait_until_done(page, 2)
    assert fake.hung_up.wait(5)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "colours"
    page.keyboard.press("ArrowDown")
    assert page.get_by_label("Colours", exact=True).input_value() == ""


def test_arrow_keys_tell_about_each_token(page: "Page") -> None:
    page.get_by_role("switch", name="Alternatives").click()
    send(page, "Add two numbers.")
    wait_until_done(page)
    page.get_by_role("group", name="Tokens of the answer").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    tip = page.get_by_role("tooltip")
    assert "·add" in tip.inner_text()
    assert "a draft token that the target chose" in tip.inner_text()
    assert page.locator("#announcer").inner_text() == "·add: accepted, 90 %; at its position: ·x 90 %, ·y 8 %"
    page.keyboard.press("Escape")
    assert tip.is_hidden()


@pytest.mark.parametrize("kind", ["Chat", "Completion"])
def test_alternatives_are_shown_under_the_pointer(page: "Page", fake: Fake, kind: str) -> None:
    page.locator("label", has_text=kind).click()
    page.get_by_role("switch", name="Alternatives").click()
    page.locator("#text").fill("Add two numbers.")
    page.locator("#send").click()
    wait_until_done(page)
    page.locator(".log:visible .token", has_text="return").hover()
    words = page.get_by_role("tooltip").inner_text()
    assert "recovered: the target's own" in words
    assert re.search(r"·x\s+90 %\s+·y\s+8 %", words)
    wanted = {"Chat": {"logprobs": True, "top_logprobs": 5}, "Completion": {"logprobs": 5}}[kind]
    assert wanted.items() <= fake.bodies[0].items()


def test_a_completion_goes_on_from_its_prompt(page: "Page", fake: Fake) -> None:
    page.locator("label", has_text="Completion").click()
    page.get_by_label("Text to continue").fill("# Adds.\n")
    page.keyboard.press("Control+Enter")
    wait_until_done(page)
    assert page.locator(".card-text").text_content() == f"# Adds.\n{TEXT}"
    page.get_by_role("button", name="Go on from here").click()
    assert page.get_by_label("Text to continue").input_value() == f"# Adds.\n{TEXT}"
    assert (fake.bodies[0]["prompt"], "messages" in fake.bodies[0]) == ("# Adds.\n", False)


def test_parameters_are_sent_and_outlive_a_reload(page: "Page", fake: Fake) -> None:
    page.locator("#endpoint").select_option("second")
    for summary in ("Where it ends", "Structure and more"):
        page.get_by_text(summary, exact=True).click()
    page.get_by_label("Temperature", exact=True).fill("0.5")
    page.get_by_label("Use drafts", exact=True).click()
    page.get_by_label("Stop at", exact=True).fill("\\n\\n\nend")
    page.get_by_label("The answer must be", exact=True).select_option("one of some texts")
    page.get_by_label("Schema, expression, texts or grammar", exact=True).fill("yes\nno")
    page.get_by_label("More fields, as JSON", exact=True).fill('{"eta_cutoff": 0.001}')
    page.reload()
    page.get_by_text("target target").wait_for()
    page.locator("#endpoint").select_option("second")
    send(page, "Add two numbers.")
    wait_until_done(page)
    expected = {
        "model": "second",
        "temperature": 0.5,
        "speculate": False,
        "stop": ["\n\n", "end"],
        "structured_outputs": {"choice": ["yes", "no"]},
        "eta_cutoff": 0.001,
    }
    assert expected.items() <= fake.bodies[0].items()


def test_help_of_a_parameter(page: "Page") -> None:
    button = page.get_by_role("button", name="Help: Temperature")
    assert page.locator("#field-temperature-help").is_hidden()
    button.click()
    assert "most probable token" in page.locator("#field-temperature-help").inner_text()
    assert button.get_attribute("aria-expanded") == "true"


def test_a_field_that_the_server_refuses_is_marked(page: "Page") -> None:
    page.get_by_label("Temperature", exact=True).fill("9")
    send(page, "Add two numbers.")
    page.get_by_role("alert").wait_for()
    assert "temperature: should be at most 2" in page.get_by_role("alert").inner_text()
    assert page.evaluate("document.activeElement.id") == "field-temperature"
    assert page.get_by_label("Temperature", exact=True).get_attribute("aria-invalid") == "true"
    assert page.get_by_label("Message", exact=True).input_value() == "Add two numbers."


def test_help_is_no_stop_of_the_tab_key_but_f1_shows_it(page: "Page") -> None:
    page.get_by_label("Temperature", exact=True).focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "field-top_p"
    page.keyboard.press("F1")
    assert "this probable" in page.locator("#field-top_p-help").inner_text()


@pytest.mark.parametrize("kind", ["Chat", "Completion"])
def test_a_text_that_is_too_long_is_told_where_it_is_written(page: "Page", kind: str) -> None:
    page.locator("label", has_text=kind).click()
    page.locator("#text").fill("too long")
    page.locator("#send").click()
    problem = page.get_by_role("alert")
    problem.wait_for()
    assert "at most 1024 fit" in problem.inner_text()
    assert problem.evaluate("element => element.closest('form').id") == "composer"
    assert page.locator("#text").input_value() == "too long"
    assert page.evaluate("document.activeElement.id") == "text"
    assert page.locator(".card").count() == 0
    page.locator("#text").fill("Add two numbers.")
    page.locator("#send").click()
    wait_until_done(page)
    assert problem.is_hidden()


def test_a_problem_goes_when_the_text_is_emptied(page: "Page") -> None:
    send(page, "too long")
    page.get_by_role("alert").wait_for()
    page.locator("#text").fill("")
    assert page.get_by_role("alert").is_hidden()


def test_a_field_that_makes_no_sense_is_not_sent(page: "Page", fake: Fake) -> None:
    page.get_by_text("Structure and more", exact=True).click()
    page.get_by_label("More fields, as JSON", exact=True).fill("{")
    send(page, "Add two numbers.")
    assert "This is not JSON" in page.locator(".field .wrong").inner_text()
    assert fake.bodies == []


def test_an_error_in_mid_stream_is_shown_below_what_came(page: "Page") -> None:
    send(page, "break")
    wait_until_done(page)
    assert "no target is left" in page.get_by_role("alert").inner_text()
    assert page.locator(".card .card-text .tokens").inner_text() == "def add(a, b):"


def test_the_key_is_asked_for_and_stays_in_the_tab(context: "BrowserContext", locked: Fake) -> None:
    page = context.new_page()
    page.goto(locked.url)
    page.get_by_text("A valid API key is needed.").wait_for()
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.get_by_text("target target").wait_for()
    page.reload()
    page.get_by_text("target target").wait_for()
    assert page.evaluate("Object.keys(localStorage)") == []
    assert context.cookies() == []
    page.close()


def test_the_request_as_a_command_does_not_tell_the_key(page: "Page") -> None:
    page.get_by_label("Message", exact=True).fill("It's here.")
    page.get_by_text("API key", exact=True).click()
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_text("This request as a command").click()
    page.get_by_text("curl -N").wait_for()
    command = page.locator("#curl").inner_text()
    assert command.startswith("curl -N http://127.0.0.1:")
    assert "It'\\''s here." in command
    assert "$CONSORT_API_KEY" in command
    assert KEY not in command
