"""The asyncio side of the wire: links, tuning, listening and connecting."""
