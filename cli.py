"""The mars-export command line. Parses, makes one call, prints; everything heavy is imported inside the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mars_export.runtime.errors import MarsError

if TYPE_CHECKING:
    from rich.progress import Progress

    from mars_export.calibration.run import Estimate
    from mars_export.runtime import Completion, GenerationConfig, Session, Stream

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
out = Console(highlight=False, soft_wrap=True)
profiles_app = typer.Typer(no_args_is_help=True, help="Calibrated settings kept in a bundle.")
app.add_typer(profiles_app, name="profiles")
err = Console(stderr=True, highlight=False, soft_wrap=True)

BundleArgument = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle directory, as `mars-export onnx` writes it.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Device = Annotated[str, typer.Option(help="cpu or cuda. A missing device is an error, never a silent CPU.")]
QuantBlock = Annotated[int, typer.Option(help="Inputs that share a scale, for int4 and int8.")]
Asymmetric = Annotated[bool, typer.Option("--asymmetric", help="int4 and int8 with zero points.")]
Search = Annotated[bool, typer.Option("--search", help="Try narrower ranges for each block of int4 and int8; slower.")]
Head = Annotated[str, typer.Option(help="How a quantized bundle stores lm_head: float, int8 or int4.")]
Embedding = Annotated[str, typer.Option(help="How a quantized bundle stores the embedding: float or int8.")]
VariantName = Annotated[str | None, typer.Option("--variant", help="Which variant of the bundle to open, instead of the one that fits best.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads; the backend decides by default.")]
Tau = Annotated[
    float | None, typer.Option("--tau", min=0.0, help="Confidence bound, the speed/quality knob: 1 is one token per forward; 0.95 by default.")
]
ProfileName = Annotated[str | None, typer.Option("--profile", help="Take tau, metric and window from this calibrated profile of the bundle.")]
Metric = Annotated[
    str | None, typer.Option(help="What tau bounds: probability, margin (top-2) or entropy (nats). The last two need --metrics at export.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy. Above 0 needs a bundle exported with --logits.")]
TopK = Annotated[int, typer.Option(min=0, help="Draw from the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Draw from the smallest set of tokens with this probability; 1 is off.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the draws.")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1 makes repetition less likely; 1 is off.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End the answer before this text; may be given several times.")]
Level = Annotated[int | None, typer.Option("--accuracy-level", help="int4 and int8 weights: 0 is exact and slow, 4 is fast (8-bit activations).")]
Window = Annotated[int | None, typer.Option(min=1, help="Most predictions made in one step; the bundle's block by default.")]
System = Annotated[str | None, typer.Option(help="A system message before the conversation.")]
Runs = Annotated[bool, typer.Option("--runs", help="Mark the tokens that were accepted together.")]


@app.callback()
def describe() -> None:
    """Export MARS multi-token language models and run them with a speed/quality knob per request."""


@app.command()
def onnx(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="[CHECKPOINT]", help="Hugging Face directory, hub id, PEFT adapter directory or .gguf; without it, the default checkpoint."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="BUNDLE", help="The bundle directory to write.")] = Path("mars.bundle"),
    block: Annotated[int, typer.Option(min=1, help="Slots a decode step is built for; the block the checkpoint was tuned with.")] = 8,
    precision: Annotated[
        str, typer.Option(help="Of the weights: fp32, fp16, bf16 (TensorRT only), int8, int4, w8a8 (8-bit activations too), or auto.")
    ] = "fp32",
    activations: Annotated[str, typer.Option(help="What quantized weights are computed in: fp32, fp16 or bf16.")] = "fp32",
    quant_block: QuantBlock = 32,
    asymmetric: Asymmetric = False,
    search: Search = False,
    head: Head = "int8",
    embedding: Embedding = "int8",
    metrics: Annotated[bool, typer.Option("--metrics", help="Also output margin and entropy.")] = False,
    logits: Annotated[bool, typer.Option("--logits", help="Also output logits: needed for sampling and repetition penalty.")] = False,
    static: Annotated[bool, typer.Option("--static", help="Also write graphs with every dimension fixed, sharing the weights.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the --static graphs.")] = 1,
    capacity: Annotated[int, typer.Option(min=1, help="KV entries a row of the --static graphs holds.")] = 1024,
    prefill: Annotated[int, typer.Option(min=1, help="Slots of the --static prefill graph.")] = 128,
    mask_token: Annotated[str | None, typer.Option(help="The mask token (text or id), if the tokenizer does not name it.")] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision to pin.")] = None,
    base: Annotated[str | None, typer.Option(help="Base model of an adapter, instead of the one it names.")] = None,
    kv_layout: Annotated[str, typer.Option("--kv-layout", help="static, or delta: plain operators for TensorRT before 10.15.")] = "static",
    allow_drift: Annotated[bool, typer.Option("--allow-drift", help="Keep a bundle that fails the self-check.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
    as_json: Json = False,
) -> None:
    """Export a MARS checkpoint to a bundle for ONNX Runtime."""
    from mars_export.exporter import ExportOptions, choose_precision, export_onnx, open_checkpoint

    if checkpoint is None:
        err.print("No CHECKPOINT given: using the default one (SmolLM2-135M-Instruct with the embedded MARS adapter).")
    if precision == "auto":
        precision, reason = choose_precision()
        err.print(f"precision {precision}: {reason}")
    options = ExportOptions(
        block=block, precision=precision, activations=activations, quant_block=quant_block, asymmetric=asymmetric, search=search, head=head,
        embedding=embedding, metrics=metrics, logits=logits, static=static, batch=batch, capacity=capacity, prefill=prefill,
        allow_drift=allow_drift, kv_layout=kv_layout,
    )  # fmt: skip
    with _progress() as bars:
        opened = open_checkpoint(checkpoint, revision=revision, base=base, mask_token=mask_token)
        manifest = export_onnx(opened, output, options, force=force, progress=_advance(bars))
    if as_json:
        _print_json({"bundle": str(output), "manifest": json.loads(manifest.to_json())})
        return
    drift, size = manifest.variants[0].drift, sum(f.size for f in manifest.files)
    out.print(f"[bold]{output}[/]  {size / 1e6:.0f} MB, {precision}, block {block}, {len(manifest.variants)} graph(s)")
    if drift is not None:
        out.print(_drift_line(drift))
    out.print(f"try: mars-export chat {output}")


@app.command()
def trt(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[CHECKPOINT|BUNDLE]", help="A checkpoint as for `onnx`, or a bundle to add an engine to; without it, the default checkpoint."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="BUNDLE", help="The bundle to write: mars.bundle by default, a given bundle itself.")
    ] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Slots a decode step is built for: 8, or the given bundle's.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of the weights: fp16 (default), bf16, fp32, int8 or int4; a given bundle has its own.")
    ] = None,
    activations: Annotated[str, typer.Option(help="What quantized weights are computed in: fp16, bf16 or fp32.")] = "fp16",
    quant_block: QuantBlock = 32,
    search: Search = False,
    head: Head = "float",
    batch: Annotated[int, typer.Option(min=1, help="Most rows of a step.")] = 1,
    capacity: Annotated[int | None, typer.Option(min=1, help="KV entries a row holds: 1024, or the model's context if that is less.")] = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="Most slots of a prefill step: 128 by default.")] = None,
    target: Annotated[str, typer.Option(help="rtx, sm75 ... sm121, host, jetson-orin, jetson-thor, h100 or h200.")] = "rtx",
    flavor: Annotated[str, typer.Option(help="auto, tensorrt (Jetson, data centre) or rtx (desktop, builds without a GPU).")] = "auto",
    jetpack: Annotated[str | None, typer.Option(help="JetPack version of a Jetson target: it decides the KV layout.")] = None,
    kv_layout: Annotated[str | None, typer.Option("--kv-layout", help="static or delta, instead of what the target's TensorRT takes.")] = None,
    static: Annotated[bool, typer.Option("--static", help="An engine for exactly --batch rows of --block slots.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Also output margin and entropy.")] = False,
    logits: Annotated[bool, typer.Option("--logits", help="Also output logits: needed for sampling and repetition penalty.")] = False,
    mask_token: Annotated[str | None, typer.Option(help="The mask token (text or id), if the tokenizer does not name it.")] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision to pin.")] = None,
    base: Annotated[str | None, typer.Option(help="Base model of an adapter, instead of the one it names.")] = None,
    allow_drift: Annotated[bool, typer.Option("--allow-drift", help="Keep a bundle that fails the self-check.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be built, and build nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle or engine; build even if memory looks too small.")] = False,
    as_json: Json = False,
) -> None:
    """Build a TensorRT engine, or where this machine cannot, put a recipe for the target's own into the bundle."""
    from mars_export.exporter import ExportOptions, open_checkpoint
    from mars_export.exporter.engines import add_engine, export_engine, is_bundle
    from mars_export.exporter.plan import EngineOptions
    from mars_export.runtime.bundle import open_bundle

    engine = EngineOptions(
        target=target, flavor=flavor, jetpack=jetpack, kv_layout=kv_layout, batch=batch, capacity=capacity, prefill=prefill, static=static
    )
    if source is None:
        err.print("No CHECKPOINT given: using the default one (SmolLM2-135M-Instruct with the embedded MARS adapter).")
    with _progress() as bars:
        if source is not None and is_bundle(source):
            written = output or Path(source)
            outcome = add_engine(
                open_bundle(source), written, engine, precision=precision, block=block, force=force, dry_run=dry_run, progress=_advance(bars)
            )
        else:
            written = output or Path("mars.bundle")
            graph = ExportOptions(
                block=block or 8, precision=precision or "fp16", activations=activations, quant_block=quant_block, search=search, head=head,
                embedding="float", metrics=metrics, logits=logits, allow_drift=allow_drift,
            )  # fmt: skip
            opened = open_checkpoint(source, revision=revision, base=base, mask_token=mask_token)
            outcome = export_engine(opened, written, graph, engine, force=force, dry_run=dry_run, progress=_advance(bars))
    if as_json:
        _print_json({"bundle": str(written)} | outcome.to_dict())
    else:
        _print_engine(written, outcome)


