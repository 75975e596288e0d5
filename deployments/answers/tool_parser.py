"""Tells calls of tools from the rest of an answer, while it streams. Text that can still become a call is held back."""

from deployments.answers.tool_format import Call, Piece, ToolFormat, read_calls

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolParser:
    """Of one answer."""

    def __init__(self, form: ToolFormat | None, *, must_call: bool = False, name: str | None = None) -> None:
        """
        form: the model's; None: it has no tools.
        must_call: the answer is nothing but JSON: a list of calls, or the arguments of the function `name`.
        """
        self._form, self._must_call, self._name = form, must_call, name
        self._held = ""
        self._begun = False  # something that is no white space has come
        self.called = False  # whether there was a call

    def add(self, text: str, *, last: bool) -> Piece:
        """What the next text adds; last: nothing comes after it."""
        self._held += text
        if self._must_call:
            piece = self._forced() if last else Piece()
        elif self._form == "hermes":
            piece = self._tagged(last=last)
        else:
            piece = self._bare(last=last)
        self.called = self.called or bool(piece.calls)
        return piece

    def _forced(self) -> Piece:
        calls = [Call(self._name, self._held)] if self._name is not None else read_calls(self._held)
        return Piece("" if calls else self._held, calls)

    def _bare(self, *, last: bool) -> Piece:
        """An answer is a call if all of it is JSON that is one."""
        start = self._held.lstrip()
        may_be_call = self._form is not None and not self._begun and start[:1] in ("", "{", "[")
        if may_be_call and not last:
            return Piece()
        calls = read_calls(start) if may_be_call else []
        self._begun = True
        content, self._held = "" if calls else self._held, ""
        return Piece(content, calls)

    def _tagged(self, *, last: bool) -> Piece:
        """Calls stand between tags."""
        content, calls = "", list[Call]()
        while True:
            before, tag, rest = self._held.partition(_OPEN)
            inside, end, after = rest.partition(_CLOSE)
            if not tag or not (end or last):
                break
            found = read_calls(inside)
            content += before.rstrip() if found else before + tag + inside + end
            calls += found
            self._held = after.lstrip() if found else after
        if last:
            content, self._held = content + self._held, ""
            return Piece(content, calls)
        keep = len(_OPEN + rest) if tag else _overlap(self._held, _OPEN)
        content += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return Piece(content, calls)


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of the text could begin the tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
