"""The splitter lives in `models/` and installs as `pipelining_dualpipev.models`, by whatever way it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ASK = "import pipelining_dualpipev.models as m, sys; print(m.__name__, m.__file__, 'models' in sys.modules)"


def packages_on_disk() -> set[str]:
    package = ROOT / "pipelining_dualpipev"
    ours = {path.parent for path in package.rglob("__init__.py")}
    ours |= {
        package / "models" / path.parent.relative_to(ROOT / "models") for path in (ROOT / "models").rglob("__init__.py")
    }
    return {".".join(path.relative_to(ROOT).parts) for path in ours}


def test_pyproject_lists_every_package():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_pyproject_maps_every_package_under_models():
    mapped = {
        name: "/".join(["models", *name.split(".")[2:]])
        for name in PROJECT["tool"]["setuptools"]["packages"]
        if name.split(".")[:2] == ["pipelining_dualpipev", "models"]
    }
    listed = PROJECT["tool"]["setuptools"]["package-dir"]
    assert {name: path for name, path in listed.items() if name.startswith("pipelining_dualpipev.models")} == mapped


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing that lies about in the checkout can find its way in."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("pipelining_dualpipev", "models"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, source], check=True
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    there = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = ROOT / "pipelining_dualpipev"
    expected = {str(path.relative_to(ROOT)) for path in package.rglob("*.py") if "models" not in path.parts}
    expected |= {f"pipelining_dualpipev/{path.relative_to(ROOT)}" for path in (ROOT / "models").rglob("*.py")}
    assert there == expected | {"pipelining_dualpipev/py.typed"}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["unpacked", "zip"])
def test_models_are_importable_from_the_wheel(wheel, tmp_path, how):
    if how == "unpacked":
        zipfile.ZipFile(wheel).extractall(tmp_path)
        place = str(tmp_path)
    else:
        place = str(wheel)
    script = f"import sys; sys.path.insert(0, {place!r}); {ASK}"
    # -I: neither the checkout nor PYTHONPATH may help
    said = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.split()
    assert said == ["pipelining_dualpipev.models", f"{place}/pipelining_dualpipev/models/__init__.py", "False"]


@pytest.mark.slow
def test_models_are_importable_from_the_checkout():
    said = subprocess.run(
        [sys.executable, "-c", ASK], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert said[0] == "pipelining_dualpipev.models"
    assert said[2] == "False"
