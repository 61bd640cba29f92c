"""Devices: what they can do, their memory, and how bytes get there."""
