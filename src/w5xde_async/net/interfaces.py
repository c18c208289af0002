"""Network interfaces of this machine."""

from __future__ import annotations

import socket
import struct
import sys

from w5xde_async.errors import UsageError

_SIOCGIFADDR, _SIOCGIFCONF = 0x8915, 0x8912  # Linux
_IFREQ_BYTES = 40 if struct.calcsize("P") == 8 else 32  # struct ifreq: a name of 16, an address
_MOST_ADDRESSES = 1024


def address_of(interface: str) -> str:
    """Its IPv4 address. Raises UsageError for one that is not there or has none."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise UsageError(f"--island-interface {interface} is none of this machine's: {', '.join(names)}")
    if sys.platform != "linux":
        raise UsageError("--island-interface works on Linux")
    try:
        return ipv4_of(interface)
    except OSError as error:
        raise UsageError(f"--island-interface {interface} has no IPv4 address: {error.strerror}") from None


def ipv4_addresses() -> list[str]:
    """Those of all interfaces, of which one may have several; on Linux. Raises OSError."""
    import array
    import fcntl

    entries = array.array("B", bytes(_MOST_ADDRESSES * _IFREQ_BYTES))
    place, nbytes = entries.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _SIOCGIFCONF, struct.pack("iP", nbytes, place))
    end, _ = struct.unpack("iP", answer)
    found = entries.tobytes()[:end]
    return [socket.inet_ntoa(found[at + 20 : at + 24]) for at in range(0, end, _IFREQ_BYTES)]


def ipv4_of(interface: str) -> str:
    """Its IPv4 address; Linux alone says it without a library. Raises OSError."""
    import fcntl  # there only

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])
