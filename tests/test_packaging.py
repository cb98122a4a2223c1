"""What the wheel holds, and that the repository's root shadows no other package."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.completions", "venv")


def can_build_here() -> bool:
    """Whether this environment's setuptools is one that pyproject.toml asks for; else pip fetches it to build with."""
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE)
    flags = ["--no-build-isolation"] if can_build_here() else []
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", *flags, "-w", folder, folder / "source"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_one_package(wheel_names):
    """No top-level `kernels` in site-packages: transformers imports a package of that name where it finds one."""
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"batchinfer"}


def test_the_wheel_holds_every_module(wheel_names):
    folders = {"": ROOT / "batchinfer", "batchinfer/": ROOT / "kernels"}
    kinds = (".py", ".cpp", ".h", ".html", ".css")
    sources = {
        f"{prefix}{path.relative_to(ROOT)}"
        for prefix, folder in folders.items()
        for path in folder.rglob("*")
        if path.suffix in kinds
    }
    held = {name for name in wheel_names if name.endswith(kinds)}
    assert held == sources


def test_the_wheel_holds_the_licence(wheel_names):
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)


def test_transformers_is_importable_from_the_root():
    """The root holds a folder `kernels`, which `sys.path[0]` would offer as a package of that name."""
    code = "import transformers, batchinfer.kernels; transformers.AutoTokenizer; print(batchinfer.kernels.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "kernels" / "__init__.py"
