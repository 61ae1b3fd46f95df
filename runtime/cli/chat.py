"""A talk at a terminal: lines become messages, commands change settings. Knows no session, prints nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..bundle.files import write_whole
from ..decode.config import GenerationConfig, repeatable
from ..errors import MarsError

Message = dict[str, str]
FENCES = ("'''", '"""')
MOST = 64 << 20  # bytes of a saved talk
HELP = """\
/exact            the text of one-token decoding, several tokens a step (the default)
/tau 0.9          faster and riskier: accept what is likelier than this; 1 is one token a step
/runs             mark the tokens that were accepted together, or stop that
/undo             take the last question and its answer back
/edit QUESTION    replace the last question and ask again
/system TEXT      put a system message before the talk; without TEXT take it away
/save FILE        write the talk as JSON
/load FILE        go on with a saved talk
/result TEXT      the result of the next call of the last answer; after the last result the model continues
/reset            forget the talk
/quit             leave, as Ctrl-D does; Ctrl-C only ends an answer
Lines that end in \\ go on; ''' begins and ends a text of several lines."""


class Talk:
    """The messages so far and the settings of the next answer.

    `has_window`: the user chose the window, so that no other one is taken where draws are to be repeatable.
    `names`: those of the calls in an answer, where there are tools.
    """

    def __init__(
        self,
        system: str | None,
        config: GenerationConfig,
        *,
        runs: bool = False,
        has_window: bool = False,
        names: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        self.messages: list[Message] = [] if system is None else [_message("system", system)]
        self.config, self.runs, self._has_window = config, runs, has_window
        self._names, self._results = names, list[str]()

    def obey(self, line: str) -> str:
        """Do what a line with a command says, and return what to tell. Raises MarsError for what cannot be
        done.
        """
        command, _, value = line.strip().partition(" ")
        value = value.strip()
        if command == "/result":
            return self._note(value)
        if command in ("/undo", "/system", "/load", "/reset"):
            self._results = []
        match command:
            case "/exact":
                self.config = self.config.with_values(exact=True)
                return "exact"
            case "/tau":
                return self._set_tau(value)
            case "/runs":
                self.runs = not self.runs
                return f"runs {'on' if self.runs else 'off'}"
            case "/undo":
                had = len(self.messages)
                self.messages = self.without_last
                return "last turn taken back" if len(self.messages) < had else "there is no turn to take back"
            case "/system":
                rest = self.messages[len(self._opening) :]
                self.messages = [*([_message("system", value)] if value else []), *rest]
                return "system message set" if value else "no system message"
            case "/save":
                return self._save(value)
            case "/load":
                return self._load(value)
            case "/reset":
                self.messages = self._opening
                return "forgotten"
            case _:
                return HELP

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the calls of the last answer that have no result yet."""
        if self._names is None or not self.messages or self.messages[-1]["role"] != "assistant":
            return ()
        return tuple(self._names(self.messages[-1]["content"])[len(self._results) :])

    def results(self) -> tuple[str, ...]:
        """Those of all calls of the last answer, once; none while one lacks."""
        if self.calls:
            return ()
        given, self._results = tuple(self._results), []
        return given

    def answered(self, before: Sequence[Message], asked: Sequence[Message], answer: str) -> None:
        """The talk now: what was said before, a question or results, and the answer."""
        self._results = []
        self.messages = [*before, *asked, _message("assistant", answer)]

    def _note(self, result: str) -> str:
        if not self.calls:
            hint = "" if self._names is not None else "; calls are made where chat has --tools"
            raise MarsError(f"/result: no call waits for one{hint}")
        name = self.calls[0]
        self._results.append(result)
        rest = f"; next is {self.calls[0]}" if self.calls else ""
        return f"result of {name}{rest}"

    @property
    def without_last(self) -> list[Message]:
        """The messages before the last question."""
        asked = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        return self.messages[: asked[-1]] if asked else list(self.messages)

    def edited(self, line: str) -> str | None:
        """The question of a line that asks one in the place of the last. Raises MarsError without a last."""
        command, _, question = line.strip().partition(" ")
        if command != "/edit" or not question.strip():
            return None
        if all(m["role"] != "user" for m in self.messages):
            raise MarsError("/edit: there is no question yet; ask one without it")
        return question.strip()

    @property
    def _opening(self) -> list[Message]:
        return [m for m in self.messages[:1] if m["role"] == "system"]

    def _set_tau(self, value: str) -> str:
        try:
            tau = float(value)
        except ValueError as error:
            raise MarsError(f"/tau needs a number of 0 or more, not {value!r}") from error
        self.config = repeatable(self.config.with_values(tau=tau), has_window=self._has_window)
        return f"tau {tau:g}"

    def _save(self, name: str) -> str:
        file = _file("/save", name)
        if file.exists():
            _read(file)  # only a talk is replaced by a talk
        try:
            write_whole(
                file, json.dumps(self.messages, ensure_ascii=False, indent=1).encode("utf-8", "replace")
            )
        except OSError as error:
            raise MarsError(f"{name}: cannot be written ({error.strerror}); give another place") from error
        return f"{len(self.messages)} messages saved in {name}"

    def _load(self, name: str) -> str:
        self.messages = _read(_file("/load", name))
        return f"{len(self.messages)} messages loaded"


def questions(read: Callable[[bool], str | None]) -> Iterator[str]:
    """Lines joined to questions until `read` has no more. `read` is told whether a line continues another."""
    while (line := read(False)) is not None:
        fence = next((f for f in FENCES if line.lstrip().startswith(f)), None)
        if fence is not None:
            text: str | None = line.lstrip().removeprefix(fence)
            lines = []
            while text is not None and not text.rstrip().endswith(fence):
                lines.append(text)
                text = read(True)
            yield "\n".join([*lines, *([] if text is None else [text.rstrip().removesuffix(fence)])]).strip(
                "\n"
            )
            continue
        parts = []
        while line is not None and line.endswith("\\"):
            parts.append(line.removesuffix("\\"))
            line = read(True)
        yield "\n".join([*parts, *([] if line is None else [line])])


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _file(command: str, name: str) -> Path:
    if not name:
        raise MarsError(f"{command} needs the name of a file")
    return Path(name).expanduser()


def _read(file: Path) -> list[Message]:
    """A saved talk. Raises MarsError for anything else."""
    try:
        if file.is_file() and file.stat().st_size > MOST:
            raise ValueError("it is too large")
        value: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise MarsError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise MarsError(f"{file}: not a talk that /save wrote ({error})") from error
    is_talk = isinstance(value, list) and all(
        isinstance(m, dict)
        and m.keys() == {"role", "content"}
        and all(isinstance(v, str) for v in m.values())
        for m in value
    )
    if not is_talk:
        raise MarsError(f"{file}: not a talk that /save wrote (a JSON list of {{role, content}})")
    return [_message(m["role"], m["content"]) for m in value]
