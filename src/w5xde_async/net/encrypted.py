"""TLS on loops that watch descriptors: the channel of ``net.sockets`` over a non-blocking ``ssl.SSLSocket``.

OpenSSL decrypts into the caller's memory and encrypts out of it, from and to the socket itself; asyncio's transport
copies every byte several times more. It does so on the event loop, a turn's worth at a time.

Invariants: nobody waits for the descriptor while OpenSSL holds bytes, of which the descriptor knows nothing; bytes that
end without TLS's own goodbye (close_notify) are not a clean end, since whoever sits between can cut a connection.
What this module does not do: say whose certificate is good (``net.tls``; the proof of ``wire.handshake``).
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

from w5xde_async.net.sockets import Outgoing, SocketChannel, set_done, until_readable, until_writable
from w5xde_async.net.stream import CALL_BYTES, CLOSED_BY_PEER, TURN_BYTES, StreamLost, ended_by, in_pieces
from w5xde_async.wire.frame import Buffer

#: What one call encrypts. Where the kernel is full in the middle of it, OpenSSL wants the same bytes again.
PIECE_BYTES = 256 * 1024
#: The most that a record of TLS holds; each costs system calls of its own.
RECORD_BYTES = 16 * 1024


async def shake_hands(sock: socket.socket, context: ssl.SSLContext, server_hostname: str | None) -> ssl.SSLSocket:
    """TLS over a connected, non-blocking socket, which belongs to what is returned; closed where this raises OSError.

    ``server_hostname``: whom the certificate must name; None on the server's side. There is no deadline here.
    """
    try:
        made = context.wrap_socket(
            sock,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
        )
    except ssl.SSLError as error:
        if error.errno == errno.ENOTCONN:  # nobody has spoken TLS yet: the connection is gone, with bytes left to read
            raise ConnectionResetError from None
        raise
    try:
        while True:
            try:
                made.do_handshake()
                return made
            except ssl.SSLWantReadError:
                await until_readable(made)
            except ssl.SSLWantWriteError:
                await until_writable(made)
    except ssl.SSLEOFError:
        made.close()
        raise ConnectionAbortedError from None  # by the peer, in the middle of the handshake
    except BaseException:
        made.close()
        raise


class _Pieces(Outgoing):
    """Chunks on their way through OpenSSL into the kernel."""

    __slots__ = ()

    def __init__(self, chunks: Iterable[Buffer]) -> None:
        super().__init__(in_pieces(chunks, PIECE_BYTES))

    def extend(self, chunks: Iterable[Buffer]) -> None:
        super().extend(in_pieces(chunks, PIECE_BYTES))

    def pump(self, sock: socket.socket, budget: int) -> None:
        while self.left and budget > 0:
            try:
                sent = sock.send(self.next_chunk)
            except ssl.SSLWantWriteError:
                raise BlockingIOError from None
            budget -= sent + CALL_BYTES * (1 + sent // RECORD_BYTES)
            self.sent(sent)


class EncryptedChannel(SocketChannel):
    """Over a socket that has its handshake behind it, and which the channel owns from now on."""

    def __init__(self, sock: ssl.SSLSocket, peer: str) -> None:
        super().__init__(sock, peer)
        self._tls = sock
        # ``recv_into`` is this with a view more for each record: a tenth of the processor time of large frames.
        self._read = cast(Callable[[int, memoryview], int], sock.read)
        self._stuck = False  # OpenSSL must send something of its own before it reads on

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls if name == "ssl_object" else super().get_extra_info(name, default)

    def _pull(self) -> None:
        budget = TURN_BYTES
        try:
            while self._got < self._least and budget > 0:
                rest = self._target[self._got :]  # all of it, so that no part of a record stays in OpenSSL
                got = self._read(len(rest), rest)
                if not got:
                    raise StreamLost(self.peer, CLOSED_BY_PEER)
                self._got += got
                self.bytes_received += got
                budget -= got + CALL_BYTES
                self._turn += got + CALL_BYTES
                self._drained = got < RECORD_BYTES and not self._tls.pending()
        except (ssl.SSLWantReadError, BlockingIOError):
            self._drained = True
            self._flowing = False
        except ssl.SSLWantWriteError:  # an answer to the peer's new key that the kernel has not taken whole
            self._drained = self._stuck = True
            self._loop.remove_reader(self._fd)
            self._watching_in = False
            self._loop.add_writer(self._fd, self._on_writable)
            self._watching_out = True

    def _watch_in(self) -> None:
        if not self._stuck:
            super()._watch_in()

    def _on_writable(self) -> None:
        super()._on_writable()
        if self._stuck:
            self._stuck = self._drained = False
            if self._reading is not None:
                self._watch_in()
                self._on_readable()  # at once: what it waits for may be in OpenSSL already

    def writelines(self, chunks: Iterable[Buffer]) -> None:
        if self.lost is not None or self._deaf is not None:
            return  # ``drain`` says so
        if self._outgoing is not None:
            self._outgoing.extend(chunks)
            return
        outgoing = _Pieces(chunks)
        whole = outgoing.left
        try:
            with suppress(BlockingIOError):
                outgoing.pump(self._sock, TURN_BYTES)
        except OSError as error:
            self._deaf = ended_by(error)
            return
        self.bytes_sent += whole - outgoing.left
        self._turn += whole - outgoing.left + CALL_BYTES
        if outgoing.left:
            self._outgoing = outgoing
            self._loop.call_soon(self._watch_out)  # what nobody drains leaves all the same

    async def _say_goodbye(self) -> None:
        self._read = self._discard  # what the peer still says: nobody will read it
        while True:
            try:
                self._tls.unwrap()
            except ssl.SSLWantWriteError:
                self._watching_out = False
                self._writing = waiting = self._loop.create_future()  # which ``abort`` ends, too
                self._loop.add_writer(self._fd, set_done, waiting)
                try:
                    await waiting
                finally:
                    self._writing = None
                    if not self._closed:
                        self._loop.remove_writer(self._fd)
                continue
            except (OSError, ValueError):
                pass  # said, and the peer's own is still to come; or the peer was faster
            return

    def _discard(self, num_bytes: int, view: memoryview) -> int:
        return self._tls.recv_into(view, num_bytes)
