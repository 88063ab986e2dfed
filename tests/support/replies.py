"""How a statement and the end of a transaction look in the bytes of a database's connection.

For proxies that lose a reply. A message that lies across two packets is not known.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["asks", "ends_transaction"]

_READY_FOR_QUERY = b"Z\0\0\0\5I"  # PostgreSQL's, outside of any transaction
_IN_TRANSACTION = 1  # of MySQL's status flags
_OK, _END = 0x00, 0xFE
_LONGEST_END = 9  # what is longer and begins like it is a row


def asks(backend: str, data: bytes) -> bool:
    """Whether a client asks for something here, and does not begin its connection."""
    if backend == "postgresql":
        return not data.startswith(b"\0")  # the first messages have no letter
    return data[3:4] == b"\0"  # its first message answers the server's, and is numbered so


def ends_transaction(backend: str, data: bytes) -> bool:
    """Whether this is the end of a reply, and no transaction is open after it."""
    if backend == "postgresql":
        return _READY_FOR_QUERY in data
    status = [flags for payload in _payloads(data) for flags in _status(payload)]
    return bool(status) and not status[-1] & _IN_TRANSACTION


def _payloads(data: bytes) -> Iterator[bytes]:
    while len(data) > 4:
        length = int.from_bytes(data[:3], "little")
        yield data[4 : 4 + length]
        data = data[4 + length :]


def _status(payload: bytes) -> Iterator[int]:
    """The status flags of an OK packet, or of one that ends a result."""
    if payload[:1] == bytes([_END]) and len(payload) < _LONGEST_END:
        yield int.from_bytes(payload[3:5], "little")
    elif payload[:1] == bytes([_OK]):
        # Before them two numbers, of one byte each where they are small.
        yield int.from_bytes(payload[3:5], "little")
