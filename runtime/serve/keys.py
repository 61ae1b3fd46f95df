"""API keys: who may call. A comparison takes as long for a wrong key as for a right one."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from ..errors import MarsError

LONGEST_FILE = 1 << 20  # bytes


class Keys:
    """Some keys, held as hashes; none for a server that anybody may use."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._hashes = [_hash(key) for key in keys]

    @property
    def is_open(self) -> bool:
        return not self._hashes

    def find(self, authorization: str | None) -> int | None:
        """The number of the key in an Authorization header, or None. All keys are looked at every time."""
        scheme, _, given = (authorization or "").partition(" ")
        own, found = _hash(given.strip()), None
        for i, known in enumerate(self._hashes):
            if hmac.compare_digest(own, known):
                found = i
        return found if scheme.lower() == "bearer" else None


def _hash(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and lines that begin with # are none."""
    try:
        with path.open("rb") as file:
            data = file.read(LONGEST_FILE + 1)
        if len(data) > LONGEST_FILE:
            raise MarsError(f"{path}: larger than {LONGEST_FILE} bytes; one key a line is expected")
        lines = [line.strip() for line in data.decode("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise MarsError(f"{path}: cannot be read as a file of API keys ({error})") from error
    keys = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not keys:
        raise MarsError(f"{path}: no key in it; write one a line")
    if wrong := [
        i for i, key in enumerate(keys, 1) if not (key.isascii() and key.isprintable()) or " " in key
    ]:
        raise MarsError(f"{path}: keys {wrong[:5]} have spaces or characters that no header can carry")
    return keys
