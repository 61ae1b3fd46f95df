"""The commands that bring bundles to the Hugging Face hub and back: push, pull. Parse, one call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import BundleArgument, Json, out, print_json, visible

app = typer.Typer()

Repository = Annotated[
    str,
    typer.Argument(metavar="REPO", help="A model repository on the Hugging Face hub, such as me/my-model."),
]


@app.command()
def push(
    bundle: BundleArgument,
    repo: Repository,
    private: Annotated[bool, typer.Option("--private", help="Make the repository a private one.")] = False,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license", metavar="ID", help="The weights' licence, such as apache-2.0, for the card."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Put a bundle into a repository of the Hugging Face hub, with a model card.

    Log in before: hf auth login, or HF_TOKEN.
    """
    from .hub_repository import push as upload

    url = upload(bundle, repo, private=private, licence=licence)
    if as_json:
        print_json({"repo": repo, "url": url})
        return
    out.print(visible(url), markup=False)
    out.print(visible(f"elsewhere: mars-export pull {repo} -o NAME.bundle"), markup=False)


@app.command()
def pull(
    repo: Repository,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="BUNDLE", help="The bundle to make; NAME.bundle by default."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="A branch, a tag or a commit; main by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fetch a bundle from a repository of the Hugging Face hub. Every hash is checked before it gets its
    name.
    """
    from .hub_repository import pull as download

    target = output or Path(f"{repo.rpartition('/')[2]}.bundle")
    manifest = download(repo, target, revision=revision)
    if as_json:
        print_json({"bundle": str(target), "files": len(manifest.files)})
    else:
        out.print(visible(f"{target}  {len(manifest.files)} files, all hashes match"), markup=False)
