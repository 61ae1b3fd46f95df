"""A talk with tools: calls shown as they come, results given, and what is asked for then."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from support.conversations import conversation_of, talk_of
from support.missing import need
from support.shell import run, succeed
from support.tiny import Named

from mars_export import GenerationConfig, MarsError, SessionError
from mars_export.runtime.cli import generate as display
from mars_export.runtime.text import dialects
from mars_export.runtime.text.toolcalls import ToolStream

need("llguidance", "grammar")
LIST = (
    '[{"name": "set_light", "arguments": {"room": "hall]", "on": true}}, {"name": "stop", "arguments": {}}]'
)
TAGS = (
    'Well.\n<tool_call>\n{"name": "set_light", "arguments": {"room": "hall]", "on": true}}\n</tool_call>'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call> Done.'
)
SHOWN: list[tuple[dialects.Dialect, str, str]] = [
    (dialects.LIST, LIST, '-> set_light {"room": "hall]", "on": true}\n-> stop {}\n'),
    (dialects.TAGS, TAGS, 'Well.\n-> set_light {"room": "hall]", "on": true}\n-> stop {}\n Done.\n'),
    (dialects.LIST, "no calls at all\n", "no calls at all\n\n"),
    (dialects.LIST, '[{"name": "a\\u001b[31mb", "arguments": {}}]', "-> a\\x1b[31mb {}\n"),
]
TOOLS = [
    {"type": "function", "function": {"name": "stop"}},
    {"type": "function", "function": {"name": "go", "parameters": {"properties": {"far": {"enum": [1, 2]}}}}},
]


class FakeTerminal:
    """A terminal that keeps what is written, and what stands there after each write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = io.StringIO()
        console = Console(file=self.file, highlight=False, soft_wrap=True, color_system=None, width=200)
        monkeypatch.setattr(display, "out", console)

    @property
    def text(self) -> str:
        return self.file.getvalue()


