"""The rooms and which way imports point, read from the source; and what stays unimported until it is needed."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "batchinfer"
# From the top down; a module imports only what stands below it, or its own room.
LEVELS = [
    {"cli"},
    {"report", "comparison"},
    {"pipeline", "llm", "evaluation", "conversion"},
    {"planning"},
    {"summary"},
    {"executors"},
    {"engine"},
    {"models"},
    {"scheduling"},
    {"quantization"},
    {"cache"},
    {"data"},
]
TORCH_FREE = {"scheduling", "data", "plain"}
TORCH_FREE_MODULES = {"batchinfer.cache.block_pool", "batchinfer.cache.spec", "batchinfer.summary"}
HEAVY = ("torch", "transformers", "datasets", "pyarrow", "numpy", "triton", "gguf", "tqdm", "fsspec", "matplotlib")


class Import(NamedTuple):
    module: str
    name: str | None  # of `from module import name`
    at_import_time: bool  # not within a function, nor under TYPE_CHECKING
    line: int


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()
KERNEL_FILES = sorted((ROOT / "kernels").rglob("*.py"))


def imports(path: Path) -> list[Import]:
    return list(_walk(ast.parse(path.read_text(encoding="utf-8")), True))


def _walk(node: ast.AST, at_import_time: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        now = at_import_time and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            now = False
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, None, now, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            yield from (Import(module, alias.name, now, child.lineno) for alias in child.names)
        yield from _walk(child, now)


def room(module: str) -> str:
    """The room of a module of the package: its folder, or its own name where it has a level, or "plain"."""
    parts = module.split(".")
    if parts[1] == "kernels" or (PACKAGE / parts[1]).is_dir() or any(parts[1] in level for level in LEVELS):
        return parts[1]
    return "plain"


def level(name: str) -> int:
    """0 is the top; plain modules and kernels stand below every room."""
    return next((place for place, rooms in enumerate(LEVELS) if name in rooms), len(LEVELS))


def target(found: Import) -> str | None:
    """The module of this package that an import means; None for others and for `from batchinfer import __version__`."""
    if found.module == "batchinfer":
        whole = f"batchinfer.{found.name}"
        return whole if whole in MODULES or found.name == "kernels" else None
    return found.module if found.module.startswith("batchinfer.") else None


def import_fault(importer: str, imported: str) -> str | None:
    upper, lower = room(importer), room(imported)
    if upper == lower or level(upper) < level(lower):
        return None
    return f"{importer} ({upper}) imports {imported} ({lower})"


def test_every_room_has_a_level():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= set().union(*LEVELS)


@pytest.mark.parametrize("module", [name for name in MODULES if name != "batchinfer"])
def test_imports_point_down(module):
    found = [(target(i), i.line) for i in imports(MODULES[module])]
    faults = [(import_fault(module, name), line) for name, line in found if name is not None]
    assert [f"{MODULES[module]}:{line}: {fault}" for fault, line in faults if fault] == []


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("batchinfer.cli.run", "batchinfer.pipeline", True),
        ("batchinfer.pipeline", "batchinfer.cli.run", False),
        ("batchinfer.pipeline", "batchinfer.llm", False),
        ("batchinfer.engine.engine", "batchinfer.engine.sampler", True),
        ("batchinfer.engine.engine", "batchinfer.kernels.rotary", True),
        ("batchinfer.engine.engine", "batchinfer.summary", False),
        ("batchinfer.models.decoder", "batchinfer.engine.engine", False),
        ("batchinfer.data.writer", "batchinfer.cache.spec", False),
        ("batchinfer.cache.spec", "batchinfer.data.writer", True),
        ("batchinfer.options", "batchinfer.config", True),
        ("batchinfer.config", "batchinfer.data.shards", False),
    ],
)
def test_the_rule_itself(importer, imported, allowed):
    assert (import_fault(importer, imported) is None) == allowed


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_import_only_kernels(path):
    faults = [i for i in imports(path) if target(i) is not None and not target(i).startswith("batchinfer.kernels")]
    assert faults == []


@pytest.mark.parametrize("module", MODULES)
def test_no_relative_imports(module):
    assert [i for i in imports(MODULES[module]) if i.module.startswith(".")] == []


@pytest.mark.parametrize(
    "module", [name for name in MODULES if "." in name and (room(name) in TORCH_FREE or name in TORCH_FREE_MODULES)]
)
def test_torch_stays_out(module):
    found = [i for i in imports(MODULES[module]) if i.module.split(".")[0] == "torch"]
    if room(module) != "data":
        found = [i for i in found if i.at_import_time]
    assert found == []


def test_torch_free_rooms_load_without_torch():
    names = [n for n in MODULES if "." in n and (room(n) in TORCH_FREE or n in TORCH_FREE_MODULES)]
    assert len(names) > 10
    loaded = loaded_after("; ".join(f"import {name}" for name in names))
    assert not loaded & {"torch", "transformers", "datasets", "gguf"}


def test_import_of_the_package_and_help_are_light():
    assert not loaded_after("import batchinfer") & set(HEAVY)
    command = "from batchinfer.cli.main import main\ntry: main(['run', '--help'])\nexcept SystemExit: pass"
    assert not loaded_after(command) & set(HEAVY)


def test_package_files_import_nothing_heavy():
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            assert [i for i in imports(path) if i.at_import_time and i.module.split(".")[0] in HEAVY] == [], name


def loaded_after(code: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after `code`."""
    report = "\nimport sys\nprint('LOADED', *sorted({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", code + report]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("LOADED ")[2].split())


@pytest.mark.parametrize("path", [*MODULES.values(), *KERNEL_FILES], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") < 300
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert [f.name for f in functions if f.end_lineno - f.lineno + 1 > 60] == []
