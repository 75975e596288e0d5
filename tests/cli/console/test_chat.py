"""A conversation with a scripted server, line by line."""

from collections.abc import Iterable

import pytest
from rich.console import Console

from cli.console.chat import Chat
from cli.console.conversation import Conversation, choose_model
from decoding.errors import InvalidRequestError, UnavailableError, UnknownModelError
from deployments.client import Client
from tests.cli.conftest import shown
from tests.cli.fake_server import CARDS, FakeServer

GREEN, YELLOW = "\x1b[32m", "\x1b[33m"


class Lines:
    """An editor whose user types these, where None is Ctrl-C."""

    def __init__(self, lines: Iterable[str | None]) -> None:
        self._lines = iter(lines)

    def read(self) -> str:
        try:
            line = next(self._lines)
        except StopIteration:
            raise EOFError from None
        if line is None:
            raise KeyboardInterrupt
        return line


def talk(server: FakeServer, console: Console, *lines: str | None) -> Chat:
    chat = Chat(Client(server.url), console, Conversation("consort"))
    chat.run(Lines(lines))
    return chat


def test_a_reply_has_colours_and_statistics(server: FakeServer, terminal: Console) -> None:
    talk(server, terminal, "hi")
    output = shown(terminal)
    assert f"Once{GREEN} upon\x1b[0m{GREEN} a\x1b[0m{YELLOW} time" in output
    assert "4 tokens" in output
    assert "2 of 4 draft tokens accepted (50%) · 2.00 tokens per step · hit rate 25%" in output
    assert "2 accepted" in output
    assert "1 recovered" in output
    assert "bonus" not in output


def test_the_conversation_goes_with_each_request(server: FakeServer, terminal: Console) -> None:
    talk(server, terminal, "/system Be brief.", "one", "", "two")
    roles = [(message["role"], message["content"]) for message in server.bodies[-1]["messages"]]
    assert roles == [("system", "Be brief."), ("user", "one"), ("assistant", "Once upon a time"), ("user", "two")]
    assert server.bodies[-1]["return_token_details"] is True


def test_settings_are_sent_and_shown(server: FakeServer, terminal: Console) -> None:
    lines = ("/temperature 0.5", "/speculate off", "/set stop END", "/set seed=3", "/set seed null", "/draft-length 2")
    chat = talk(server, terminal, *lines, "hi", "/show", "/temperature", "/set seed")
    body = server.bodies[-1]
    assert {name: body.get(name) for name in ("temperature", "speculate", "stop", "seed", "draft_length")} == {
        "temperature": 0.5,
        "speculate": False,
        "stop": "END",
        "seed": None,
        "draft_length": 2,
    }
    assert shown(terminal).count("temperature: 0.5") == 2
    assert "seed: the default" in shown(terminal)
    assert chat.toolbar().startswith("consort · temperature 0.5 · speculate off")


def test_clear_retry_and_system_off(server: FakeServer, terminal: Console) -> None:
    talk(server, terminal, "one", "/clear", "/system A", "/system off", "two", "/retry")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["two"]
    assert len(server.bodies) == 3


def test_a_retry_that_fails_changes_nothing(server: FakeServer, terminal: Console) -> None:
    failed = talk(server, terminal, "one", "two", "/temperature 9", "/retry", "/retry")
    assert [turn["content"] for turn in failed.conversation.turns if turn["role"] == "user"] == ["one", "two"]
    retried = talk(server, terminal, "one", "two", "/temperature 9", "/retry", "/temperature 1", "/retry")
    assert retried.conversation.turns == failed.conversation.turns
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["one", "Once upon a time", "two"]


def test_models_are_listed_and_chosen(server: FakeServer, terminal: Console) -> None:
    chat = talk(server, terminal, "/model", "/model sol", "/model solo", "hi")
    assert "did you mean 'solo'" in shown(terminal)
    assert server.bodies[-1]["model"] == "solo"
    assert list(chat.suggestions("/model s")) == ["consort", "solo"]


def test_comparison(server: FakeServer, terminal: Console) -> None:
    chat = talk(server, terminal, "one", "/compare", "/compare two")
    _, ours, plain, again, _ = server.bodies
    assert (ours["speculate"], plain["speculate"]) == (True, False)
    assert ours["seed"] == plain["seed"]
    assert [message["content"] for message in ours["messages"]] == ["one"]
    assert [message["content"] for message in again["messages"]] == ["one", "Once upon a time", "two"]
    assert len(chat.conversation.turns) == 2
    assert "same text: yes" in shown(terminal)


