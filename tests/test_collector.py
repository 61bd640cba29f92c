"""The garbage collector is off while many objects are made, and on again after it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from ggufstream.collector import uncollected


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_the_collector_is_off_within_and_on_again_after_it() -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner one has switched it on too early"
    assert gc.isenabled()


def test_an_error_switches_it_on_again() -> None:
    @uncollected()
    def fail() -> None:
        raise ValueError(gc.isenabled())

    for _ in range(2):
        with pytest.raises(ValueError, match="False"):
            fail()
        assert gc.isenabled()


def test_who_has_it_off_keeps_it_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_it_stays_off_until_the_last_of_several_threads_is_through() -> None:
    begun, may_end = threading.Event(), threading.Event()

    @uncollected()
    def work() -> None:
        begun.set()
        may_end.wait()

    thread = threading.Thread(target=work)
    with uncollected():
        thread.start()
        begun.wait()
    assert not gc.isenabled()
    may_end.set()
    thread.join()
    assert gc.isenabled()
