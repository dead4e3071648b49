"""OpenSeadragon, taken from npm when the package is built; never fetched while it is used.

``python -m planaria.pathology.vendor`` runs ``npm pack``, compares the checksum and puts the script
and its licence beside the viewer.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from importlib import resources
from pathlib import Path

from planaria.errors import DataError, RunError
from planaria.pathology.files import atomic

VERSION = "6.1.1"
SHA512 = "g4iKe2q8B642SaBT3+x4ZF3/8b1TxPPydyjmtrOLgDrlYWMKd9ZXM+1Cb/xa9DVySkvs/7l6HR1nHKfD5F3Tsw=="
"""Base64, as npm states it for this version."""

_FILES = {
    "package/build/openseadragon/openseadragon.min.js": "openseadragon.min.js",
    "package/LICENSE.txt": "openseadragon.LICENSE.txt",
}


def folder() -> Path:
    """Where the viewer's files lie."""
    return Path(str(resources.files("planaria.pathology.page")))


def openseadragon() -> str:
    """The script; DataError where the package was installed without it."""
    path = folder() / "openseadragon.min.js"
    if not path.is_file():
        raise DataError(
            f"{path.name} is missing; run once, with npm: python -m planaria.pathology.vendor"
        )
    return path.read_text(encoding="utf-8")


def fetch(target: Path) -> list[Path]:
    """Packs OpenSeadragon with npm and writes script and licence into ``target``.

    RunError where npm fails or the archive is not the one that was reviewed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            subprocess.run(
                ["npm", "pack", "--silent", f"openseadragon@{VERSION}"],
                cwd=scratch,
                check=True,
                capture_output=True,
                timeout=120,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise RunError(
                f"npm pack openseadragon@{VERSION} failed ({error}); is npm there?"
            ) from (error)
        archive = Path(scratch) / f"openseadragon-{VERSION}.tgz"
        return unpack(archive, target=target)


def unpack(archive: Path, *, target: Path, sha512: str = SHA512) -> list[Path]:
    """Writes the files that are needed of ``archive`` into ``target``, if its checksum is right."""
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != sha512:
        raise RunError(
            f"{archive.name}: sha512 is {digest[:16]}..., expected {sha512[:16]}...; do not use it"
        )
    written: list[Path] = []
    with tarfile.open(archive) as tar:
        for member, name in _FILES.items():
            source = tar.extractfile(member)
            if source is None:
                raise RunError(f"{archive.name}: holds no {member}")
            with atomic(target / name) as temporary:
                temporary.write_bytes(source.read())
            written.append(target / name)
    return written


if __name__ == "__main__":
    for file in fetch(folder()):
        sys.stdout.write(f"{file}\n")
