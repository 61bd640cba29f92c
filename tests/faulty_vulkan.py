"""A Vulkan that answers chosen calls in the driver's place."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from ggufstream.backends.vulkan.api import Vulkan
from tests.native_objects import NATIVE, counts

__all__ = ["FaultyVulkan"]


class FaultyVulkan(Vulkan):
    """Counts calls. ``answers`` maps a function to a result code, or to what gives one; ``None`` lets the driver answer."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()
        self.answers: dict[str, int | Callable[[], int | None]] = {}
        self._count_lock = threading.Lock()

    def call(self, name: str, *arguments: object) -> int:
        with self._count_lock:
            self.called[name] += 1
        answer = self.answers.get(name)
        code = answer() if callable(answer) else answer
        return super().call(name, *arguments) if code is None else code

    def fail_at(self, name: str, nth: int, code: int) -> None:
        """From now on, the n-th call of a function is answered with ``code``, and no other."""
        calls = iter(range(1, 1 << 30))
        self.answers[name] = lambda: code if next(calls) == nth else None

    @property
    def left(self) -> dict[str, int]:
        """Native objects that exist, by kind."""
        return counts(NATIVE.live(self))
