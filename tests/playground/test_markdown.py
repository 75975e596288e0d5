"""Formatted answers in a real Chromium: Markdown, code, colours in it, reasoning; and that markup does no harm."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.playground.driving import CONTRAST, send, tokens_of, wait_until_done
from tests.playground.fake_server import MARKDOWN, REASONING, Fake

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

pytestmark = pytest.mark.browser


def test_markdown_is_shown_with_highlighted_code(answered: "Page") -> None:
    card = answered.locator(".card")
    assert card.locator("h6").inner_text() == "A sum"
    assert card.locator("ol li strong").inner_text() == "Add"
    assert card.locator("pre code").inner_text().startswith("def add(a: int, b: int) -> int:\n    return a + b")
    assert card.locator("pre .hljs-keyword").all_inner_texts() == ["def", "return"]
    assert card.locator("td").all_inner_texts() == ["1", "2"]


def test_code_is_in_a_fixed_font_and_can_be_copied(answered: "Page") -> None:
    answered.context.grant_permissions(["clipboard-read", "clipboard-write"])
    assert "mono" in answered.locator("pre code").evaluate("code => getComputedStyle(code).fontFamily").lower()
    answered.get_by_role("button", name="Copy this code").click()
    answered.get_by_text("Copied").wait_for()
    copied = answered.evaluate("navigator.clipboard.readText()")
    assert copied == "def add(a: int, b: int) -> int:\n    return a + b  # the sum\n"
    answered.get_by_role("button", name="Copy", exact=True).first.click()
    answered.wait_for_function("async (text) => (await navigator.clipboard.readText()) === text", arg=MARKDOWN)


@pytest.mark.parametrize(
    ("selector", "start"), [("pre", "def add"), ("h6", "A *"), ("li strong", "Add"), ("a", "this]")]
)
def test_words_keep_the_colours_of_their_tokens(answered: "Page", selector: str, start: str) -> None:
    """Tokens are three characters long, in turn accepted and bonus."""
    index = MARKDOWN.index(start)
    for text, source in tokens_of(answered.locator(f".card {selector}").first):
        index = MARKDOWN.index(text[0], index)
        expected = ["accepted", "bonus"][index // 3 % 2]
        assert (text, source) == (text, expected)
        index += len(text)


def test_arrow_keys_go_through_the_tokens_of_a_formatted_answer(answered: "Page") -> None:
    answered.get_by_role("group", name="Tokens of the answer").focus()
    for _ in range(4):
        answered.keyboard.press("ArrowRight")
    assert answered.evaluate("document.activeElement.textContent") == "Add"
    assert "accepted" in answered.get_by_role("tooltip").inner_text()


def test_markup_in_an_answer_does_no_harm(answered: "Page") -> None:
    card = answered.locator(".card")
    assert card.locator("img, script, [onerror]").count() == 0
    assert '<img src="x" onerror=' in card.inner_text()
    hrefs = card.locator("a").evaluate_all("links => links.map((link) => link.getAttribute('href'))")
    assert hrefs == ["https://example.org/a", None, "https://example.org/picture.png"]
    assert {link.get_attribute("rel") for link in card.locator("a").all()} == {"noopener noreferrer nofollow"}
    card.locator("a", has_text="that").click()
    assert answered.evaluate("window.hacked") is None


def test_the_sanitiser_drops_what_is_not_listed(context: "BrowserContext", fake: Fake) -> None:
    page = context.new_page()
    page.goto(fake.url)
    markups = [
        "<svg onload=alert(1)>",
        "<a href='java\tscript:alert(1)'>x</a>",
        "<iframe src='https://example.org'></iframe><form action='/x'><input name=a></form>",
        "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
        "<p id=text class=x style='position:fixed' data-x=1 onclick=alert(1)>x</p>",
    ]
    left = page.evaluate(
        """async (markups) => {
            const { clean } = await import("/page/answers/markdown.js");
            const namesOf = (element) => [element.localName, ...element.getAttributeNames()];
            return markups.map((markup) => [...clean(markup).querySelectorAll("*")].flatMap(namesOf));
        }""",
        markups,
    )
    page.close()
    allowed = {"a", "p", "class", "target", "rel", "table"}
    assert [set(names) - allowed for names in left] == [set()] * len(markups)


def test_reasoning_is_folded(page: "Page") -> None:
    send(page, "reason")
    wait_until_done(page)
    reasoning = page.locator(".reasoning")
    assert reasoning.locator("summary").inner_text() == "Reasoning, 3 tokens"
    assert reasoning.locator(".tokens").is_hidden()
    reasoning.locator("summary").click()
    assert reasoning.locator(".tokens").inner_text() == "".join(REASONING)
    assert "First" not in page.locator(".card-text").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_can_be_read_on_its_ground(answered: "Page", scheme: Any) -> None:
    """Contrast of at least 4.5, as WCAG 2 asks for."""
    answered.emulate_media(color_scheme=scheme)
    selectors = [
        ".hljs-keyword .token",
        ".hljs-built_in .token",
        ".hljs-comment .token",
        ".code figcaption",
        ".card a .token",
    ]
    contrasts = {selector: answered.locator(selector).first.evaluate(CONTRAST) for selector in selectors}
    assert {selector: ratio for selector, ratio in contrasts.items() if ratio < 4.5} == {}
