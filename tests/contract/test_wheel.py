"""What is installed is what is tested: the wheel holds the package, its entry point and licence."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import planaria

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # hatchling writes only into the folder that it is given; no network: the back end is installed.
    program = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        assert "planaria = planaria.cli:main" in archive.read(entry).decode()
    modules = {
        str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/planaria").rglob("*.py")
    }
    assert modules <= names
    assert {name.split("/")[0] for name in names} == {
        "planaria",
        f"planaria-{planaria.__version__}.dist-info",
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installed_wheel_imports_from_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import planaria, planaria.cli, planaria.runtime.launch;"
        "print(planaria.__file__); print(sorted(planaria.__all__)); planaria.join"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "join" in done.stdout