def test_colours_can_be_turned_off(server: FakeServer, terminal: Console) -> None:
    talk(server, terminal, "/colours off", "hi", "/colours green")
    assert GREEN not in shown(terminal)
    assert "should be on or off" in shown(terminal)


def test_a_server_without_token_details_is_asked_without_them(server: FakeServer, terminal: Console) -> None:
    server.knows_details = False
    talk(server, terminal, "hi", "ho")
    assert len(server.bodies) == 2
    assert "return_token_details" not in server.bodies[-1]
    assert "Once upon a time" in shown(terminal)
    assert "accepted  " not in shown(terminal)


def test_a_refused_request_is_not_part_of_the_conversation(server: FakeServer, terminal: Console) -> None:
    chat = talk(server, terminal, "/temperature 9", "hi", "/retry", "/compare", "/frob")
    assert chat.failed
    assert chat.conversation.turns == []
    for message in ("temperature is too high.", "/retry: there is no last message", "/compare:", "/frob: is not known"):
        assert message in shown(terminal)


def test_control_characters_stay_out_of_the_terminal(server: FakeServer, terminal: Console) -> None:
    server.tokens = [("a\x1b[2J\r\tb\x9b", "plain")]
    talk(server, terminal, "hi")
    assert "a␛[2J␍\tb�" in shown(terminal)


def test_help_quit_and_interruptions(server: FakeServer, terminal: Console) -> None:
    talk(server, terminal, None, "/help", "/quit", "never sent")
    assert "Ctrl-D or /quit leaves." in shown(terminal)
    assert "/compare" in shown(terminal)
    assert server.bodies == []


def test_everything_that_can_be_set_is_listed(server: FakeServer, terminal: Console) -> None:
    chat = talk(server, terminal, "/set")
    assert "0 is greedy" in shown(terminal)
    assert "temperature" in set(chat.suggestions("/set t"))
    assert list(chat.suggestions("/colours ")) == ["on", "off"]
    assert "/help" in set(chat.suggestions("/h"))
    assert list(chat.suggestions("/temperature 0")) == []


def test_a_pipe_gets_the_text_alone(server: FakeServer, pipe: Console, capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk(server, pipe, "/temperature 0", "hi", "/frob")
    assert shown(pipe) == "Once upon a time\n"
    assert "temperature: 0" in capsys.readouterr().err
    assert chat.failed


def test_greeting(server: FakeServer, terminal: Console) -> None:
    chat = Chat(Client(server.url), terminal, Conversation("solo"))
    chat.greet(CARDS[0])
    chat.greet(CARDS[1])
    assert "drafted for by small, ngram" in shown(terminal)
    assert "still being loaded" in shown(terminal)


def test_the_first_model_that_is_ready_is_chosen() -> None:
    assert choose_model(CARDS[::-1], None)["id"] == "consort"
    assert choose_model(CARDS[1:], None)["id"] == "solo"
    with pytest.raises(UnavailableError, match="no models"):
        choose_model([], None)
    with pytest.raises(UnknownModelError, match="did you mean 'consort'"):
        choose_model(CARDS, "consrt")


def test_the_last_message() -> None:
    conversation = Conversation("m")
    assert (conversation.last_message, conversation.before_last_message()) == (None, [])
    conversation.add("a", "b")
    turns = list(conversation.turns)
    conversation.add("c", "d")
    assert (conversation.last_message, conversation.before_last_message()) == ("c", turns)
    with pytest.raises(InvalidRequestError):
        conversation.parameters.set("nonsense", "1")


def test_messages_go_through_a_template(server: FakeServer, terminal: Console) -> None:
    lines = ("/template", '/set variables={"language": "French"}', "/template translate", "hi", "/template off", "ho")
    talk(server, terminal, *lines)
    sent = server.bodies[-2]
    assert (sent["template"], sent["variables"]) == ("translate", {"language": "French", "text": "hi"})
    assert sent["messages"] == []
    assert "language, text" in shown(terminal)


def test_an_unknown_template_is_an_error(server: FakeServer, terminal: Console) -> None:
    talk(server, terminal, "/template translat")
    assert "did you mean 'translate'?" in " ".join(shown(terminal).split())
