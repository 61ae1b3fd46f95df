"""Printing answers: text as it comes, accepted runs, calls and statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..text.toolcalls import ToolCall
from .console import err, out, progress_bars, visible

if TYPE_CHECKING:
    from ..decode.config import GenerationConfig
    from ..session.answer import Completion, Stream
    from ..session.session import Session
    from ..text.toolcalls import ToolStream


def show(stream: Stream, *, runs: bool, quiet: bool, reader: ToolStream | None = None) -> Completion:
    """Print a stream as it comes. Ctrl-C ends it and keeps the text. Long prompts show a progress bar.

    With a `reader`, each call has its own line.
    """
    bars, task, odd = progress_bars(), None, False
    page = Page(reader)
    try:
        for event in stream:
            if not event.token_ids and event.finish_reason is None:
                if task is None:
                    task = bars.add_task("prompt", total=stream.stats.prompt_tokens)
                    bars.start()
                bars.update(task, completed=stream.prefilled)
                continue
            bars.stop()  # before any text: a live bar would capture standard output
            if not quiet:
                page.add(event.text, "black on cyan" if runs and odd else None)
            odd = not odd
    except KeyboardInterrupt:
        stream.cancel()
    finally:
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
            is_call = isinstance(item, ToolCall)
            if self._is_begun and (is_call or self._is_call):
                out.print()
            self._is_call = is_call
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


def calls_of(session: Session, answer: str) -> dict[str, Any]:
    """The calls in an answer, as JSON."""
    reader = session.tool_stream()
    reader.push(answer)
    reader.finish()
    calls = [{"name": call.name, "arguments": call.arguments} for call in reader.answer.calls]
    return {"tool_calls": calls}


def print_summary(completion: Completion, prefix: str = "") -> None:
    """Print the statistics of an answer. At a terminal, lines break between words only."""
    err.print(f"{prefix}{summary(completion)}", style="dim", soft_wrap=not err.is_terminal)


def summary(completion: Completion) -> str:
    stats = completion.stats
    return (
        f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens from cache, {stats.tokens} tokens,"
        f" {stats.tokens_per_forward:.2f} tokens/forward, {stats.tokens_per_second:.1f} tokens/s,"
        f" first token after {stats.time_to_first_token:.2f} s, ended by {completion.finish_reason}"
    )


def completion_json(completion: Completion, config: GenerationConfig) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "confidences": [round(c, 6) for c in completion.confidences],
        "finish_reason": completion.finish_reason,
        "exact": config.exact,
        "tau": config.tau,
        "window": config.window,
        "stats": completion.stats.to_dict(),
    }
