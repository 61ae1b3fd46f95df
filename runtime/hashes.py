"""SHA-256 of a file's bytes. Knows no format."""

from __future__ import annotations

import hashlib
from io import BufferedReader

CHUNK = 1 << 20


def sha256_of(file: BufferedReader) -> str:
    """The digest, in hexadecimal, of all that a file opened as "rb" has from where it stands.

    `hashlib.file_digest` does the same from Python 3.11 on; JetPack 6 has 3.10.
    """
    digest, buffer = hashlib.sha256(), bytearray(CHUNK)
    view = memoryview(buffer)
    while count := file.readinto(buffer):
        digest.update(view[:count])
    return digest.hexdigest()
