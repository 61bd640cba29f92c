# ruff: noqa: INP001 - package data with a script, not a package
"""Compile every shader here to SPIR-V beside its source: ``python build.py`` (needs ``glslc``, from shaderc).

The compiled files are committed, so that neither users nor packagers need a compiler.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def compile_shader(source: Path, folder: Path) -> None:
    """Compile one ``.comp`` file; one that decodes a weight twice: ``NAME.spv`` multiplies, ``NAME.gather.spv`` gives rows.

    Optimized, and without debug names, so that equal sources give equal bytes.
    """
    variants: dict[str, list[str]] = {".spv": []}
    if "weight.glsl" in source.read_text():
        variants[".gather.spv"] = ["-DGATHER"]
    for suffix, definitions in variants.items():
        target = folder / f"{source.stem}{suffix}"
        command = ["glslc", "-O", "--target-env=vulkan1.1", *definitions, source.name, "-o", str(target)]
        subprocess.run(command, cwd=source.parent, check=True)  # noqa: S603 - our own files


def main() -> None:
    for source in sorted(FOLDER.glob("*.comp")):
        compile_shader(source, FOLDER)


if __name__ == "__main__":
    main()
