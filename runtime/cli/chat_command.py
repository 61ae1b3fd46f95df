"""`mars-export chat`: a talk at a terminal or over a pipe. Reads lines, and prints what comes of them."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import MarsError
from .console import BundleArgument, err, held, print_error, print_json, visible
from .display import calls_of, completion_json, show, summary
from .generate import MaxNewTokens, Runs
from .options import AnswerOptions, SessionOptions, takes_options

if TYPE_CHECKING:
    from ..session.answer import Stream
    from ..session.conversation import Conversation
    from ..session.session import Session
    from .chat import Message, Talk

app = typer.Typer()


@app.command()
@takes_options
def chat(
    bundle: BundleArgument,
    *,
    max_new_tokens: MaxNewTokens = 512,
    asked: AnswerOptions,
    where: SessionOptions,
    drop_oldest: Annotated[
        bool, typer.Option("--drop-oldest", help="Where the context ends, let the oldest turns go.")
    ] = False,
    runs: Runs = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per answer; questions are read as lines.")
    ] = False,
) -> None:
    """Talk with the model: /help lists what can be set while talking, /undo takes the last turn back, /edit
    QUESTION asks another in its place, /result TEXT says what a call came to, /quit leaves. Ctrl-C ends an
    answer only.
    """
    from .chat import Talk, questions

    config = asked.config(max_new_tokens)
    session = where.open(bundle)
    config = asked.settled(session, config)

    def names(answer: str) -> list[str]:
        return [call["name"] for call in calls_of(session, answer)["tool_calls"]]

    talk = Talk(
        asked.system,
        config,
        runs=runs,
        has_window=asked.has_window,
        names=names if config.tools is not None else None,
    )
    said = session.conversation(asked.system, drop_oldest=drop_oldest)

    def ask(goes_on: bool) -> str | None:
        return _ask(quiet=as_json, goes_on=goes_on)

    interrupted = False
    while True:
        try:
            if interrupted:
                interrupted = False
                with held():
                    err.print("\n(Ctrl-D or /quit leaves)", style="dim")
            for question in iter(lambda: ask(False), None) if as_json else questions(ask):
                if question.split(maxsplit=1)[:1] in (["/quit"], ["/exit"]):
                    return
                _turn(session, said, talk, question, as_json)
            return
        except KeyboardInterrupt:  # a moment before or after an answer: the talk is what counts
            if not sys.stdin.isatty():
                raise
            interrupted = True


def _turn(session: Session, said: Conversation[Stream], talk: Talk, line: str, as_json: bool) -> None:
    """Do what a line says: a command, a question to answer, or a result of a call."""
    try:
        if (question := talk.edited(line)) is not None:
            _answer(session, said, talk, talk.without_last, question, as_json)
        elif line.startswith("/"):
            told = talk.obey(line)
            if results := talk.results():
                _answer(session, said, talk, talk.messages, results, as_json)
            else:
                err.print(visible(told), style="dim", markup=False)
        elif line.strip():
            _answer(session, said, talk, talk.messages, line, as_json)
    except MarsError as error:
        print_error(error, as_json=as_json)


def _answer(
    session: Session,
    said: Conversation[Stream],
    talk: Talk,
    before: list[Message],
    asked: str | tuple[str, ...],
    as_json: bool,
) -> None:
    """One turn of a talk, behind the messages `before`: a question, or the results of calls. What fails is
    forgotten.
    """
    said.resume(before)
    has_tools = talk.config.tools is not None
    reply = said.send(asked, talk.config) if isinstance(asked, str) else said.give(asked, talk.config)
    if said.dropped:
        err.print(f"the context is full: the oldest {said.dropped} turn(s) are forgotten", style="dim")
    kept: list[Message] = [dict(message) for message in said.messages]
    done = show(reply, runs=talk.runs, quiet=as_json, reader=session.tool_stream() if has_tools else None)
    role, texts = ("user", (asked,)) if isinstance(asked, str) else ("tool", asked)
    talk.answered(kept, [{"role": role, "content": text} for text in texts], done.text)
    if as_json:
        print_json(completion_json(done, talk.config) | (calls_of(session, done.text) if has_tools else {}))
        return
    with held():
        err.print(summary(done), style="dim")
        if names := talk.calls:
            text = f"calls: {', '.join(names)}; give each what it came to, in this order, with /result TEXT"
            err.print(visible(text), style="dim", markup=False)


def _ask(*, quiet: bool, goes_on: bool = False) -> str | None:
    """The next line of the user, or None at the end."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and line editing)
    try:
        return input("" if quiet or not sys.stdin.isatty() else "... " if goes_on else "> ")
    except EOFError:
        return None
