"""Rewrites a grammar in GBNF, llama.cpp's notation, so that llguidance's converter reads it as llama.cpp does."""

import re

_ITEM = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*") | (?P<characters>\[(?:\\.|[^\]\\])*\]) | (?P<comment>\#[^\n]*) | (?P<any>\.)""",
    re.VERBOSE | re.DOTALL,
)
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ANY = "[\\x00-\U0010ffff]"  # a line's end, too


def plain_gbnf(grammar: str) -> str:
    """Return the grammar with characters instead of their numbers.

    Raises:
        ValueError: there is no character of a number.
    """
    return _ITEM.sub(_plain_item, grammar)


def _plain_item(item: re.Match[str]) -> str:
    text = item[0]
    match item.lastgroup:
        case "text":
            return _CODE.sub(lambda code: _plain(code, brackets="[]"), text)
        case "characters":
            # Doubled, they are operators in the expressions that the converter makes.
            return _CODE.sub(lambda code: _plain(code, brackets=""), text).replace("&", r"\x26").replace("~", r"\x7e")
        case "any":
            return _ANY
    return text


def _plain(code: re.Match[str], brackets: str) -> str:
    """Return a character for its escape; those of ASCII may have a meaning of their own, and stay escaped."""
    if code[4] is not None:
        return code[4] if code[4] in brackets else code[0]
    number = int(code[1] or code[2] or code[3], 16)
    return f"\\x{number:02x}" if number < 0x80 else chr(number)
