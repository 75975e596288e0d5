"""An agent that mends misspelt words with tools, through OpenAI's client: docs/agent.md.

It reads a file and runs its test, and replaces words until the test passes. Every call is forced, so that its arguments
follow the tool's schema whatever the model. Models that can choose their tools do: --free.
"""

import argparse
import json
import re
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from openai import OpenAI

TASK = "The test of {path} fails. Find the wrong word in the file, replace it by the right one, and run the test."
FILES = {  # by path: the text, and what the test wants to read there
    "greeting.txt": ("Helo, Ada! How are you?", "Hello, Ada! How are you?"),
    "parting.txt": ("Goodbey, Ada! See you on Monday.", "Goodbye, Ada! See you on Monday."),
    "thanks.txt": ("Thnak you, Ada! The flowers are lovely.", "Thank you, Ada! The flowers are lovely."),
    "sorry.txt": ("I am sory, Ada! The train was late.", "I am sorry, Ada! The train was late."),
}


class Workspace:
    """A file with one mistake, and the tools that may touch it."""

    def __init__(self, file: Path) -> None:
        self._file, (text, self._wanted) = file, FILES[file.name]
        file.write_text(text, encoding="utf-8")
        self.passes = False
        self.run: dict[str, Callable[..., str]] = {
            "read_file": lambda path: self._text,
            "run_test": self._test,
            "replace_word": self._replace,
        }

    @property
    def tools(self) -> list[Any]:
        path = {"type": "string", "enum": [self._file.name]}
        wrong, right = {"type": "string", "enum": _words(self._text)}, {"type": "string", "pattern": "^[A-Za-z]{1,12}$"}
        return [
            _tool("read_file", "Read a file.", path=path),
            _tool("run_test", "Run the test of a file.", path=path),
            _tool("replace_word", "Replace the wrong word by the right one.", path=path, wrong=wrong, right=right),
        ]

    @property
    def _text(self) -> str:
        return self._file.read_text(encoding="utf-8")

    def _test(self, path: str) -> str:
        pairs = zip(_words(self._text), _words(self._wanted), strict=True)
        wrong = next(
            (f'FAILED: wrong word "{word}", right word "{right}"' for word, right in pairs if word != right), ""
        )
        self.passes = not wrong
        return wrong or "passed"

    def _replace(self, path: str, wrong: str, right: str) -> str:
        self._file.write_text(self._text.replace(wrong, right), encoding="utf-8")
        return "done"


def _words(text: str) -> list[str]:
    return re.findall("[A-Za-z]+", text)


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def mend(ask: Callable[..., Any], file: Path, *, free: bool) -> Counter[str]:
    """Let the model mend a file; return how many tokens and steps that took, and how many tokens were drafted."""
    total: Counter[str] = Counter()
    workspace, messages = Workspace(file), [{"role": "user", "content": TASK.format(path=file.name)}]
    for step in range(10):
        name = "read_file" if step == 0 else "run_test" if step % 2 else "replace_word"
        choice = "required" if free else {"type": "function", "function": {"name": name}}
        answer = ask(messages=messages, tools=workspace.tools, tool_choice=choice, seed=step)
        messages.append(answer.choices[0].message)
        for call in answer.choices[0].message.tool_calls:
            result = workspace.run[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            print(f"  {call.function.name} {call.function.arguments} -> {result}")
        total.update(tokens=answer.usage.completion_tokens, steps=answer.speculation["steps"])
        for proposer, counts in answer.speculation["proposers"].items():
            total.update({f"{proposer} {verb}": counts[verb] for verb in ("drafted", "accepted")})
        if workspace.passes:
            break
    print(f"{file.name}: {'mended' if workspace.passes else 'not mended'}; {dict(total)}", flush=True)
    return total


def main() -> None:
    """Mend all files, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--model", default="smollm2", help="as GET /v1/models lists it")
    parser.add_argument("--free", action="store_true", help="let the model choose the tools")
    options = parser.parse_args()
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
        for _ in range(300):  # seconds, while the server starts
            with suppress(OSError), urllib.request.urlopen(f"{options.url}/health"):
                break
            time.sleep(1)
        create = OpenAI(base_url=f"{options.url}/v1", api_key="none").chat.completions.create
        ask = partial(create, model=options.model, parallel_tool_calls=False, temperature=0.5, max_tokens=200)
        each = [mend(ask, Path(folder) / name, free=options.free) for name in FILES]
        print("all:", dict(sum(each, Counter())))


if __name__ == "__main__":
    main()