def _print_engine(bundle: Path, outcome: Any) -> None:
    plan, variant = outcome.plan, outcome.variant
    out.print(f"[bold]{bundle}[/]  engine {plan.name} for {', '.join(plan.target.compute_capabilities)}, {plan.backend}, KV layout {plan.kv_layout}")
    for r in plan.ranges:
        out.print(f"  {r.name}: batch {r.batch}, slots {r.slots}, predictions {r.outputs}, capacity {plan.capacity}")
    if variant is not None:
        info, size = variant.engine, next(f.size for f in outcome.manifest.files if f.path == variant.file)
        cost = f"in {info.seconds:.1f} s, {info.peak_memory / 1e9:.1f} GB of memory at most"
        out.print(f"built: {size / 1e6:.0f} MB with {variant.backend} {info.version} {cost}")
        if variant.drift is not None:
            out.print(_drift_line(variant.drift))
        out.print(f"try, on that GPU: mars-export chat {bundle} --device cuda")
        return
    if plan.obstacle is None:
        out.print(f"dry run: nothing was built; about {outcome.memory / 1e9:.1f} GB of memory would be needed")
        return
    err.print(f"No engine {'would be' if outcome.manifest is None else 'was'} built: {plan.obstacle}.", style="yellow")
    if outcome.manifest is not None:
        out.print(f"The bundle holds a recipe instead; on the device: sh {bundle}/{outcome.recipe}", markup=False)


