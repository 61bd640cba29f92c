"""A Vulkan that answers chosen calls in the driver's place."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from ggufstream.backends.vulkan.api import Vulkan
from tests.native_objects import NATIVE, counts

__all__ = ["LOST", "FaultyVulkan"]


LOST = -4
_CAN_BE_LOST = frozenset({"vkQueueSubmit", "vkWaitForFences", "vkGetFenceStatus"})


class FaultyVulkan(Vulkan):
    """Counts calls. ``answers`` maps a function to a result code, or to what gives one; ``None`` lets the driver answer.

    After :meth:`fail_at` has lost a device, all calls that can say so do, until :meth:`heal`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()
        self.is_lost = False
        self.failed = False
        """The call that :meth:`fail_at` was told was made."""
        self.answers: dict[str, int | Callable[[], int | None]] = {}
        self._count_lock = threading.Lock()

    def call(self, name: str, *arguments: object) -> int:
        with self._count_lock:
            self.called[name] += 1
        answer = self.answers.get(name)
        code = answer() if callable(answer) else answer
        if self.is_lost and name in _CAN_BE_LOST:
            return self._lost(name, arguments)
        return super().call(name, *arguments) if code is None else code

    def _lost(self, name: str, arguments: tuple[object, ...]) -> int:
        # A device that is lost has ended all work. This one has not: nothing may be freed before it does.
        if name == "vkWaitForFences":
            super().call(name, *arguments)
        elif name == "vkGetFenceStatus":
            device, fence = arguments
            assert isinstance(device, int)
            assert isinstance(fence, int)
            fences = self._array("VkFence", [self._cast("VkFence", fence)])
            super().call("vkWaitForFences", self._cast("VkDevice", device), 1, fences, 1, 1_000_000_000)
        return LOST

    def heal(self) -> None:
        """From now on, the driver answers."""
        self.answers.clear()
        self.is_lost = False

    def fail_at(self, name: str, nth: int, code: int) -> None:
        """From now on, the n-th call of a function is answered with ``code``, and no other."""
        calls = iter(range(1, 1 << 30))
        self.failed = False

        def answer() -> int | None:
            if next(calls) != nth:
                return None
            self.failed, self.is_lost = True, code == LOST
            return code

        self.answers[name] = answer

    @property
    def left(self) -> dict[str, int]:
        """Native objects that exist, by kind."""
        return counts(NATIVE.live(self))
