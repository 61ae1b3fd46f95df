"""The command `chat`: a conversation at a terminal or over a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import MarsError
from ..terminal.console import err, print_error, print_json, uninterrupted, visible
from ..terminal.options import BundleArgument, takes_options
from .generate import MaxNewTokens, PrintOptions, calls_of, completion_json, print_summary, show
from .options import AnswerOptions, SessionOptions, Settings, tau_warning

if TYPE_CHECKING:
    from ..decode.config import GenerationConfig
    from ..session.answer import Stream
    from ..session.conversation import Conversation
    from ..session.session import Session

app = typer.Typer()
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
    """A conversation, the settings of its next answer, and results for the calls of its last one.

    `has_masks` says that the user chose the masks, so that they stay even for repeatable draws. `names`
    returns the names of the calls in an answer; it is None without tools.
    """

    def __init__(
        self,
        conversation: Conversation,
        config: GenerationConfig,
        *,
        runs: bool = False,
        has_masks: bool = False,
        names: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        self.conversation, self.config, self.runs = conversation, config, runs
        self._has_masks, self._names, self._results = has_masks, names, list[str]()

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
                turns = self.conversation.turns
                self.conversation.undo(1 + sum(1 for _ in takewhile(lambda t: t.results, reversed(turns))))
                return "last turn removed" if turns else "there is no turn to remove"
            case "/system":
                return self._set_system(value)
            case "/reset":
                self.conversation.reset()
                return "chat reset"
            case "/help":
                return HELP
            case _:
                raise MarsError(f"unknown command {command}; /help lists the commands")

    @property
    def calls(self) -> tuple[str, ...]:
        """The names of the last answer's calls without a result."""
        turns = self.conversation.turns
        if self._names is None or not turns:
            return ()
        return tuple(self._names(turns[-1].answer)[len(self._results) :])

    def ask(self, line: str) -> Stream:
        """The answer to a question."""
        reply = self.conversation.send(line, self.config)
        self._results = []
        return reply

    def give_results(self) -> Stream | None:
        """The answer to the results of all calls of the last answer; None while one is missing."""
        if self.calls or not self._results:
            return None
        results, self._results = self._results, []
        return self.conversation.give(results, self.config)

    def _note(self, result: str) -> str:
        if not self.calls:
            hint = "" if self._names is not None else "; start chat with --tools"
            raise MarsError(f"/result: no call waits for a result{hint}")
        name = self.calls[0]
        self._results.append(result)
        rest = f"; next is {self.calls[0]}" if self.calls else ""
        return f"result of {name}{rest}"

    def _set_system(self, value: str) -> str:
        system = self.conversation.system
        if not value:
            return "no system message; /system TEXT sets one" if system is None else system
        self.conversation.system = None if value == "-" else value
        return "system message removed" if value == "-" else "system message set"

    def _set_tau(self, value: str) -> str:
        try:
            tau = float(value)
        except ValueError as error:
            raise MarsError(f"/tau needs a number of 0 or more, not {value!r}") from error
        from ..decode.config import repeatable

        self.config = repeatable(self.config.with_values(tau=tau), has_masks=self._has_masks)
        return tau_warning(tau, self.config.metric) or f"tau {tau:g}"


def questions(read: Callable[[bool], str | None]) -> Iterator[str]:
    """Join lines to questions, until `read` returns None. Its argument: whether a line continues another."""
    while (line := read(False)) is not None:
        parts = []
        while line is not None and line.endswith("\\"):
            parts.append(line.removesuffix("\\"))
            line = read(True)
        yield "\n".join([*parts, *([] if line is None else [line])])


@app.command()
@takes_options
def chat(
    bundle: BundleArgument,
    *,
    max_new_tokens: MaxNewTokens = 512,
    answers: AnswerOptions,
    settings: Settings,
    model: SessionOptions,
    drop_oldest: Annotated[
        bool, typer.Option("--drop-oldest", help="Forget the oldest turns when the context is full.")
    ] = False,
    printed: PrintOptions,
    as_json: Annotated[
        bool, typer.Option("--json", help="Read one message a line, print one JSON object per answer.")
    ] = False,
) -> None:
    """Chat with a model.

    Type a message. /help lists the commands, such as /undo and /system. Ctrl-C ends an answer, Ctrl-D or
    /quit ends the chat.
    """
    session = model.open(bundle)
    config = answers.config(session, settings | {"max_new_tokens": max_new_tokens})
    talk = Talk(
        session.conversation(answers.system, drop_oldest=drop_oldest), config, runs=printed.runs,
        has_masks="masks" in settings,
        names=None if config.tools is None else lambda answer: [c["name"] for c in calls_of(session, answer)],
    )  # fmt: skip
    if sys.stdin.isatty() and not (printed.quiet or as_json):
        print_greeting(session)

    def read(continues: bool) -> str | None:
        return _read_line("" if as_json or not sys.stdin.isatty() else "... " if continues else "> ")

    is_terminal, was_interrupted = sys.stdin.isatty(), False
    while True:
        try:
            if was_interrupted:
                with uninterrupted():
                    err.print("\n(Ctrl-D or /quit to leave)", style="dim")
                was_interrupted = False
            for line in iter(lambda: read(False), None) if as_json else questions(read):
                if line.split(maxsplit=1)[:1] in (["/quit"], ["/exit"]):
                    return
                _obey_or_answer(session, talk, line, is_quiet=printed.quiet, as_json=as_json)
            return
        except KeyboardInterrupt:  # between two answers; another may follow at once, so little is done here
            if not is_terminal:
                raise
            was_interrupted = True


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


def _obey_or_answer(session: Session, talk: Talk, line: str, *, is_quiet: bool, as_json: bool) -> None:
    """Do what a line says: a command, a question, or the result of a call."""
    try:
        if line.startswith("/"):
            said = talk.obey(line)
            reply = talk.give_results()
            if reply is None:
                err.print(visible(said), style="dim", markup=False)
                return
        elif line.strip():
            reply = talk.ask(line)
        else:
            return
        if dropped := talk.conversation.dropped:
            err.print(f"the context is full: the oldest {dropped} turn(s) are forgotten", style="dim")
        reader = session.tool_stream() if talk.config.tools is not None else None
        completion = show(reply, runs=talk.runs, quiet=as_json, reader=reader)
    except MarsError as error:
        print_error(error, as_json=as_json)
        return
    if as_json:
        print_json(completion_json(session, completion, talk.config))
        return
    with uninterrupted():
        if not is_quiet:
            print_summary(completion)
        if names := talk.calls:
            text = f"calls: {', '.join(names)}; enter the result of each, in this order, with /result TEXT"
            err.print(visible(text), style="dim", markup=False)


def _read_line(prompt: str) -> str | None:
    """The next line, or None at the end."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and line editing)
    try:
        return input(prompt)
    except EOFError:
        return None
