"""The commands `inspect`, `doctor`, `verify`, `pull` and `profiles`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import MarsError
from ..terminal.console import out, print_json, print_list, print_table, say, visible
from ..terminal.options import BundleArgument, Device, Json, Name, Safe, with_default

app = typer.Typer()
profiles_app = typer.Typer(
    cls=with_default("list"),
    no_args_is_help=True,
    help="Manage the calibrated profiles of a bundle. `mars-export profiles BUNDLE` lists them.",
)
app.add_typer(profiles_app, name="profiles")


@app.command()
def inspect(bundle: BundleArgument, safe: Safe = True, as_json: Json = False) -> None:
    """Show the contents of a bundle."""
    from ..bundle.manifest import NOT_BATCH_INVARIANT
    from ..bundle.open import open_bundle
    from ..machine import byte_products

    manifest = open_bundle(bundle, safe=safe).manifest
    if as_json:
        sys.stdout.write(manifest.to_json())
        return
    model, tokens = manifest.model, manifest.tokens
    out.print(visible(bundle), style="bold", markup=False, end="")
    say(f"  format {manifest.format_version}, written by {manifest.producer}")
    say(f"source    {manifest.source}" + (f" @ {manifest.revision}" if manifest.revision else ""))
    say(
        f"model     {model.type}, {model.num_layers} layers, hidden {model.hidden_size},"
        f" {model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}, vocabulary"
        f" {model.vocab_size}, context {model.context_length}"
    )
    if manifest.text is not None:
        chat = manifest.text.chat
        say(
            "chat      needs jinja2"
            if chat is None
            else f"chat      roles {', '.join(chat.roles)}; in C++ too"
        )
    mask = "no mask" if tokens.mask is None else f"mask id {tokens.mask}"
    say(f"decoding  block {manifest.block}, {mask}, end ids {', '.join(map(str, tokens.eos))}")
    if model.mtp_drafts:
        of = f", of {model.mtp_shortlist:,} tokens" if model.mtp_shortlist else ""
        say(f"draft     MTP layer: {model.mtp_drafts} draft tokens a step{of}")
    if (net := model.recurrent) is not None:
        from ..device.states import state_bytes

        size = f"{state_bytes(net) / 1e6:.1f} MB of states per row"
        say(f"recurrent {len(net.layers)} of {model.num_layers} layers, {size}, on a CPU only")
    rows = []
    for v in manifest.variants:
        shape = f"{v.batch}x{v.slots}" if v.is_fixed else "dynamic"
        shape += f", capacity {v.capacity}" if v.capacity else ""
        drift = (
            (f"{v.drift.max_logit_error:.1e}", f"{v.drift.argmax_matches}/{v.drift.positions}")
            if v.drift
            else ("", "")
        )
        kv = f"{v.kv_dtype}, {v.kv_layout}"
        rows.append((v.name, v.backend, v.precision, kv, shape, ", ".join(v.outputs), *drift))
    print_table(("variant", "backend", "precision", "KV", "shape", "outputs", "logit error", "argmax"), rows)
    for v in manifest.variants:
        if v.quantization is not None and not v.is_fixed and not v.is_engine:
            q = v.quantization
            grain = f"groups of {q.group_size}" if q.group_size else "one scale per channel"
            say(
                f"weights   {v.precision}, {grain}{'' if q.symmetric else ', zero points'};"
                f" lm_head {q.head}, embedding {q.embedding}{_codes_of(q.quantizer)}"
            )
            if not v.is_batch_invariant:
                say(f"note      {NOT_BATCH_INVARIANT}")
            if v.is_integer:
                say(f"cpu       byte products here: {byte_products()}")
        if v.engine is not None:
            _print_engine_info(v.name, v.backend, v.engine)
    files = [(entry.path, f"{entry.size / 1e6:.1f}", entry.sha256[:16]) for entry in manifest.files]
    print_table(("file", "MB", "sha256"), files)
    for profile in manifest.profiles:
        say(f"profile   {profile.name}: tau {profile.tau} ({profile.metric}) on {profile.variant}")


def _codes_of(quantizer: Any) -> str:
    """How the codes were chosen, if the bundle says so."""
    if quantizer is None:
        return ""
    words = f"; codes by {quantizer.name}"
    if quantizer.sequences is not None:
        digest = quantizer.text_sha256
        text = f"a text with sha256 {digest[:16]}" if digest else "the built-in text"
        words += f" on {quantizer.sequences} sequences of {text}"
    return words


def _print_engine_info(name: str, backend: str, info: Any) -> None:
    say(
        f"engine    {name}: {backend} {info.version}, CUDA {info.cuda},"
        f" for {', '.join(info.compute_capabilities)} on {info.platform}"
    )
    say(
        f"          built in {info.seconds:.1f} s with {info.peak_memory / 1e9:.1f} GB of memory,"
        f" from {info.graph} {info.graph_sha256[:16]}"
    )
    for r in info.ranges:
        say(f"          {r.name}: batch {r.batch}, slots {r.slots}, predictions {r.outputs}")


@app.command()
def doctor(
    bundle: Annotated[
        Path | None, typer.Argument(metavar="BUNDLE", help="Also check whether this bundle runs here.")
    ] = None,
    device: Device = "cpu",
    safe: Safe = True,
    as_json: Json = False,
) -> None:
    """Check the installation, the devices, and whether a bundle runs here.

    Exits with 1 if the bundle does not.
    """
    from .doctor import examine

    findings = examine(bundle, device, safe=safe)
    is_good = all(finding.state != "bad" for finding in findings)
    if as_json:
        print_json({"good": is_good, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            mark = {"good": "[green]ok[/]  ", "absent": "[dim]--[/]  ", "bad": "[red]no[/]  "}[finding.state]
            out.print(mark, end="")
            say(f"{finding.subject}: {finding.detail}")
    if not is_good:
        raise typer.Exit(1)


@app.command()
def verify(bundle: BundleArgument, as_json: Json = False) -> None:
    """Check the hash of every file of a bundle.

    Exits with 1 if one is wrong.
    """
    from ..bundle.open import open_bundle

    files = open_bundle(bundle, safe=True).manifest.files
    size = sum(entry.size for entry in files)
    if as_json:
        print_json({"bundle": str(bundle), "files": len(files), "size": size})
    else:
        say(f"{bundle}  {len(files)} files, {size / 1e6:.0f} MB, all hashes match")


@profiles_app.command("list")
def list_profiles(bundle: BundleArgument, as_json: Json = False) -> None:
    """List the profiles of a bundle, and which are stale."""
    from ..bundle.profiles import states

    def cells(profile: dict[str, Any]) -> tuple[object, ...]:
        evidence = (profile["evidence"].get(key, "?") for key in ("num_rows", "max_drop", "date"))
        state = f"stale: {'; '.join(profile['stale'])}" if profile["stale"] else "good"
        return profile["name"], f"{profile['tau']:g}", profile["metric"], profile["variant"], *evidence, state

    columns = ("profile", "setting", "metric", "variant", "rows", "drop below", "date", "state")
    none = "no profiles; `mars-export calibrate` makes one"
    print_list(states(bundle), columns, cells, none, as_json=as_json)


@profiles_app.command("remove")
def remove_profile(bundle: BundleArgument, name: Name) -> None:
    """Remove a profile from a bundle."""
    from ..bundle.profiles import remove

    remove(bundle, name)
    say(f"removed profile {name}")


@app.command()
def pull(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Model repository on the Hugging Face hub, such as me/my-model; or a release file"
            " NAME.bundle.tar, by URL or path.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="BUNDLE", help="Bundle directory to write; NAME.bundle by default."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit of a repository; main by default.")
    ] = None,
    sha256: Annotated[
        str | None,
        typer.Option(
            "--sha256", metavar="HASH", help="Hash of a release file. Default: that in SHA256SUMS beside it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a bundle from the Hugging Face hub, or a release file.

    Every hash is checked before the directory appears. Release files need no extra.
    """
    from . import pull as pulled

    if pulled.is_release_file(source) and revision is not None:
        raise MarsError("--revision is for repositories; use --sha256 for a release file", field="revision")
    if not pulled.is_release_file(source) and sha256 is not None:
        raise MarsError("--sha256 is for release files; use --revision for a repository", field="sha256")
    target = output or Path(pulled.default_name(source))
    manifest = pulled.pull(source, target, revision=revision, sha256=sha256)
    if as_json:
        print_json({"bundle": str(target), "files": len(manifest.files)})
    else:
        out.print(visible(f"{target}  {len(manifest.files)} files, all hashes match"), markup=False)
