"""The state of a chat: its messages, its settings, and the commands that change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..decode.config import GenerationConfig, repeatable
from ..errors import MarsError
from .options import tau_warning

Message = dict[str, str]
FENCES = ("'''", '"""')
HELP = """\
/exact            verify every token (the default)
/tau 0.9          faster and riskier: accept predictions with at least this confidence
/runs             turn marks for tokens that were accepted together on or off
/undo             remove the last question and its answer
/edit QUESTION    replace the last question and answer it again
/system [TEXT]    print the system message, or set it; /system - removes it
/result TEXT      result of the next call of the last answer; after the last result the model goes on
/reset            start again, with the same system message
/quit             leave, like Ctrl-D; Ctrl-C ends an answer only
A \\ at the end of a line continues it on the next one. ''' begins and ends a text of several lines."""


class Talk:
    """The messages so far, and the settings of the next answer.

    `has_window` says that the user chose the window, so that it stays even for repeatable draws. `names`
    returns the names of the calls in an answer; it is None without tools.
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
        """Run the command in a line, and return the reply. Raises MarsError if the command fails."""
        command, _, value = line.strip().partition(" ")
        value = value.strip()
        if command == "/result":
            return self._note(value)
        if command in ("/undo", "/reset") or (command == "/system" and value):
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
                size = len(self.messages)
                self.messages = self.without_last
                return "last turn removed" if len(self.messages) < size else "there is no turn to remove"
            case "/system":
                return self._set_system(value)
            case "/reset":
                self.messages = self._opening
                return "chat reset"
            case "/edit":
                return "/edit QUESTION replaces the last question; it needs one"
            case "/help":
                return HELP
            case _:
                raise MarsError(f"unknown command {command}; /help lists the commands")

    @property
    def calls(self) -> tuple[str, ...]:
        """The names of the last answer's calls without a result."""
        if self._names is None or not self.messages or self.messages[-1]["role"] != "assistant":
            return ()
        return tuple(self._names(self.messages[-1]["content"])[len(self._results) :])

    def results(self) -> tuple[str, ...]:
        """The results of all calls of the last answer, returned once; empty while one is missing."""
        if self.calls:
            return ()
        results, self._results = tuple(self._results), []
        return results

    def answered(self, before: Sequence[Message], new: Sequence[Message], answer: str) -> None:
        """Set the messages: those before, a question or results, and the answer."""
        self._results = []
        self.messages = [*before, *new, _message("assistant", answer)]

    def _note(self, result: str) -> str:
        if not self.calls:
            hint = "" if self._names is not None else "; start chat with --tools"
            raise MarsError(f"/result: no call waits for a result{hint}")
        name = self.calls[0]
        self._results.append(result)
        rest = f"; next is {self.calls[0]}" if self.calls else ""
        return f"result of {name}{rest}"

    @property
    def without_last(self) -> list[Message]:
        """The messages before the last question."""
        questions = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        return self.messages[: questions[-1]] if questions else list(self.messages)

    def edited(self, line: str) -> str | None:
        """The question of an /edit line, else None. Raises MarsError if there is no question to replace."""
        command, _, question = line.strip().partition(" ")
        if command != "/edit" or not question.strip():
            return None
        if all(m["role"] != "user" for m in self.messages):
            raise MarsError("/edit: there is no question yet to replace; type one")
        return question.strip()

    @property
    def _opening(self) -> list[Message]:
        return [m for m in self.messages[:1] if m["role"] == "system"]

    def _set_system(self, value: str) -> str:
        opening = self._opening
        if not value:
            return opening[0]["content"] if opening else "no system message; /system TEXT sets one"
        messages = [] if value == "-" else [_message("system", value)]
        self.messages = [*messages, *self.messages[len(opening) :]]
        return "system message set" if messages else "system message removed"

    def _set_tau(self, value: str) -> str:
        try:
            tau = float(value)
        except ValueError as error:
            raise MarsError(f"/tau needs a number of 0 or more, not {value!r}") from error
        self.config = repeatable(self.config.with_values(tau=tau), has_window=self._has_window)
        return tau_warning(tau, self.config.metric) or f"tau {tau:g}"


def questions(read: Callable[[bool], str | None]) -> Iterator[str]:
    """Join lines to questions, until `read` returns None. The argument of `read` says whether a line
    continues the one before it.
    """
    while (line := read(False)) is not None:
        fence = next((f for f in FENCES if line.lstrip().startswith(f)), None)
        if fence is not None:
            text: str | None = line.lstrip().removeprefix(fence)
            lines = []
            while text is not None and not text.rstrip().endswith(fence):
                lines.append(text)
                text = read(True)
            last = [] if text is None else [text.rstrip().removesuffix(fence)]
            yield "\n".join([*lines, *last]).strip("\n")
            continue
        parts = []
        while line is not None and line.endswith("\\"):
            parts.append(line.removesuffix("\\"))
            line = read(True)
        yield "\n".join([*parts, *([] if line is None else [line])])


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
