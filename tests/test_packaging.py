"""The wheel: complete, and usable without the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"ggufstream": ROOT / "pipeline", "ggufstream/backends": ROOT / "backends"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the sources alone, in a copy, so that what an earlier build left behind cannot help."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "pipeline", "backends"):
        (tree / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", tree]
    # warnings of setuptools' own are not ours to answer for
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel; its dependencies come from this one through a ``.pth`` file."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check"]
    install = ["install", "--no-deps", "--no-index", "--no-build-isolation", wheel]
    done = subprocess.run([*pip, *install], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_wheel_has_every_module_and_the_package_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {
        f"{package}/{path.relative_to(folder)}"
        for package, folder in SOURCES.items()
        for path in folder.rglob("*.py")
        if path.parent.name != "shaders"
    }
    expected |= {f"ggufstream/backends/{p.relative_to(ROOT / 'backends')}" for p in ROOT.glob("backends/**/*.spv")}
    expected |= {"ggufstream/py.typed", "ggufstream/report_page.html"}
    assert [name for name in expected if name.endswith(".spv")]
    assert expected - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"ggufstream"}


def test_installed_wheel_runs_elsewhere(installed: Path, tmp_path: Path, smollm2_path: Path) -> None:
    def run(*command: str | Path) -> str:
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(installed / "bin" / "python", "-c", "import ggufstream.backends as b; print(b.__file__)")
    assert where.startswith(str(installed))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run(installed / "bin" / "ggufstream", "--version") == f"ggufstream {version}\n"
    found = json.loads(run(installed / "bin" / "ggufstream", "inspect", "--json", smollm2_path))
    assert len(found["tensors"]) == 272
    report = json.loads(run(installed / "bin" / "ggufstream", "load", "--json", "--backend", "cpu", smollm2_path))
    assert report["tensors"] == 272


@pytest.mark.parametrize("name", ["click", "rich"])
def test_missing_extra_says_how_to_install_it(installed: Path, tmp_path: Path, smollm2_path: Path, name: str) -> None:
    code = f"import sys; sys.modules['{name}'] = None; from ggufstream.cli import main; sys.exit(main())"
    command = [installed / "bin" / "python", "-c", code, "inspect", smollm2_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (record,) = map(json.loads, done.stderr.splitlines())
    assert record["error"] == f"the command line needs {name}; install it with: pip install click rich"
