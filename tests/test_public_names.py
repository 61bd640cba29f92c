"""What ``import ggufstream`` offers: every name, as README writes it, and nothing misspelled."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ggufstream
from ggufstream import errors
from ggufstream.layouts import Planar
from ggufstream.options import LoadOptions

SOURCE = Path(ggufstream.__file__)


def test_every_public_name_is_there() -> None:
    for name in ggufstream.__all__:
        assert getattr(ggufstream, name) is not None, name
    assert ggufstream.sinks.RichProgress
    assert ggufstream.events.Progress
    assert isinstance(ggufstream.__version__, str)


def test_every_error_is_a_public_name() -> None:
    for name in errors.__all__:
        if name != "printable":
            assert getattr(ggufstream, name) is getattr(errors, name)
            assert name in ggufstream.__all__


def test_dir_is_the_api() -> None:
    assert dir(ggufstream) == sorted(ggufstream.__all__)


def test_a_misspelled_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        ggufstream.laod  # type: ignore[attr-defined] # noqa: B018


def test_type_checkers_and_python_see_the_same() -> None:
    """The imports for type checkers are those that ``__getattr__`` does."""
    seen = {}
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ggufstream."):
            seen |= {alias.name: node.module.removeprefix("ggufstream.") for alias in node.names}
    lazy = {name: module for name, module in seen.items() if module != "errors"}
    assert lazy == ggufstream._MODULES  # type: ignore[attr-defined]
    for name, module in lazy.items():
        assert getattr(ggufstream, name) is getattr(importlib.import_module(f"ggufstream.{module}"), name)


def test_importing_it_is_light() -> None:
    code = "import ggufstream, sys; ggufstream.FileError; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(ast.literal_eval(done.stdout)) & {"numpy", "structlog", "anyio", "gguf", "vulkan"}


@pytest.mark.parametrize("backend", ["cpu", "simulated:discrete-24g"])
def test_chunks_and_layouts_show_what_they_are(backend: str) -> None:
    with ggufstream.open_backend(backend) as opened:
        chunk = opened.allocate(4096)
        assert repr(chunk) == f"<chunk {chunk.handle:#x}: 4,096 bytes>"
        chunk.close()
        assert repr(chunk) == "<chunk closed: 4,096 bytes>"
    assert repr(Planar()) == "planar"


def test_help_explains_every_option() -> None:
    text = inspect.getdoc(LoadOptions)
    assert text is not None
    for name in LoadOptions.__dataclass_fields__:
        assert f"\n    {name}: " in text
