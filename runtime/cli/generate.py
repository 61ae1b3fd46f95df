"""The command `generate`, and how answers are printed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MarsError
from ..terminal.console import err, out, print_error, print_json, progress_bars, visible
from ..terminal.options import BundleArgument, Count, Json, takes_options
from .options import AnswerOptions, SessionOptions, Settings

if TYPE_CHECKING:
    from ..decode.config import GenerationConfig
    from ..session.answer import Completion, Stream
    from ..session.session import Session
    from ..text.toolcalls import ToolCall, ToolStream


def show(stream: Stream, *, runs: bool, quiet: bool, reader: ToolStream | None = None) -> Completion:
    """Print a stream as it comes. Ctrl-C ends it and keeps the text. Long prompts show a progress bar.

    With a `reader`, each call has its own line.
    """
    bars, page, odd = None, Page(reader), False
    task: Any = None
    try:
        for event in stream:
            if not event.token_ids and event.finish_reason is None:
                if bars is None:
                    bars = progress_bars()
                    task = bars.add_task("prompt", total=stream.stats.prompt_tokens, note="")
                    bars.start()
                bars.update(task, completed=stream.prefilled)
                continue
            if bars is not None:
                bars.stop()  # before any text: a live bar would capture standard output
            if not quiet:
                page.add(event.text, "black on cyan" if runs and odd else None)
            odd = not odd
    except KeyboardInterrupt:
        stream.cancel()
    finally:
        if bars is not None:
            bars.stop()
    if not quiet:
        page.end()
    return stream.completion


class Page:
    """An answer that grows on standard output."""

    def __init__(self, reader: ToolStream | None) -> None:
        self._reader = reader
        self._is_begun = False  # the last line has text
        self._is_call = False  # the last line is a call

    def add(self, text: str, style: str | None) -> None:
        if self._reader is None:
            self._print(text, style)
        else:
            self._show(self._reader.push(text), style)
        out.file.flush()

    def end(self) -> None:
        if self._reader is not None:
            self._show(self._reader.finish(), None)
        out.print()

    def _show(self, items: list[str | ToolCall], style: str | None) -> None:
        for item in items:
            was_call, self._is_call = self._is_call, not isinstance(item, str)
            if self._is_begun and (was_call or self._is_call):
                out.print()
            if isinstance(item, str):
                self._print(item, style)
                continue
            out.print("-> ", end="", style="dim")
            self._print(f"{visible(item.name)} ", "bold")
            self._print(item.arguments, style)

    def _print(self, text: str, style: str | None) -> None:
        if text:
            out.print(text, end="", markup=False, style=style)
            self._is_begun = not text.endswith("\n")


def calls_of(session: Session, answer: str) -> list[dict[str, str]]:
    """The calls in an answer, as JSON."""
    reader = session.tool_stream()
    reader.push(answer)
    reader.finish()
    return [{"name": call.name, "arguments": call.arguments} for call in reader.answer.calls]


def print_summary(completion: Completion, prefix: str = "") -> None:
    """Print the statistics of an answer. At a terminal, lines break between words only."""
    stats = completion.stats
    err.print(
        f"{prefix}{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens from cache,"
        f" {stats.tokens} tokens, {stats.tokens_per_forward:.2f} tokens/forward,"
        f" {stats.tokens_per_second:.1f} tokens/s, first token after {stats.time_to_first_token:.2f} s,"
        f" ended by {completion.finish_reason}",
        style="dim",
        soft_wrap=not err.is_terminal,
    )


def completion_json(session: Session, completion: Completion, config: GenerationConfig) -> dict[str, Any]:
    value = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "confidences": [round(c, 6) for c in completion.confidences],
        "finish_reason": completion.finish_reason,
        "exact": config.exact,
        "tau": config.tau,
        "masks": config.masks,
        "stats": completion.stats.to_dict(),
    }
    return value if config.tools is None else value | {"tool_calls": calls_of(session, completion.text)}


app = typer.Typer()

MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", "-n", metavar="N", min=1, help="Maximum tokens to generate. Also --max-tokens."
    ),
]


@dataclass(frozen=True, slots=True)
class PrintOptions:
    """The printed parts of an answer.

    runs: Mark tokens that were accepted together.
    quiet: Print answers only, no statistics.
    """

    runs: bool = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False


@dataclass(frozen=True, slots=True)
class AskOptions:
    """One question.

    prompt: Prompt. By default, or with -, read standard input.
    file: Read the prompt from a file.
    raw: Continue the prompt as it is, without the chat template.
    number: Number of answers; their seeds count up.
    """

    prompt: Annotated[str | None, typer.Option("--prompt", "-p")] = None
    file: Annotated[Path | None, typer.Option("--file", "-f", exists=True, dir_okay=False)] = None
    raw: bool = False
    number: Annotated[int, typer.Option("--n", metavar="N", min=1, max=64)] = 1

    @property
    def text(self) -> str:
        """The prompt. Raises MarsError."""
        if self.prompt is not None and self.file is not None:
            raise MarsError("use either --prompt or --file, not both", field="prompt")
        try:
            if self.file is not None:
                return self.file.read_text(encoding="utf-8")
            if self.prompt is not None and self.prompt != "-":
                return self.prompt
            if sys.stdin.isatty():
                err.print("Reading the prompt from standard input; Ctrl-D ends it.", style="dim")
            if not (text := sys.stdin.buffer.read().decode("utf-8")):
                raise MarsError(
                    "standard input is empty; give the prompt with -p TEXT or -f FILE, or pipe it in",
                    field="prompt",
                )
            return text
        except UnicodeDecodeError as error:
            raise MarsError(f"the prompt is not UTF-8 text ({error})", field="prompt") from error


@dataclass(frozen=True, slots=True)
class OnceOptions:
    """Settings of an answer that a conversation does not have.

    Decoding:
    cache_block: With a tau, tokens whose KV entries become final together: 1 is cursor commit, more the
        paper's block commit.
    """

    cache_block: Count = 1


@app.command(context_settings={"allow_extra_args": True})  # so that their error says -p
@takes_options
def generate(
    bundle: BundleArgument,
    *,
    context: typer.Context,
    ask: AskOptions,
    max_new_tokens: MaxNewTokens = 256,
    answers: AnswerOptions,
    settings: Settings,
    once: OnceOptions,
    model: SessionOptions,
    printed: PrintOptions,
    as_json: Json = False,
) -> None:
    """Generate an answer to a prompt.

    With --n and --json, each answer is a JSON object on its own line.
    """
    if context.args:
        words = quote(" ".join(context.args))
        raise typer.BadParameter(f"give the prompt with -p: mars-export generate {bundle} -p {words}")
    if ask.number > 1 and not settings.get("temperature"):
        raise MarsError(f"--n {ask.number}: greedy answers are all equal; add --temp", field="number")
    text, cache_block = ask.text, once.cache_block
    session = model.open(bundle)
    config = answers.config(session, settings | {"max_new_tokens": max_new_tokens})
    prompt: Any = text
    if not ask.raw:
        system = [] if answers.system is None else [{"role": "system", "content": answers.system}]
        prompt = [*system, {"role": "user", "content": text}]
    if ask.number > 1:
        configs = [config.with_values(seed=(config.seed + i) % 2**64) for i in range(ask.number)]
        completions = session.generate_batch([prompt] * ask.number, configs, cache_block=cache_block)
        for completion, config in zip(completions, configs, strict=True):
            if as_json:
                print_json({"seed": config.seed} | completion_json(session, completion, config))
                continue
            out.print(completion.text, markup=False)
            if not printed.quiet:
                print_summary(completion, f"seed {config.seed}: ")
        return
    stream = session.stream(prompt, config, cache_block=cache_block)
    completion = show(stream, runs=printed.runs, quiet=as_json)
    if as_json:
        print_json(completion_json(session, completion, config))
    elif not printed.quiet:
        print_summary(completion)
    if completion.finish_reason == "cancelled":
        raise typer.Exit(130)
    if completion.finish_reason == "capacity":
        error = MarsError(
            f"the context of {session.backend.max_capacity} tokens is full; the answer above is cut short."
            " Shorten the prompt"
        )
        print_error(error)  # in JSON, finish_reason says so
        raise typer.Exit(1)
