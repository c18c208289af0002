"""Bytes <-> messages. No asyncio, no clock, no sockets."""
