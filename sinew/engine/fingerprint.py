"""Identify a bundle without reading all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sinew_client.untrusted import open_regular

WHOLE = 64 << 20  # files of up to this many bytes are hashed entirely
SAMPLES, SAMPLE_BYTES = 1024, 4096


def fingerprint(path: Path, purpose: object = "") -> str:
    """Return a hex digest that identifies the content of a file.

    Files of up to 64 MiB are read entirely. From a larger file, only the first MiB and 1024 samples of 4 KiB are read.
    These bytes are enough to tell two bundles apart: the first MiB contains configuration and provenance, and weights
    that were trained or quantised again differ nearly everywhere. Hashing all of a full-size bundle would take as long
    as loading it.

    Args:
        path: The file.
        purpose: A value that is part of the digest, such as the version of a format.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{purpose}:{size}:".encode())
    with open_regular(path) as file:
        if size <= WHOLE:
            digest.update(file.read())
            return digest.hexdigest()
        digest.update(file.read(1 << 20))
        for sample in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
