"""`mars-export generate`. Parse, one call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MarsError
from .console import BundleArgument, Json, err, out, print_error, print_json
from .display import calls_of, completion_json, show, summary
from .options import AnswerOptions, SessionOptions, takes_options

if TYPE_CHECKING:
    from ..decode.config import GenerationConfig
    from ..session.session import Commit, Session

app = typer.Typer()

MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        "-n",
        metavar="N",
        min=1,
        help="Most tokens to generate; --max-tokens is the same.",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End the answer before this text; may be given several times."),
]
Grammar = Annotated[
    str | None,
    typer.Option(
        help="The answer follows this grammar, which is kept in the bundle (`mars-export grammar`)."
    ),
]
Runs = Annotated[bool, typer.Option("--runs", help="Mark the tokens that were accepted together.")]


@app.command()
@takes_options
def generate(
    bundle: BundleArgument,
    *,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; - or nothing reads standard input.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", exists=True, dir_okay=False, help="Read the prompt from a file."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it stands, without the chat template.")
    ] = False,
    max_new_tokens: MaxNewTokens = 256,
    asked: AnswerOptions,
    stop: Stop = None,
    grammar: Grammar = None,
    commit: Annotated[str, typer.Option(help="Cache loop: cursor, or block (the paper's).")] = "cursor",
    cache_block: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a cache block with --commit block.")
    ] = 32,
    number: Annotated[
        int,
        typer.Option(
            "--n", metavar="N", min=1, max=64, help="Answers to draw, with the seeds SEED, SEED + 1, ..."
        ),
    ] = 1,
    where: SessionOptions,
    runs: Runs = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt, streaming. With --n and --json: one JSON object per answer, each on its line."""
    from ..session.session import Commit

    config = asked.config(max_new_tokens, tuple(stop or ()), grammar)
    if number > 1 and config.is_greedy:
        raise MarsError(f"--n {number}: greedy answers are all the same; give --temp, too")
    loop = Commit(commit, cache_block)
    text = _prompt_text(prompt, file)
    session = where.open(bundle)
    config = asked.settled(session, config)
    messages = text if raw else _messages(asked.system, text)
    if number > 1:
        _draw_several(session, messages, config, number, loop, as_json)
        return
    stream = session.stream(messages, config, commit=loop)
    done = show(stream, runs=runs, quiet=as_json)
    if as_json:
        print_json(completion_json(done, config) | (calls_of(session, done.text) if asked.tools else {}))
    else:
        err.print(summary(done), style="dim")
    if done.finish_reason == "cancelled":
        raise typer.Exit(130)
    if done.finish_reason == "capacity":
        error = MarsError(
            f"the context of {session.backend.max_capacity} tokens is full; the answer above is cut short."
            " Shorten the prompt"
        )
        print_error(error)  # in JSON the answer's finish_reason says it
        raise typer.Exit(1)


def _draw_several(
    session: Session, prompt: Any, config: GenerationConfig, number: int, loop: Commit, as_json: bool
) -> None:
    """Several answers to one prompt, drawn side by side, each with a seed of its own."""
    configs = [config.with_values(seed=(config.seed + i) % 2**64) for i in range(number)]
    for done, own in zip(
        session.generate_batch([prompt] * number, configs, commit=loop), configs, strict=True
    ):
        if as_json:
            calls = calls_of(session, done.text) if own.tools is not None else {}
            print_json({"seed": own.seed} | completion_json(done, own) | calls)
        else:
            out.print(done.text, markup=False)
            err.print(f"seed {own.seed}: {summary(done)}", style="dim")


def _messages(system: str | None, text: str | None) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages if text is None else [*messages, {"role": "user", "content": text}]


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise MarsError("give the prompt with --prompt or with --file, not both")
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        if prompt is not None and prompt != "-":
            return prompt
        if sys.stdin.isatty():
            err.print("Reading the prompt from standard input; end it with Ctrl-D.", style="dim")
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise MarsError(f"the prompt is not UTF-8 text ({error})") from error
