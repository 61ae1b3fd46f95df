"""The command `chat`: a conversation at a terminal or over a pipe."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import MarsError
from .console import BundleArgument, err, print_error, print_json, uninterrupted, visible
from .display import calls_of, completion_json, print_summary, show
from .generate import MaxNewTokens, Quiet, Runs
from .options import AnswerOptions, SessionOptions, takes_options

if TYPE_CHECKING:
    from ..session.conversation import Conversation
    from ..session.session import Session
    from .talk import Message, Talk

app = typer.Typer()


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
    from .talk import Talk, questions

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
            if (question := talk.edited(line)) is not None:
                self._answer(talk.without_last, question)
            elif line.startswith("/"):
                reply = talk.obey(line)
                if results := talk.results():
                    self._answer(talk.messages, results)
                else:
                    err.print(visible(reply), style="dim", markup=False)
            elif line.strip():
                self._answer(talk.messages, line)
        except MarsError as error:
            print_error(error, as_json=self._as_json)

    def _answer(self, before: list[Message], new: str | tuple[str, ...]) -> None:
        """Answer a question, or the results of calls, after the messages `before`. A turn that fails leaves
        the talk unchanged.
        """
        session, talk, conversation = self._session, self._talk, self._conversation
        conversation.resume(before)
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
