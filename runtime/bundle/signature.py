"""Who made a bundle: a signature of its manifest, which has the hashes of all files. The tool that made it
checks it; nothing here knows how. docs/security.md has the commands.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import BundleError
from .files import read_small
from .manifest import MANIFEST_FILE, parse_manifest
from .open import MANIFEST_LIMIT, Bundle, open_bundle

NAMESPACE = "mars-bundle"  # of OpenSSH: what a key signs here counts for nothing else
LIMIT = 100_000  # bytes of a signature, or of a file of keys
SECONDS = 30  # for a tool
SSH, MINISIGN = b"-----BEGIN SSH SIGNATURE-----", b"untrusted comment:"
INSTALL = {
    "ssh-keygen": "it comes with OpenSSH (apt install openssh-client)",
    "minisign": "apt install minisign, or brew install minisign",
}


@dataclass(frozen=True, slots=True)
class Signed:
    """A bundle whose hashes are right. `signer` is what the tool says of who signed it, None where nobody
    asked.
    """

    bundle: Bundle
    signer: str | None


def verified(path: str | Path, signature: Path | None = None, keys: Path | None = None) -> Signed:
    """Hash all files of the bundle at `path` in safe mode, and check `signature` of its manifest against
    `keys`: OpenSSH's allowed signers, or minisign's public key.

    Raises BundleError for what is damaged, for a signature that is not of this manifest or of none of the
    keys, and where the tool is missing.
    """
    directory = Path(path).expanduser()
    if signature is None or keys is None:
        if signature is not keys:
            raise BundleError("a signature is checked with a key: give both --signature and --key")
        return Signed(open_bundle(directory, safe=True), None)
    data = _content(directory / MANIFEST_FILE, MANIFEST_LIMIT, f"{directory}: no manifest to check")
    signer = _signer(data, signature, keys)
    bundle = open_bundle(directory, safe=True)
    if bundle.manifest != parse_manifest(data.decode("utf-8", "replace")):
        raise BundleError(f"{directory}: the manifest was written to meanwhile; verify it again")
    return Signed(bundle, signer)


def _signer(data: bytes, signature: Path, keys: Path) -> str:
    given = _content(signature, LIMIT, f"{signature}: not a signature")
    listed = _content(keys, LIMIT, f"{keys}: no keys")
    with tempfile.TemporaryDirectory() as scratch:  # the tools read what was read here, whatever comes there
        message, own, known = (Path(scratch) / name for name in ("manifest", "signature", "keys"))
        for place, content in ((message, data), (own, given), (known, listed)):
            place.write_bytes(content)
        if given.startswith(SSH):
            return _by_ssh(data, own, known)
        if given.startswith(MINISIGN):
            return _by_minisign(message, own, known)
    raise BundleError(
        f"{signature}: neither a signature of `ssh-keygen -Y sign` nor one of minisign; docs/security.md"
        " shows both, and how others are checked by their own tools"
    )


def _by_ssh(data: bytes, signature: Path, keys: Path) -> str:
    files = ("-f", str(keys), "-s", str(signature))
    found = _run(["ssh-keygen", "-Y", "find-principals", *files], b"", "it is of none of the keys")
    who = found.splitlines()[0].split(",")[0].strip() if found.strip() else ""
    words = ["ssh-keygen", "-Y", "verify", *files, "-n", NAMESPACE, "-I", who]
    return _run(words, data, "it is not of this manifest, or not for mars-bundle").strip() or who


def _by_minisign(message: Path, signature: Path, keys: Path) -> str:
    words = ["minisign", "-V", "-p", str(keys), "-m", str(message), "-x", str(signature)]
    said = _run(words, b"", "it is not of this manifest, or not by this key").strip().splitlines()
    key = keys.read_text("utf-8", "replace").split("\n")
    return "; ".join([*said, *(line for line in key[1:2] if line)])


def _run(words: Sequence[str], data: bytes, otherwise: str) -> str:
    try:
        done = subprocess.run(
            words,
            input=data,
            capture_output=True,
            timeout=SECONDS,
            env=os.environ | {"LC_ALL": "C"},
            check=False,
        )
    except FileNotFoundError as error:
        raise BundleError(f"{words[0]} is not installed here; {INSTALL[words[0]]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BundleError(f"{words[0]} does not run ({error})") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[:300]
        raise BundleError(f"the signature is not good: {otherwise} ({words[0]}: {said or 'no reason given'})")
    return done.stdout.decode("utf-8", "replace")


def _content(path: Path, limit: int, what: str) -> bytes:
    try:
        data = read_small(path, limit, links=True)
    except OSError as error:
        raise BundleError(f"{what} ({error.strerror})") from error
    if len(data) > limit:
        raise BundleError(f"{what} (larger than {limit} bytes)")
    return data
