"""The import rule of the design: who may import whom, no cycles, and who must not import torch."""

from __future__ import annotations

import gc
import graphlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

import planaria

ALLOWED = {
    "errors": set[str](),
    "comm": {"errors"},
    "runtime": {"comm", "errors"},
    "optim": {"comm", "errors"},
    "faithfulness": {"errors"},
    "pathology": {"errors"},
    "recipes": {"errors", "comm", "runtime", "optim", "faithfulness", "pathology"},
}
"""Package → what it may import of ours. ``planaria`` itself offers names of the runtime; ``cli`` and
what only ``cli`` uses may import anything."""
FREE = {"capabilities", "cli", "demo", "demo_pathology", "helptext", "wording"}

TORCHLESS = (
    "planaria.cli",
    "planaria.errors",
    "planaria.recipes.gleason",
    "planaria.recipes.llm",
    "planaria.recipes.metastasis",
    "planaria.runtime.launch.config",
    "planaria.runtime.coordinator",
    "planaria.runtime.launch.doctor",
    "planaria.runtime.inject",
    "planaria.runtime.coordinator.journal",
    "planaria.runtime.launch.launcher",
    "planaria.runtime.launch.reuse",
    "planaria.runtime.membership.limits",
    "planaria.runtime.control.member",
    "planaria.runtime.membership.rules",
    "planaria.runtime.messages",
    "planaria.runtime.membership.planning",
    "planaria.runtime.membership.simulate",
    "planaria.runtime.coordinator.status",
    "planaria.runtime.launch.worker",
)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("planaria", cache_dir=None, exclude_type_checking_imports=True)


def package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_package_has_a_rule(graph: grimp.ImportGraph) -> None:
    found = {package(module) for module in graph.modules} - {""}
    assert found <= ALLOWED.keys() | FREE
    assert {"errors", "comm", "runtime", "recipes", "cli"} <= found


def test_packages_import_only_what_they_may(graph: grimp.ImportGraph) -> None:
    wrong: list[str] = []
    for importer in graph.modules:
        mine = package(importer)
        if mine in FREE or mine == "":
            continue
        for imported in graph.find_modules_directly_imported_by(importer):
            theirs = package(imported)
            # The root holds the version, and names of the runtime for users and recipes.
            root = theirs == "" and mine in ("runtime", "recipes")
            if theirs != mine and theirs not in ALLOWED[mine] and not root:
                wrong.append(f"{importer} imports {imported}")
    assert wrong == []


def test_recipes_never_import_each_other(graph: grimp.ImportGraph) -> None:
    wrong = [
        f"{importer} imports {imported}"
        for importer in graph.modules
        if importer.startswith("planaria.recipes.")
        for imported in graph.find_modules_directly_imported_by(importer)
        if imported.startswith("planaria.recipes.")
        and imported.split(".")[2] != importer.split(".")[2]
    ]
    assert wrong == []


def test_nothing_imports_the_command_line(graph: grimp.ImportGraph) -> None:
    assert graph.find_modules_that_directly_import("planaria.cli") == set()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """CPython 3.11's ``ast.parse`` fails where garbage that is collected in it makes a warning whose
    traceback points into a line, which is parsed, too; what other tests have left may do so."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_no_cycles_at_import_time() -> None:
    """Between modules, of imports at the top level; one inside a function runs later."""
    tops = top_level_imports(Path(planaria.__file__).parent)
    assert len(tops) > 20
    order = list(graphlib.TopologicalSorter(tops).static_order())
    assert set(order) >= tops.keys()


def top_level_imports(root: Path) -> dict[str, set[str]]:
    import ast

    names = {
        ".".join(("planaria", *path.relative_to(root).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in root.rglob("*.py")
    }
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in names.items():
        found[name] = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                candidates = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                candidates = [full if full in names else node.module for full in inner]
            else:
                continue
            found[name] |= {c for c in candidates if c in names and c not in (name, "planaria")}
    return found


def test_what_has_to_be_light_imports_no_torch() -> None:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *TORCHLESS], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.returncode == 0
