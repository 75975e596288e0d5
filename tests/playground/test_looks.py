"""How the page looks in a real Chromium: in light, in the dark, and on a narrow screen."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.playground.driving import CONTRAST, send, wait_until_done
from tests.playground.fake_server import STEPS

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

SOURCES = {source for step in STEPS for _, source in step}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_on_their_grounds(page: "Page", scheme: Any) -> None:
    """Contrast of at least 4.5, as WCAG 2 asks for."""
    page.emulate_media(color_scheme=scheme)
    page.get_by_role("switch", name="Compare").click()
    send(page, "Add two numbers.")
    wait_until_done(page, 2)
    selectors = [f".card .token.{source}" for source in SOURCES]
    selectors += [".facts", ".asked", ".main", "#statistics dt", ".verdict", ".chart .facts", "summary"]
    contrasts = {selector: page.locator(selector).first.evaluate(CONTRAST) for selector in selectors}
    assert {selector: ratio for selector, ratio in contrasts.items() if ratio < 4.5} == {}


def test_a_narrow_screen_has_all_of_it(page: "Page") -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    page.get_by_role("switch", name="Compare").click()
    send(page, "Add two numbers, " + "and" * 50)
    wait_until_done(page, 2)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.get_by_label("Temperature", exact=True).is_hidden()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature", exact=True).fill("0.5")
    assert page.locator("#chart svg").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Message", exact=True).is_visible()


def test_a_phone_has_most_of_its_height_for_answers_and_shows_the_verdict(page: "Page") -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("switch", name="Compare").click()
    send(page, "Add two numbers.")
    wait_until_done(page, 2)
    page.locator(".verdict", has_text="Same text").wait_for()
    heights = [box["height"] for name in ("header.bar", "#composer") if (box := page.locator(name).bounding_box())]
    assert sum(heights) < 844 / 3
    box, composer = page.locator(".verdict").bounding_box(), page.locator("#composer").bounding_box()
    assert box
    assert composer
    assert box["y"] > 0
    assert box["y"] + box["height"] <= composer["y"]
    last, switch = page.locator("#clear").bounding_box(), page.locator("#alternatives").bounding_box()
    assert last
    assert switch
    assert last["y"] < switch["y"] + switch["height"]  # on the line of the switches


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_members_and_calls_can_be_read_on_their_grounds(page: "Page", scheme: Any) -> None:
    """Contrast of at least 4.5, as WCAG 2 asks for."""
    page.emulate_media(color_scheme=scheme)
    page.locator("#endpoint").select_option("blend")
    send(page, "ensemble")
    wait_until_done(page)
    send(page, "call")
    wait_until_done(page, 2)
    selectors = [".call .facts", ".call-name", ".call-arguments", ".raw summary", "#colours"]
    contrasts = {selector: page.locator(selector).first.evaluate(CONTRAST) for selector in selectors}
    for mark in ("0", "1", "agreed"):
        tokens = page.locator(f'.card .token[data-member="{mark}"]')
        if tokens.count():
            contrasts[mark] = tokens.first.evaluate(CONTRAST)
    assert {selector: ratio for selector, ratio in contrasts.items() if ratio < 4.5} == {}


def test_several_answers_and_calls_fit_on_a_narrow_screen(page: "Page") -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Answers", exact=True).fill("3")
    page.get_by_role("button", name="Settings").click()
    send(page, "call " + "and" * 50)
    wait_until_done(page, 3)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
