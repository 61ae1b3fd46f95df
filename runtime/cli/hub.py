"""The commands `push` and `pull`: bundles on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..terminal.console import out, print_json, visible
from ..terminal.options import BundleArgument, Json

app = typer.Typer()

Repository = Annotated[
    str,
    typer.Argument(metavar="REPO", help="Model repository on the Hugging Face hub, such as me/my-model."),
]


@app.command()
def push(
    bundle: BundleArgument,
    repo: Repository,
    private: Annotated[
        bool, typer.Option("--private", help="Create the repository as a private one.")
    ] = False,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license", metavar="ID", help="Licence of the weights for the model card, such as apache-2.0."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Upload a bundle to the Hugging Face hub.

    Log in first, with `hf auth login` or HF_TOKEN. A repository without a model card gets one.
    """
    from .hub_repository import push as upload

    url = upload(bundle, repo, private=private, licence=licence)
    if as_json:
        print_json({"repo": repo, "url": url})
        return
    out.print(visible(url), markup=False)
    out.print(visible(f"to download it: mars-export pull {repo} -o NAME.bundle"), markup=False)


@app.command()
def pull(
    repo: Repository,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="BUNDLE", help="Bundle directory to write; NAME.bundle by default."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit; main by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a bundle from the Hugging Face hub.

    Every hash is checked before the directory appears.
    """
    from .hub_repository import pull as download

    target = output or Path(f"{repo.rpartition('/')[2]}.bundle")
    manifest = download(repo, target, revision=revision)
    if as_json:
        print_json({"bundle": str(target), "files": len(manifest.files)})
    else:
        out.print(visible(f"{target}  {len(manifest.files)} files, all hashes match"), markup=False)
