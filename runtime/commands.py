"""`mars-export generate`, and the options that it shares with chat. Parse, one call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import (
    BundleArgument,
    Device,
    Json,
    Level,
    Metric,
    Safe,
    VariantName,
    at_most_cores,
    err,
    out,
    print_error,
    print_json,
)
from .display import calls_of, completion_json, show, summary
from .errors import MarsError

if TYPE_CHECKING:
    from . import Commit, GenerationConfig, Session
    from .decode.config import Window

app = typer.Typer()

Tau = Annotated[
    float | None,
    typer.Option(
        "--tau",
        min=0.0,
        help="Accept what is likelier than this, faster and riskier than --exact (0.95 in the paper); 1 is"
        " one token per forward.",
    ),
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact",
        help="Several tokens a step, and the very text of one-token decoding: the default, unless --tau is"
        " given.",
    ),
]
Lookup = Annotated[
    int,
    typer.Option(
        "--lookup",
        min=0,
        metavar="N",
        help="Propose, too, what followed the last N tokens when they stood there before (exact mode); 0 is"
        " off.",
    ),
]
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", help="Take tau, metric and window from this calibrated profile of the bundle."),
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "--max-tokens", "-n", min=1, help="Most tokens to generate.")
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", "--temp", min=0.0, help="0 is greedy. Above 0 needs a bundle exported with --logits."
    ),
]
TopK = Annotated[int, typer.Option(min=0, help="Draw from the k likeliest tokens; 0 is off.")]
TopP = Annotated[
    float, typer.Option(help="Draw from the smallest set of tokens with this probability; 1 is off.")
]
MinP = Annotated[
    float,
    typer.Option("--min-p", help="Draw from tokens at least this much as likely as the likeliest; 0 is off."),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Seed of the draws, 0 by default. The same command gives the same text: at a tau the window is"
        " then `full`, unless --window is given; `auto` follows measured times.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        min=1,
        callback=at_most_cores,
        help="Compute threads, the backend's choice by default.",
    ),
]
Penalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1 makes repetition less likely; 1 is off.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End the answer before this text; may be given several times."),
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        "--window",
        metavar="auto|full|N",
        help="Predictions of new positions in one step: auto (the default) chooses for speed, step by step;"
        " full is the bundle's block. Exact mode gives one text for all of them; at a tau, auto may give"
        " another one in another run.",
    ),
]
DraftBundle = Annotated[
    Path | None,
    typer.Option(
        "--draft", help="Bundle of a smaller model with the same tokenizer, to propose tokens (exact mode)."
    ),
]
CacheBytes = Annotated[
    int | None,
    typer.Option(
        "--cache-bytes",
        min=0,
        help="Memory for KV entries of texts that were read before: by default a small share of what is free;"
        " 0 is none.",
    ),
]
System = Annotated[str | None, typer.Option(help="A system message before the conversation.")]
Schema = Annotated[
    Path | None,
    typer.Option(
        "--schema", exists=True, dir_okay=False, help="The answer is JSON that satisfies this schema."
    ),
]
Regex = Annotated[str | None, typer.Option("--regex", help="The answer matches this regular expression.")]
Choice = Annotated[
    list[str] | None, typer.Option("--choice", help="The answer is one of these; given several times.")
]
Grammar = Annotated[
    str | None,
    typer.Option(
        help="The answer follows this grammar, which is kept in the bundle (`mars-export grammar`)."
    ),
]
Tools = Annotated[
    Path | None,
    typer.Option(
        "--tools", exists=True, dir_okay=False, help="The answer calls these functions (JSON, OpenAI's form)."
    ),
]
Runs = Annotated[bool, typer.Option("--runs", help="Mark the tokens that were accepted together.")]


@app.command()
def generate(
    bundle: BundleArgument,
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
    system: System = None,
    exact: Exact = None,
    tau: Tau = None,
    metric: Metric = None,
    profile: ProfileName = None,
    max_new_tokens: MaxNewTokens = 256,
    window: WindowOption = None,
    lookup: Lookup = 0,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = None,
    schema: Schema = None,
    regex: Regex = None,
    choice: Choice = None,
    tools: Tools = None,
    grammar: Grammar = None,
    commit: Annotated[str, typer.Option(help="Cache loop: cursor, or block (the paper's).")] = "cursor",
    cache_block: Annotated[
        int, typer.Option(min=1, help="Tokens of a cache block with --commit block.")
    ] = 32,
    device: Device = "cpu",
    variant: VariantName = None,
    threads: Threads = None,
    accuracy_level: Level = None,
    draft: DraftBundle = None,
    number: Annotated[
        int, typer.Option("--n", min=1, max=64, help="Answers to draw, with the seeds SEED, SEED + 1, ...")
    ] = 1,
    cache_bytes: CacheBytes = None,
    safe: Safe = False,
    runs: Runs = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt, streaming. With --n and --json: one JSON object per answer, each on its line."""
    from . import Commit, GenerationConfig, Session
    from .chat import repeatable

    config = GenerationConfig(
        schema=json_text(schema), regex=regex, choice=tuple(choice) if choice else None,
        tools=json_text(tools), grammar=grammar,
        max_new_tokens=max_new_tokens, window=window_of(window), lookup=lookup, stop=tuple(stop or ()),
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed or 0,
        repetition_penalty=repetition_penalty, **knob(profile, exact, tau, metric, window),
    )  # fmt: skip
    if number > 1 and config.is_greedy:
        raise MarsError(f"--n {number}: greedy answers are all the same; give --temp, too")
    loop = Commit(commit, cache_block)
    text = _prompt_text(prompt, file)
    session = Session.open(
        bundle, device, threads=threads, variant=variant, accuracy_level=accuracy_level, draft=draft,
        cache_bytes=cache_bytes, safe=safe,
    )  # fmt: skip
    config = profiled(session, profile, config)
    config = repeatable(
        config, has_window=window is not None or profile is not None, has_seed=seed is not None
    )
    messages = text if raw else _messages(system, text)
    if number > 1:
        _draw_several(session, messages, config, number, loop, as_json)
        return
    stream = session.stream(messages, config, commit=loop)
    done = show(stream, runs=runs, quiet=as_json)
    if as_json:
        print_json(completion_json(done, config) | (calls_of(session, done.text) if tools else {}))
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


