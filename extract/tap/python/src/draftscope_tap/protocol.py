"""Frames of the control socket: a 32-bit little-endian length, then JSON."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
from typing import Any, Mapping

PROTOCOL = 1
MAX_FRAME = 16 << 20
GOOD_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")

Message = dict[str, Any]


class ProtocolError(Exception):
    """The other side does not speak docs/tap.md."""


def encode(message: Mapping[str, Any]) -> bytes:
    return frame(json.dumps(message, separators=(",", ":")).encode())


def frame(body: bytes) -> bytes:
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a message of {len(body)} bytes")
    return struct.pack("<I", len(body)) + body


def _exactly(sock: socket.socket, n: int) -> bytes:
    parts = []
    while n:
        part = sock.recv(min(n, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def receive(sock: socket.socket) -> Message:
    """The next message; EOFError when there is none."""
    (n,) = struct.unpack("<I", _exactly(sock, 4))
    if not 2 <= n <= MAX_FRAME:
        raise ProtocolError(f"a message of {n} bytes")
    message = json.loads(_exactly(sock, n))
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("a message without a type")
    return message


def sampled(request_id: str, share: float) -> bool:
    """Whether a request is among the share that the daemon wants."""
    if share >= 1:
        return True
    head = hashlib.sha256(request_id.encode()).digest()[:8]
    return int.from_bytes(head, "big") / 2**64 < share
