"""What all tests share: the real models, a guard against a blocked event loop, both event loops, and validation."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import structlog
import uvloop
from blockbuster import BlockBuster, blockbuster_ctx

from ggufstream import cli
from tests.fault_table import FaultTable, RecordFault, record_into
from tests.native_objects import NATIVE

ROOT = Path(__file__).parents[1]
MODELS = ROOT / ".cache" / "models"

Call = Callable[..., tuple[int, str, str]]
"""Takes the arguments of the command; gives exit code, stdout, stderr."""

# The validation layer watches every load of the suite, in subprocesses too; tests that open a device ask for it.
os.environ.setdefault("GGUFSTREAM_VULKAN_VALIDATION", "1")
# What a developer has set for the command line must not change what is tested.
for _name in [name for name in os.environ if name.startswith("GGUFSTREAM_") and name != "GGUFSTREAM_VULKAN_VALIDATION"]:
    del os.environ[_name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", type=Path, metavar="FILE", help="write what became of each injected fault")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # else pytest-xdist's workers: they report to the one that has it
        config.pluginmanager.register(FaultTable(config.getoption("--fault-table"), ROOT / "tests" / "FAULTS.md"))


@pytest.fixture
def record_fault(record_property: Callable[[str, object], None]) -> RecordFault:
    """Call it with each fault that was injected and what came of it: a row of tests/FAULTS.md."""
    return record_into(record_property)


def _model(name: str) -> Path:
    path = MODELS / name
    if not path.is_file():
        pytest.fail(f"{path} is missing: run `make models`", pytrace=False)
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 with one Q8_0 table: 98 MB, 272 tensors."""
    return _model("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M, Q4_K_M: 253 MB, 236 tensors of five types, a vocabulary of 262,144."""
    return _model("gemma-3-270m-q4_k_m.gguf")


@pytest.fixture
def restored_structlog() -> Iterator[None]:
    """The command configures structlog for its process; other tests must not inherit that."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], restored_structlog: None) -> Call:
    """The command in this process, which is faster."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.main([os.fspath(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def blockbuster() -> Iterator[BlockBuster]:
    """Fail the test if ggufstream makes a blocking call on the event loop's thread."""
    with blockbuster_ctx("ggufstream") as guard:
        yield guard


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """One event loop for most tests; for those marked ``public_api`` each of the two in turn."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.get_closest_marker("public_api") is not None:
        factories["uvloop"] = uvloop.new_event_loop
    return factories


@pytest.fixture(autouse=True)
def validation_layer_is_silent() -> Iterator[None]:
    """Fail the test during which Vulkan's validation layer reported something."""
    yield
    device = sys.modules.get("ggufstream.backends.vulkan.device")
    messages: list[str] = getattr(device, "VALIDATION_MESSAGES", [])
    if messages:
        found = "\n".join(messages)
        messages.clear()
        pytest.fail(f"the validation layer reports:\n{found}", pytrace=False)


NATIVE.watch()


@pytest.fixture(scope="session", autouse=True)
def nothing_native_is_left() -> Iterator[None]:
    """Fail the run at whose end a native object exists."""
    yield
    assert not NATIVE.live(), ", ".join(map(str, NATIVE.live()))


@pytest.fixture(autouse=True)
def native_objects_are_given_back(nothing_native_is_left: None) -> Iterator[None]:
    """Fail the test that leaves other native objects than it found: those that wider fixtures hold."""
    before = NATIVE.live()
    yield
    NATIVE.check(before)
