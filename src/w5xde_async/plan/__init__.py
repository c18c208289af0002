"""Decisions. Pure: no asyncio, no torch, no clock of its own (time is an argument)."""
