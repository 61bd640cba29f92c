"""Every example runs, as a user runs it, and does what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str | Path) -> tuple[str, str]:
    """stdout and stderr of an example that ends well."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_load_with_progress(smollm2_path: Path) -> None:
    out, _ = run("load_with_progress.py", smollm2_path, "cpu")
    assert "272 weights on host memory" in out
    ticks = re.search(r"meanwhile (\d+) ticks", out)
    assert ticks is not None
    assert int(ticks[1]) > 0


@pytest.mark.slow
def test_tqdm_progress(smollm2_path: Path) -> None:
    out, err = run("tqdm_progress.py", smollm2_path, "cpu")
    assert out.startswith("272 weights")
    assert "100%" in err
    assert "92.1M/92.1M" in err


@pytest.mark.slow
def test_tqdm_progress_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "tqdm_progress.py"), str(tmp_path / "none.gguf"), "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "MissingFileError" in done.stderr


@pytest.mark.slow
def test_overlap_computes_the_token_that_the_whole_model_gives(smollm2_path: Path) -> None:
    out, _ = run("overlap.py", smollm2_path, "cpu")
    lines = out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [str(n) for n in range(30)]
    assert lines[-1].endswith("' Paris'")


@pytest.mark.slow
def test_notebook(smollm2_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "notebook.ipynb"
    copy.write_bytes((EXAMPLES / "notebook.ipynb").read_bytes())
    command = [sys.executable, "-m", "jupyter", "execute", "--inplace", str(copy)]
    environment = os.environ | {"MODEL": str(smollm2_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    cells = json.loads(copy.read_text())["cells"]
    text = "".join("".join(output.get("text", ())) for cell in cells for output in cell.get("outputs", ()))
    assert "272 tensors" in text
    assert "100%" in text
    pages = [
        output["data"]["text/html"]
        for cell in cells
        for output in cell.get("outputs", ())
        if "text/html" in str(output)
    ]
    assert "iframe" in "".join(pages[0])
