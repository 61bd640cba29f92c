"""Vulkan devices: ``VulkanBackend`` opens one, ``list_devices`` says what there is."""

from __future__ import annotations

from ggufstream.backends.vulkan.backend import VulkanBackend
from ggufstream.backends.vulkan.device import VALIDATION_MESSAGES, list_devices

__all__ = ["VALIDATION_MESSAGES", "VulkanBackend", "list_devices"]
