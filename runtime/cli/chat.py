"""The command `chat`: a conversation at a terminal or over a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import MarsError
from ..terminal.console import err, print_error, print_json, uninterrupted, visible
from ..terminal.options import BundleArgument, takes_options
from .generate import MaxNewTokens, Quiet, Runs, calls_of, completion_json, print_summary, show
from .options import AnswerOptions, SessionOptions, tau_warning

if TYPE_CHECKING:
    from ..decode.config import GenerationConfig
    from ..session.conversation import Conversation
    from ..session.session import Session

app = typer.Typer()
Message = dict[str, str]
HELP = """\
/exact            verify every token (the default)
/tau 0.9          faster and riskier: accept predictions with at least this confidence
/runs             turn marks for tokens that were accepted together on or off
/undo             remove the last question and its answer
/system [TEXT]    print the system message, or set it; /system - removes it
/result TEXT      result of the next call of the last answer; after the last result the model goes on
/reset            start again, with the same system message
/quit             leave, like Ctrl-D; Ctrl-C ends an answer only
A \\ at the end of a line continues it on the next one."""


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
                questions = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
                del self.messages[questions[-1] if questions else len(self.messages) :]
                return "last turn removed" if questions else "there is no turn to remove"
            case "/system":
                return self._set_system(value)
            case "/reset":
                self.messages = self._opening
                return "chat reset"
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
        from ..decode.config import repeatable

        self.config = repeatable(self.config.with_values(tau=tau), has_window=self._has_window)
        return tau_warning(tau, self.config.metric) or f"tau {tau:g}"


def questions(read: Callable[[bool], str | None]) -> Iterator[str]:
    """Join lines to questions, until `read` returns None. The argument of `read` says whether a line
    continues the one before it.
    """
    while (line := read(False)) is not None:
        parts = []
        while line is not None and line.endswith("\\"):
            parts.append(line.removesuffix("\\"))
            line = read(True)
        yield "\n".join([*parts, *([] if line is None else [line])])


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


@app.command()
@takes_options
def chat(
    bundle: BundleArgument,
    *,
    max_new_tokens: MaxNewTokens = 512,
    answers: AnswerOptions,
    model: SessionOptions,
    drop_oldest: Annotated[
        bool, typer.Option("--drop-oldest", help="Forget the oldest turns when the context is full.")
    ] = False,
    runs: Runs = False,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Read one message a line, print one JSON object per answer.")
    ] = False,
) -> None:
    """Chat with a model.

    Type a message. /help lists the commands, such as /undo and /system. Ctrl-C ends an answer, Ctrl-D or
    /quit ends the chat.
    """

    config = answers.config(max_new_tokens)
    session = model.open(bundle)
    config = answers.with_profile(session, config)

    def names(answer: str) -> list[str]:
        return [call["name"] for call in calls_of(session, answer)["tool_calls"]]

    talk = Talk(
        answers.system,
        config,
        runs=runs,
        has_window=answers.has_window,
        names=names if config.tools is not None else None,
    )
    chat = _Chat(session, talk, session.conversation(answers.system, drop_oldest=drop_oldest), quiet, as_json)
    if sys.stdin.isatty() and not (quiet or as_json):
        print_greeting(session)

    def read(continues: bool) -> str | None:
        return _read_line("" if as_json or not sys.stdin.isatty() else "... " if continues else "> ")

    while True:
        try:
            for line in iter(lambda: read(False), None) if as_json else questions(read):
                if line.split(maxsplit=1)[:1] in (["/quit"], ["/exit"]):
                    return
                chat.obey_or_answer(line)
            return
        except KeyboardInterrupt:  # between two answers
            if not sys.stdin.isatty():
                raise
            with suppress(KeyboardInterrupt), uninterrupted():
                err.print("\n(Ctrl-D or /quit leaves)", style="dim")


def print_greeting(session: Session) -> None:
    """The bundle, what it is for, and where to find help."""
    manifest = session.bundle.manifest
    lines = [
        f"{session.bundle.path.name}: {manifest.source}, {session.variant.precision} on {session.device}"
    ]
    if profiles := sorted({profile.name for profile in manifest.profiles}):
        lines.append(f"Calibrated for {', '.join(profiles)} (--profile).")
    lines.append("Type a message. /help lists the commands; Ctrl-D leaves.")
    err.print(visible("\n".join(lines)), style="dim", markup=False)


class _Chat:
    """A talk, and the session that answers it."""

    def __init__(
        self, session: Session, talk: Talk, conversation: Conversation, quiet: bool, as_json: bool
    ) -> None:
        self._session, self._talk, self._conversation = session, talk, conversation
        self._quiet, self._as_json = quiet, as_json

    def obey_or_answer(self, line: str) -> None:
        """Do what a line says: a command, a question, or the result of a call."""
        talk = self._talk
        try:
            if line.startswith("/"):
                reply = talk.obey(line)
                if results := talk.results():
                    self._answer(results)
                else:
                    err.print(visible(reply), style="dim", markup=False)
            elif line.strip():
                self._answer(line)
        except MarsError as error:
            print_error(error, as_json=self._as_json)

    def _answer(self, new: str | tuple[str, ...]) -> None:
        """Answer a question, or the results of calls, . A turn that fails leaves the talk unchanged."""
        session, talk, conversation = self._session, self._talk, self._conversation
        conversation.resume(talk.messages)
        has_tools = talk.config.tools is not None
        if isinstance(new, str):
            role, reply = "user", conversation.send(new, talk.config)
        else:
            role, reply = "tool", conversation.give(new, talk.config)
        if conversation.dropped:
            err.print(
                f"the context is full: the oldest {conversation.dropped} turn(s) are forgotten", style="dim"
            )
        messages: list[Message] = [dict(message) for message in conversation.messages]
        reader = session.tool_stream() if has_tools else None
        completion = show(reply, runs=talk.runs, quiet=self._as_json, reader=reader)
        texts = [new] if isinstance(new, str) else new
        talk.answered(messages, [{"role": role, "content": text} for text in texts], completion.text)
        if self._as_json:
            calls = calls_of(session, completion.text) if has_tools else {}
            print_json(completion_json(completion, talk.config) | calls)
            return
        with uninterrupted():
            if not self._quiet:
                print_summary(completion)
            if names := talk.calls:
                text = (
                    f"calls: {', '.join(names)}; enter the result of each, in this order, with /result TEXT"
                )
                err.print(visible(text), style="dim", markup=False)


def _read_line(prompt: str) -> str | None:
    """The next line, or None at the end."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and line editing)
    try:
        return input(prompt)
    except EOFError:
        return None