@pytest.mark.parametrize(("dialect", "answer", "shown"), SHOWN)
def test_calls_are_shown_the_same_however_the_answer_is_cut(
    dialect: dialects.Dialect, answer: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (1, 2, 3, 7, len(answer)):
        terminal = FakeTerminal(monkeypatch)
        page = display.Page(ToolStream(dialect))
        for start in range(0, len(answer), size):
            page.add(answer[start : start + size], None)
        page.end()
        assert terminal.text == shown


def test_a_call_is_shown_when_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = FakeTerminal(monkeypatch)
    page, seen = display.Page(ToolStream(dialects.LIST)), []
    for piece in ('[{"name": "set_li', 'ght", "arguments"', ': {"room": "ha', 'll"}}', "]"):
        page.add(piece, None)
        seen.append(terminal.text)
    assert seen == [""] * 3 + ['-> set_light {"room": "hall"}'] * 2


def names(answer: str) -> list[str]:
    reader = ToolStream(dialects.LIST)
    reader.push(answer)
    return [call.name for call in reader.answer.calls]


def test_results_are_given_in_order_and_once() -> None:
    talk = talk_of(GenerationConfig(), answer=LIST, names=names)
    with pytest.raises(MarsError, match="no call waits for a result$"):
        talk.obey("/result 3")
    talk.ask("hi")
    assert talk.calls == ("set_light", "stop")
    assert talk.obey("/result it is on") == "result of set_light; next is stop"
    assert (talk.calls, talk.give_results()) == (("stop",), None)
    assert talk.obey("/result") == "result of stop"
    assert talk.give_results() is not None and talk.give_results() is None
    assert talk.conversation.turns[-1].results == ("it is on", "")
    assert talk.calls == ("set_light", "stop"), "of the next answer"
    talk.obey("/result on")
    for change in ("/system be kind", "/system -"):
        talk.obey(change)
        assert talk.calls == ("set_light", "stop"), "a talk that was changed begins with its first result"
    talk.obey("/undo")
    assert talk.calls == ()
    with pytest.raises(MarsError, match="start chat with --tools"):
        talk_of().obey("/result 3")


def test_an_answer_behind_results_is_a_turn_like_others() -> None:
    talk, asked = conversation_of()
    with pytest.raises(SessionError, match="results must follow an answer with calls"):
        talk.give(["none"])
    talk.send("hi")
    talk.give(["21 degrees", "done"])
    talk.send("thanks")
    assert "tool\n21 degrees<|im_end|>\n<|im_start|>tool\ndone<|im_end|>\n<|im_start|>assistant" in asked[1]
    roles = ["user", "assistant", "tool", "tool", "assistant", "user", "assistant"]
    messages = talk.messages
    assert [m["role"] for m in messages] == roles
    assert [turn.results for turn in talk.turns] == [(), ("21 degrees", "done"), ()]
    spelled = [turn.spellings for turn in talk.turns]
    talk.resume(messages)
    assert [turn.spellings for turn in talk.turns] == spelled, "turns that are the same keep their ids"
    talk.resume(messages[:5])
    assert [turn.spellings for turn in talk.turns] == spelled[:2]
    for wrong in (messages[2:], messages[:3], [*messages[:2], messages[0]], [messages[2], messages[1]]):
        with pytest.raises(SessionError, match="results of calls, as tool messages, only between"):
            talk.resume(wrong)


def test_the_oldest_turns_go_with_the_results_behind_them() -> None:
    talk, asked = conversation_of(capacity=160, drop_oldest=True)
    talk.send("a long question " * 2)
    talk.give(["a result"])
    for question in ("one", "two", "three", "four"):
        talk.send(question)
        assert not asked[-1].startswith("<|im_start|>tool"), asked[-1]
    assert talk.dropped or "a result" not in asked[-1]
    with pytest.raises(SessionError, match="the conversation has"):
        talk.give(["a result " * 60])


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    return tmp_path / "tools.json"


def test_a_talk_with_tools_in_the_shell(bundles: Named, tools: Path) -> None:
    chat = ("chat", bundles("qwen2"), "-n", "120", "--tools", tools)
    done = succeed(*chat, "--json", stdin="hi\n")
    [first] = [json.loads(line) for line in done.stdout.splitlines()]
    calls = first["tool_calls"]
    assert calls and first["stats"]["forced"] > 0
    assert {call["name"] for call in calls} <= {"stop", "go"}
    results = "".join(f"/result {i} done\n" for i in range(len(calls)))
    done = succeed(*chat, stdin=f"hi\n{results}")
    shown = [line for line in done.stdout.splitlines() if line.startswith("-> ")]
    assert shown[: len(calls)] == [f"-> {call['name']} {call['arguments']}" for call in calls]
    hint = " ".join(done.stderr.split())
    assert f"calls: {', '.join(call['name'] for call in calls)}; enter the result of each" in hint
    assert done.stderr.count("tokens/forward") == 2


def test_the_model_is_told_of_the_tools_while_it_talks(bundles: Named) -> None:
    from mars_export import Session

    session = Session.open(bundles("qwen2"), threads=1)
    config = GenerationConfig(tools=TOOLS, max_new_tokens=40)
    talk = session.conversation()
    reply = talk.send("hi", config)
    for _ in reply:
        pass
    alone = session.generate([{"role": "user", "content": "hi"}], config)
    assert reply.completion.token_ids == alone.token_ids
    assert reply.completion.stats.prompt_tokens == alone.stats.prompt_tokens


def test_tools_that_cannot_be_are_refused_before_the_talk(bundles: Named, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text('{"name": "stop"}')
    done = run("chat", bundles("qwen2"), "--tools", tmp_path / "tools.json", stdin="hi\n")
    assert done.returncode == 2
    assert "tools must be a list of functions" in " ".join(done.stderr.split())
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    done = run("chat", bundles("qwen2"), "--tools", tmp_path / "tools.json", "--choice", "a", stdin="hi\n")
    assert (done.returncode, "choice and tools exclude each other" in done.stderr) == (2, True)