def json_text(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MarsError(f"{file}: not UTF-8 text ({error})") from error


def window_of(window: str | None) -> Window:
    """The value of --window: a word, or a number of 1 or more."""
    if window is None or window == "auto":
        return "auto"
    if window == "full":
        return "full"
    if not (window.isascii() and window.isdecimal() and len(window) < 10 and int(window) >= 1):
        raise typer.BadParameter(
            f"auto, full or a number of 1 or more, not {window!r}", param_hint="--window"
        )
    return int(window)


def knob(
    profile: str | None, exact: bool | None, tau: float | None, metric: str | None, window: str | None
) -> dict[str, Any]:
    """Exact, or the settings of tau that were given; they and a profile exclude each other."""
    settings = (("exact", exact), ("tau", tau), ("metric", metric))
    given: dict[str, Any] = {name: value for name, value in settings if value is not None}
    if profile is not None and (given or window is not None):
        raise MarsError("a profile sets tau, metric and window; give --profile, or them, not both")
    if exact and tau is not None:
        raise MarsError(
            f"--exact gives the one-token text whatever is likely, --tau {tau:g} accepts what is likely;"
            " give one of them"
        )
    if metric is not None and tau is None:
        raise MarsError(f"--metric {metric} says what tau is compared with; give --tau, too")
    return given


def profiled(session: Session, profile: str | None, config: GenerationConfig) -> GenerationConfig:
    if profile is None:
        return config
    found = session.profile(profile)
    return config.with_values(tau=found.tau, metric=found.metric, window=found.window)
