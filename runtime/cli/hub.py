"""The commands `push` and `pull`: bundles on the Hugging Face hub, and of releases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import MarsError
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
    from . import hub_repository, release_file

    if release_file.is_release_file(source):
        if revision is not None:
            raise MarsError("--revision is for repositories; a release file has --sha256")
        target = output or Path(release_file.default_name(source))
        manifest = release_file.pull(source, target, sha256)
    else:
        if sha256 is not None:
            raise MarsError("--sha256 is for release files; a repository has --revision")
        target = output or Path(f"{source.rpartition('/')[2]}.bundle")
        manifest = hub_repository.pull(source, target, revision=revision)
    if as_json:
        print_json({"bundle": str(target), "files": len(manifest.files)})
    else:
        out.print(visible(f"{target}  {len(manifest.files)} files, all hashes match"), markup=False)
