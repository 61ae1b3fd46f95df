"""Signatures of bundles, with the real tools: made by the documented commands, and everything that is not
that signature of that manifest by that key.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.missing import lacking
from support.paths import ROOT
from typer.testing import CliRunner

from mars_export.cli import app
from mars_export.runtime import BundleError
from mars_export.runtime.bundle import signature as module
from mars_export.runtime.bundle.open import open_bundle, write_manifest
from mars_export.runtime.bundle.signature import verified

Named = Callable[[str], Path]
TOOLS = ("ssh-keygen", "minisign")


@pytest.fixture
def path(bundles: Named, tmp_path: Path) -> Path:
    return shutil.copytree(bundles("llama"), tmp_path / "mars.bundle")


def here(*tools: str) -> None:
    """OpenSSH is nearly everywhere; a tool that is not there is not asked."""
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        lacking(f"{', '.join(missing)} is not installed: apt install openssh-client minisign")


def run(*words: str | Path, data: bytes = b"") -> bytes:
    return subprocess.run([str(w) for w in words], input=data, capture_output=True, check=True).stdout


def keys_of(tool: str, folder: Path, name: str = "me") -> tuple[Path, Path]:
    """A new pair: what signs, and what `--key` takes."""
    private = folder / f"{name}.key"
    if tool == "ssh-keygen":
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", private)
        public = (folder / f"{name}.key.pub").read_text()
        signers = folder / f"{name}.signers"
        signers.write_text(f'{name}@example.org namespaces="mars-bundle" {public}')
        return private, signers
    run("minisign", "-G", "-W", "-p", folder / f"{name}.pub", "-s", private)
    return private, folder / f"{name}.pub"


def sign(tool: str, private: Path, path: Path, namespace: str = "mars-bundle") -> Path:
    made = path.with_name(f"{private.stem}.{tool}.sig")
    if tool == "ssh-keygen":
        data = (path / "manifest.json").read_bytes()
        made.write_bytes(run("ssh-keygen", "-q", "-Y", "sign", "-f", private, "-n", namespace, data=data))
    else:
        run("minisign", "-S", "-s", private, "-m", path / "manifest.json", "-x", made)
    return made


@pytest.mark.parametrize("tool", TOOLS)
def test_a_signed_bundle_is_whose_it_says(tool: str, path: Path, tmp_path: Path) -> None:
    here(tool)
    private, public = keys_of(tool, tmp_path)
    signature = sign(tool, private, path)
    signed = verified(path, signature, public)
    assert signed.signer is not None
    assert ("me@example.org" if tool == "ssh-keygen" else "Signature and comment signature") in signed.signer
    words = ["verify", str(path), "--signature", str(signature), "--key", str(public)]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and "all hashes match" in shown.output
    as_json = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert as_json["signer"] == signed.signer and as_json["files"] == 3


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_not_that_signature(tool: str, path: Path, tmp_path: Path) -> None:
    here(tool)
    private, public = keys_of(tool, tmp_path)
    stranger, strangers = keys_of(tool, tmp_path, "stranger")
    signature = sign(tool, private, path)
    refused = pytest.raises(BundleError, match="the signature is not good")
    with refused:
        verified(path, signature, strangers)
    with refused:
        verified(path, sign(tool, stranger, path), public)
    manifest = open_bundle(path).manifest
    write_manifest(path, replace(manifest, source="somebody else"))
    with refused:
        verified(path, signature, public)
    write_manifest(path, manifest)
    verified(path, signature, public)
    lines = signature.read_bytes().splitlines()
    lines[1] = lines[1].swapcase()
    signature.write_bytes(b"\n".join(lines))
    with refused:
        verified(path, signature, public)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_good_signature_of_a_damaged_bundle(tool: str, path: Path, tmp_path: Path) -> None:
    here(tool)
    private, public = keys_of(tool, tmp_path)
    signature = sign(tool, private, path)
    with (path / "weights.bin").open("r+b") as file:
        file.write(b"\xaa\xbb")
    with pytest.raises(BundleError, match=r"weights.bin: its content does not match"):
        verified(path, signature, public)


def test_a_signature_for_another_purpose(path: Path, tmp_path: Path) -> None:
    """What a key signed for git, or for a file, is none of a bundle."""
    here("ssh-keygen")
    private, signers = keys_of("ssh-keygen", tmp_path)
    signature = sign("ssh-keygen", private, path, namespace="file")
    signers.write_text(signers.read_text().replace(' namespaces="mars-bundle"', ""))
    with pytest.raises(BundleError, match="not for mars-bundle"):
        verified(path, signature, signers)


def test_what_is_no_signature(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, keys = tmp_path / "a.sig", tmp_path / "keys"
    keys.write_text("x")
    for content, message in (
        (b"", "neither a signature"),
        (b"PGP", "neither a signature"),
        (b"x" * 200_000, "larger than 100000 bytes"),
        (b"-----BEGIN SSH SIGNATURE-----\nnonsense", "the signature is not good"),
    ):
        other.write_bytes(content)
        if b"SSH" not in content or shutil.which("ssh-keygen"):
            with pytest.raises(BundleError, match=message):
                verified(path, other, keys)
    with pytest.raises(BundleError, match="no keys"):
        verified(path, other, tmp_path / "nothing")
    with pytest.raises(BundleError, match="give both --signature and --key"):
        verified(path, other)
    assert verified(path).signer is None
    monkeypatch.setenv("PATH", str(tmp_path))
    other.write_bytes(b"untrusted comment: x")
    with pytest.raises(BundleError, match="minisign is not installed here; apt install minisign"):
        verified(path, other, keys)


def test_a_tool_that_hangs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "minisign"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(module, "SECONDS", 0.3)
    for name in ("a.sig", "keys"):
        (tmp_path / name).write_bytes(b"untrusted comment: x")
    with pytest.raises(BundleError, match="minisign does not run"):
        verified(path, tmp_path / "a.sig", tmp_path / "keys")


def test_a_manifest_that_is_exchanged_behind_its_signature(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here("ssh-keygen")
    private, signers = keys_of("ssh-keygen", tmp_path)
    signature, real = sign("ssh-keygen", private, path), module.open_bundle

    def late(*arguments: object, **named: object) -> object:
        write_manifest(path, replace(open_bundle(path).manifest, source="somebody else"))
        return real(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "open_bundle", late)
    with pytest.raises(BundleError, match="the manifest was written to meanwhile"):
        verified(path, signature, signers)


@pytest.mark.usefixtures("path")
def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand in docs/security.md, stock tools only, with keys made for it."""
    here(*TOOLS)
    page = (ROOT / "docs" / "security.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    signing, checking = blocks[0], blocks[1]
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / ".ssh" / "id_ed25519")
    monkeypatch.setenv("HOME", str(home))
    ours = f'mars-export() {{ "{sys.executable}" -m mars_export "$@"; }}\n'
    script = "set -e\n" + ours + signing.replace("minisign -G", "minisign -G -W") + checking
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all hashes match") == 2
    assert "weights.bin: OK" in done.stdout