def _drift_line(drift: Any) -> str:
    line = (
        f"self-check: argmax {drift.argmax_matches}/{drift.positions}, logit error {drift.max_logit_error:.1e},"
        f" confidence error {drift.max_confidence_error:.1e}"
    )
    flips = ", ".join(f"{count} at {tau}" for tau, count in (drift.acceptance_flips or {}).items())
    return line + (f", acceptance flips {flips}" if flips else "")


@app.command()
def generate(
    bundle: BundleArgument,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt; - or nothing reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", exists=True, dir_okay=False, help="Read the prompt from a file.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it stands, without the chat template.")] = False,
    system: System = None,
    tau: Tau = None,
    metric: Metric = None,
    profile: ProfileName = None,
    max_new_tokens: MaxNewTokens = 256,
    window: Window = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = None,
    commit: Annotated[str, typer.Option(help="Cache loop: cursor, or block (the paper's).")] = "cursor",
    cache_block: Annotated[int, typer.Option(min=1, help="Tokens of a cache block with --commit block.")] = 32,
    device: Device = "cpu",
    variant: VariantName = None,
    threads: Threads = None,
    accuracy_level: Level = None,
    runs: Runs = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt, streaming."""
    from mars_export.runtime import Commit, GenerationConfig, Session

    config = GenerationConfig(
        max_new_tokens=max_new_tokens, window=window, stop=tuple(stop or ()), temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        repetition_penalty=repetition_penalty, **_knob(profile, tau, metric, window),
    )  # fmt: skip
    loop = Commit(commit, cache_block)
    text = _prompt_text(prompt, file)
    session = Session.open(bundle, device, threads=threads, variant=variant, accuracy_level=accuracy_level)
    config = _profiled(session, profile, config)
    stream = session.stream(text if raw else _messages(system, text), config, commit=loop)
    done = _show(stream, runs=runs, quiet=as_json)
    if as_json:
        _print_json(_completion_json(done, config))
    else:
        err.print(_summary(done), style="dim")
    if done.finish_reason == "cancelled":
        raise typer.Exit(130)
    if done.finish_reason == "capacity":
        raise MarsError(f"the context of {session.backend.max_capacity} tokens is full; the answer above is cut short. Shorten the prompt")


@app.command()
def chat(
    bundle: BundleArgument,
    system: System = None,
    tau: Tau = None,
    metric: Metric = None,
    profile: ProfileName = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    repetition_penalty: Penalty = 1.0,
    device: Device = "cpu",
    variant: VariantName = None,
    threads: Threads = None,
    accuracy_level: Level = None,
    runs: Runs = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer; questions are read as lines.")] = False,
) -> None:
    """Talk with the model. /tau 0.8 changes the knob, /runs shows accepted runs, /reset forgets, /quit leaves."""
    from mars_export.runtime import GenerationConfig, Session

    config = GenerationConfig(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, repetition_penalty=repetition_penalty,
        **_knob(profile, tau, metric),
    )  # fmt: skip
    session = Session.open(bundle, device, threads=threads, variant=variant, accuracy_level=accuracy_level)
    config = _profiled(session, profile, config)
    history: list[dict[str, str]] = _messages(system, None)
    start = len(history)
    while (line := _ask(quiet=as_json)) is not None:
        command, _, value = line.partition(" ")
        if command in ("/quit", "/exit"):
            return
        if command == "/reset":
            del history[start:]
        elif command == "/runs":
            runs = not runs
        elif command == "/tau":
            config = _with_tau(config, value)
        elif command.startswith("/"):
            err.print("commands: /tau NUMBER, /runs, /reset, /quit")
        elif line.strip():
            history.append({"role": "user", "content": line})
            try:
                done = _show(session.stream(history, config), runs=runs, quiet=as_json)
            except MarsError as error:
                history.pop()
                _print_error(error)
                continue
            history.append({"role": "assistant", "content": done.text})
            if as_json:
                _print_json(_completion_json(done, config))
            else:
                err.print(_summary(done), style="dim")


@app.command()
def inspect(
    bundle: BundleArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file, even those found good before.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a bundle holds."""
    from rich.table import Table

    from mars_export.runtime.bundle import open_bundle

    manifest = open_bundle(bundle, full=verify).manifest
    if as_json:
        sys.stdout.write(manifest.to_json())
        return
    model, tokens = manifest.model, manifest.tokens
    out.print(f"[bold]{bundle}[/]  format {manifest.format_version}, written by {manifest.producer}")
    out.print(f"source    {manifest.source}" + (f" @ {manifest.revision}" if manifest.revision else ""))
    out.print(
        f"model     {model.type}, {model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads}/{model.num_kv_heads} heads"
        f" of {model.head_dim},"
        f" vocabulary {model.vocab_size}, context {model.context_length}"
    )
    if manifest.text is not None:
        chat = manifest.text.chat
        out.print("chat      needs jinja2" if chat is None else f"chat      roles {', '.join(chat.roles)}; in C++ too")
    out.print(f"decoding  block {manifest.block}, mask id {tokens.mask}, end ids {', '.join(map(str, tokens.eos))}")
    table = Table("variant", "backend", "precision", "KV", "shape", "outputs", "logit error", "argmax", box=None)
    for v in manifest.variants:
        shape = f"{v.batch}x{v.slots}" if v.is_static else "dynamic"
        shape += f", capacity {v.capacity}" if v.capacity else ""
        drift = (f"{v.drift.max_logit_error:.1e}", f"{v.drift.argmax_matches}/{v.drift.positions}") if v.drift else ("", "")
        table.add_row(v.name, v.backend, v.precision, v.kv_layout, shape, ", ".join(v.outputs), *drift)
    out.print(table)
    for v in manifest.variants:
        if v.quantization is not None and not v.is_static and not v.is_engine:
            q = v.quantization
            grain = f"blocks of {q.block_size}" if q.block_size else "one scale a channel"
            out.print(f"weights   {v.precision}, {grain}{'' if q.symmetric else ', zero points'}; lm_head {q.head}, embedding {q.embedding}")
        if v.engine is not None:
            _print_engine_info(v.name, v.backend, v.engine)
    files = Table("file", "MB", "sha256", box=None)
    for entry in manifest.files:
        files.add_row(entry.path, f"{entry.size / 1e6:.1f}", entry.sha256[:16])
    out.print(files)
    for profile in manifest.profiles:
        out.print(f"profile   {profile.name}: tau {profile.tau} ({profile.metric}) on {profile.variant}")


def _print_engine_info(name: str, backend: str, info: Any) -> None:
    out.print(f"engine    {name}: {backend} {info.version}, CUDA {info.cuda}, for {', '.join(info.compute_capabilities)} on {info.platform}")
    out.print(f"          built in {info.seconds:.1f} s with {info.peak_memory / 1e9:.1f} GB of memory, from {info.graph} {info.graph_sha256[:16]}")
    for r in info.ranges:
        out.print(f"          {r.name}: batch {r.batch}, slots {r.slots}, predictions {r.outputs}")


@app.command()
def doctor(
    bundle: Annotated[Path | None, typer.Argument(metavar="[BUNDLE]", help="Also say whether this bundle opens here, and if not, why.")] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Say what is installed, which devices work, and whether a bundle would open here. Exits with 1 if it would not."""
    from mars_export.runtime.doctor import examine

    report = examine(bundle, device)
    if as_json:
        _print_json(report.to_dict())
    else:
        for finding in report.findings:
            mark = {"good": "[green]ok[/]  ", "absent": "[dim]--[/]  ", "bad": "[red]no[/]  "}[finding.state]
            out.print(f"{mark}{finding.subject}: ", end="")
            out.print(finding.detail, markup=False)
    if not report.is_good:
        raise typer.Exit(1)


@app.command()
def calibrate(
    bundle: BundleArgument,
    task: Annotated[str, typer.Option("--task", "-t", help="A JSONL file of rows, or a built-in task: assistant, arithmetic.")],
    max_drop: Annotated[float, typer.Option(help="Largest mean quality loss against tau 1 that is bearable; 0.02 is two points.")] = 0.02,
    confidence: Annotated[float, typer.Option(help="How sure the bound has to be.")] = 0.95,
    compare: Annotated[str, typer.Option(help="Confidence metrics to try, with commas between; they share the error.")] = "probability",
    taus: Annotated[str | None, typer.Option(help="Candidates of the one metric, from safe to fast, with commas between.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the profile; the task's by default.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the report and the state; calibration-NAME by default.")] = None,
    confirm: Annotated[Path | None, typer.Option(help="Rows that the choice never sees, to check it on.")] = None,
    score: Annotated[str | None, typer.Option(help="Metric of rows that name none: a known one, or your own as module:function.")] = None,
    allow_exec: Annotated[bool, typer.Option("--allow-exec", help="Allow metrics that run what the model writes. There is no sandbox.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Use at most so many rows.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an earlier run left in the output folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Throw away what an earlier run left there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Decode a few rows and say what all of them would cost.")] = False,
    store: Annotated[bool, typer.Option("--store/--no-store", help="Whether the bundle gets the profile.")] = True,
    device: Device = "cpu",
    threads: Threads = None,
    accuracy_level: Level = None,
    as_json: Json = False,
) -> None:
    """Find the fastest tau that keeps the quality of a task, with a guarantee, and store it in the bundle as a profile."""
    from mars_export.calibration.plan import CalibrationOptions
    from mars_export.calibration.report import COLUMNS
    from mars_export.calibration.run import Request, estimate, run

    options = CalibrationOptions(max_drop, confidence, _listed(compare), _numbers(taus), limit, batch)
    request = Request(bundle, task, output, name, confirm, score, allow_exec, device, threads, accuracy_level, resume, force, store, options)
    if dry_run:
        _show_estimate(estimate(request), as_json)
        return
    try:
        with _progress() as bars:
            report = run(request, _advance(bars))
    except KeyboardInterrupt:
        err.print(f"stopped; what was decoded is kept in {request.folder}: the same command with --resume goes on", markup=False)
        raise typer.Exit(130) from None
    if as_json:
        _print_json(report.to_dict())
        return
    out.print(report.headline, style="bold", markup=False)
    _print_table(COLUMNS, report.table)
    for text in (report.confirmed, *(f"{name}: {value}" for name, value in report.facts)):
        if text is not None:
            out.print(text, markup=False)
    out.print(f"report    {request.folder / 'report.html'}", markup=False)
    if store:
        out.print(f"try: mars-export generate {bundle} --profile {request.profile_name} -p ...", markup=False)


@profiles_app.command("list")
def list_profiles(bundle: BundleArgument, as_json: Json = False) -> None:
    """List a bundle's profiles and say which are stale."""
    from mars_export.runtime.profiles import described

    rows = described(bundle)
    if as_json:
        _print_json([row.to_dict() for row in rows])
    elif not rows:
        out.print("no profiles; `mars-export calibrate` makes one", markup=False)
    else:
        _print_table(("profile", "tau", "metric", "variant", "rows", "drop below", "date", "state"), [row.cells for row in rows])


@profiles_app.command("show")
def show_profile(bundle: BundleArgument, name: Annotated[str, typer.Argument(metavar="NAME")], as_json: Json = False) -> None:
    """Show a profile and what it rests on."""
    from mars_export.runtime.profiles import described

    for row in described(bundle, name):
        if as_json:
            _print_json(row.to_dict())
        else:
            for key, value in row.to_dict().items():
                out.print(f"{key:18} {value}", markup=False)


@profiles_app.command("remove")
def remove_profile(bundle: BundleArgument, name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Take a profile out of a bundle."""
    from mars_export.runtime.profiles import remove

    out.print(f"removed {remove(bundle, name)} profile(s) named {name}", markup=False)


@app.command()
def demo(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="BUNDLE", help="Where to keep the bundle; the user's cache by default.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Export the default checkpoint and answer a few requests at tau 1 and 0.95, side by side."""
    from rich.table import Table

    from mars_export.exporter.demo import answers, prepare, summarize

    with _progress() as bars:
        bundle = prepare(output, _advance(bars))
    err.print(f"bundle: {bundle}")
    rows = []
    for answer in answers(bundle, threads):
        rows.append(answer)
        if not as_json:
            _print_answer(answer)
    if as_json:
        _print_json({"bundle": str(bundle), "answers": [answer.to_dict() for answer in rows]})
        return
    table = Table("tau", "tokens", "forwards", "tokens/forward", "tokens/s", "speed-up", box=None)
    for line in summarize(rows):
        speeds = (f"{line.tokens_per_forward:.2f}", f"{line.tokens_per_second:.1f}", f"{line.speed_up:.2f}x")
        table.add_row(f"{line.tau:g}", str(line.tokens), str(line.forwards), *speeds)
    out.print(table)
    out.print(f"try: mars-export chat {bundle} --system 'Reply with tool calls.' --runs", markup=False)


def _print_answer(answer: Any) -> None:
    stats = answer.stats
    if answer.tau >= 1:
        out.print(f"\n> {answer.request}", style="bold", markup=False)
    out.print(
        f"  tau {answer.tau:<4g} {stats.tokens_per_forward:4.2f} tokens/forward  {stats.tokens / answer.seconds:5.1f} tokens/s  ",
        end="",
        style="cyan",
    )
    out.print(answer.text, markup=False)


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


def _ask(*, quiet: bool) -> str | None:
    """The next line of the user, or None at the end."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and line editing)
    try:
        return input("" if quiet or not sys.stdin.isatty() else "> ")
    except (EOFError, KeyboardInterrupt):
        return None


def _knob(profile: str | None, tau: float | None, metric: str | None, window: int | None = None) -> dict[str, Any]:
    """The settings of tau that were given; they and a profile exclude each other."""
    given: dict[str, Any] = {name: value for name, value in (("tau", tau), ("metric", metric)) if value is not None}
    if profile is not None and (given or window is not None):
        raise MarsError("a profile sets tau, metric and window; give --profile, or them, not both")
    return given


def _profiled(session: Session, profile: str | None, config: GenerationConfig) -> GenerationConfig:
    if profile is None:
        return config
    found = session.profile(profile)
    return config.with_values(tau=found.tau, metric=found.metric, window=found.window)


def _with_tau(config: GenerationConfig, value: str) -> GenerationConfig:
    try:
        changed = config.with_values(tau=float(value))
    except (ValueError, MarsError):
        err.print(f"/tau needs a number of 0 or more, not {value!r}", markup=False)
        return config
    err.print(f"tau {changed.tau:g}", style="dim")
    return changed


def _show(stream: Stream, *, runs: bool, quiet: bool) -> Completion:
    """Print a stream as it comes; Ctrl-C ends the answer and keeps what is there. Long prefills show a bar."""
    bars, task, odd = _progress(), None, False
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
                out.print(event.text, end="", markup=False, style="black on cyan" if runs and odd else None)
                out.file.flush()
            odd = not odd
    except KeyboardInterrupt:
        stream.cancel()
    finally:
        bars.stop()
    if not quiet:
        out.print()
    return stream.completion


def _summary(done: Completion) -> str:
    stats = done.stats
    return (
        f"{stats.tokens} tokens, {stats.tokens_per_forward:.2f} tokens/forward, {stats.tokens_per_second:.1f} tokens/s,"
        f" first token after {stats.time_to_first_token:.2f} s, ended by {done.finish_reason}"
    )


def _completion_json(done: Completion, config: GenerationConfig) -> dict[str, Any]:
    return {
        "text": done.text,
        "token_ids": list(done.token_ids),
        "confidences": [round(c, 6) for c in done.confidences],
        "finish_reason": done.finish_reason,
        "tau": config.tau,
        "stats": done.stats.to_dict(),
    }


def _listed(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in _listed(text or ""))
    except ValueError as error:
        raise MarsError(f"--taus must be numbers with commas between, not {text!r}") from error


def _show_estimate(found: Estimate, as_json: bool) -> None:
    if as_json:
        _print_json(found.to_dict())
        return
    out.print(f"{found.num_rows} rows, {found.too_long} left out as too long; the bound needs {found.items_needed} rows at least")
    out.print(f"record pass {found.record_seconds / 60:.1f} min, everything at most {found.seconds / 60:.1f} min; testing ends at the first failure")
    _print_table(("metric", "tau", "minutes"), [(metric, f"{tau:g}", f"{seconds / 60:.1f}") for metric, tau, seconds in found.candidates])
    _print_table(("bound", "rows needed"), [(f"{drop:g}", str(rows)) for drop, rows in found.needed])


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*map(escape, row))
    out.print(table, width=max(out.width, 160))  # a long line is better than cells broken apart


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _progress() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def _advance(bars: Progress) -> Any:
    """A progress callback (phase, done, total) that keeps one bar per phase."""
    tasks: dict[str, Any] = {}

    def report(phase: str, done: int, total: int) -> None:
        if phase not in tasks:
            tasks[phase] = bars.add_task(phase, total=total)
        bars.update(tasks[phase], completed=done)

    return report


def _print_error(error: MarsError) -> None:
    err.print("error: ", style="bold red", end="")
    err.print(str(error), markup=False)


def main() -> None:
    """Console entry point: errors of ours in one block and exit code 1, Ctrl-C with 130, no tracebacks."""
    try:
        app()
    except MarsError as error:
        _print_error(error)
        sys.exit(1)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away, as in `| head`
        sys.exit(0)


if __name__ == "__main__":
    main()
