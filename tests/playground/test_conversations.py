"""Conversations in a real Chromium: versions, what the browser keeps, and replicas."""

from typing import TYPE_CHECKING

import pytest

from tests.playground.driving import send, wait_until_done
from tests.playground.fake_server import TEXT, Fake

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def converse(page: "Page", *texts: str) -> None:
    for count, text in enumerate(texts, 1):
        send(page, text)
        wait_until_done(page, count)


def said(body: dict[str, list[dict[str, str]]]) -> list[str]:
    return [turn["content"] for turn in body["messages"]]


def test_any_answer_can_be_had_again_and_both_versions_stay(page: "Page", fake: Fake) -> None:
    converse(page, "One.", "Two.")
    page.get_by_role("button", name="Regenerate").first.click()
    wait_until_done(page)
    assert said(fake.bodies[2]) == ["One."]
    assert page.locator(".asked").all_inner_texts() == ["One."]
    assert page.get_by_text("2 of 2").is_visible()
    page.get_by_role("button", name="Earlier version").click()
    assert page.locator(".asked").all_inner_texts() == ["One.", "Two."]


def test_an_answer_that_ended_by_its_length_can_go_on(page: "Page", fake: Fake) -> None:
    converse(page, "cut")
    assert "max_tokens" not in fake.bodies[0]
    page.get_by_role("button", name="Continue", exact=True).click()
    page.get_by_text("More.").wait_for()
    wait_until_done(page)
    assert fake.bodies[1]["messages"][-1] == {"role": "assistant", "content": TEXT}
    assert (fake.bodies[1]["continue_final_message"], fake.bodies[1]["add_generation_prompt"]) == (True, False)
    assert page.locator(".card").count() == 1
    assert page.get_by_role("button", name="Continue", exact=True).count() == 0  # it ended by itself
    assert page.get_by_role("button", name="Regenerate").count() == 1
    assert "".join(page.locator(".card .token").all_text_contents()) == f"{TEXT} More."
    send(page, "Next.")
    wait_until_done(page, 2)
    assert said(fake.bodies[2]) == ["cut", f"{TEXT} More.", "Next."]


def test_any_question_can_be_changed(page: "Page", fake: Fake) -> None:
    converse(page, "One.", "Two.")
    page.get_by_role("button", name="Edit the question").last.click()
    page.get_by_label("The question", exact=True).fill("Three.")
    page.get_by_role("button", name="Ask again").click()
    wait_until_done(page, 2)
    assert said(fake.bodies[2]) == ["One.", TEXT, "Three."]
    assert page.locator(".asked").all_inner_texts() == ["One.", "Three."]


def test_an_editor_is_left_with_escape(page: "Page", fake: Fake) -> None:
    converse(page, "One.")
    page.get_by_role("button", name="Edit the question").click()
    page.keyboard.type("x")
    page.keyboard.press("Escape")
    assert page.locator(".asked").all_inner_texts() == ["One."]
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Edit the question"
    assert len(fake.bodies) == 1


def test_an_answer_can_be_changed_and_the_conversation_goes_on_with_it(page: "Page", fake: Fake) -> None:
    converse(page, "One.")
    page.get_by_role("button", name="Edit", exact=True).last.click()
    page.get_by_label("The answer", exact=True).fill("Mine.")
    page.get_by_role("button", name="Keep").click()
    assert page.locator(".card .summary").inner_text() == "written by you"
    send(page, "Two.")
    wait_until_done(page, 2)
    assert said(fake.bodies[1]) == ["One.", "Mine.", "Two."]


def test_conversations_outlive_a_reload_and_can_be_deleted(page: "Page", fake: Fake) -> None:
    converse(page, "A question to keep.")
    page.reload()
    page.locator(".asked").wait_for()
    assert page.locator(".card .token").count() > 5
    assert "58 % accepted" in page.locator(".summary").inner_text()
    send(page, "Go on.")
    wait_until_done(page, 2)
    assert said(fake.bodies[1]) == ["A question to keep.", TEXT, "Go on."]
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".card").count() == 0
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="A question to keep.", exact=False).first.click()
    assert page.locator(".card").count() == 2
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="Delete: A question to keep.").click()
    page.get_by_role("button", name="Delete: A question to keep.").wait_for(state="detached")
    assert page.locator(".card").count() == 0


def test_replicas_that_are_missing(page: "Page") -> None:
    page.locator("#replicas-details summary").click()
    page.get_by_text("1 of 2 replicas, 1 can't be placed").wait_for()
    assert page.get_by_text("1 of 1 replicas").count() == 0
    assert page.get_by_text("2 waiting, the next one for 4 s").count() == 1
    assert page.get_by_text("drafter 75 % accepted, – of the time").count() == 1
    assert page.get_by_text("its node died").count() == 1


def test_replicas_and_why_drafts_rest(page: "Page") -> None:
    page.get_by_text("Replicas now").click()
    page.get_by_text("target-0").wait_for()
    words = page.locator("#replicas").inner_text()
    assert "3 of 4, 2 wait · KV 25 % · weights 2-5f0c2a9e, asleep" in words
    assert "Drafts rest: the server measured 0.82 × the speed of plain decoding" in words
    assert "75 % accepted since the start" in words
