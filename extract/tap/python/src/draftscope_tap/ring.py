"""The memory that rows go through: sealed, nameless, shared by descriptor."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from typing import Sequence

import torch

OFFSET = 4096
_F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_F_SEAL_SHRINK = getattr(fcntl, "F_SEAL_SHRINK", 2)


class Ring:
    """`slots` rows of `states` vectors. Not thread-safe: the client locks."""

    def __init__(self, states: int, hidden: int, dtype: torch.dtype, size: int) -> None:
        self.slot_bytes = states * hidden * dtype.itemsize
        self.slots = max(1, (size - OFFSET) // self.slot_bytes)
        total = OFFSET + self.slots * self.slot_bytes
        self.fd = os.memfd_create("draftscope-tap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, total)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK)
            self._map = mmap.mmap(self.fd, total)
        except BaseException:
            os.close(self.fd)
            raise
        flat = torch.frombuffer(self._map, dtype=dtype, offset=OFFSET, count=self.slots * states * hidden)
        self._rows = flat.view(self.slots, states, hidden)
        self.head = 0  # slots written, ever

    @property
    def freed(self) -> int:
        """Slots that the daemon has read, ever: it writes them here."""
        (n,) = struct.unpack_from("<Q", self._map)
        return int(n)

    @property
    def free(self) -> int:
        return self.slots - (self.head - self.freed)

    def describe(self) -> dict[str, object]:
        return {"type": "ring", "kind": "memfd", "offset": OFFSET, "slot_bytes": self.slot_bytes, "slots": self.slots}

    def write(self, states: Sequence[torch.Tensor], lo: int, n: int) -> int:
        """Copies rows lo to lo+n of each state into the next n slots, which
        must be free, and returns the number of the first of them."""
        first, done = self.head, 0
        while done < n:
            at = (first + done) % self.slots
            piece = min(n - done, self.slots - at)
            for i, rows in enumerate(states):
                self._rows[at : at + piece, i].copy_(rows[lo + done : lo + done + piece])
            done += piece
        self.head += n
        return first

    def close(self) -> None:
        """Unmaps; the kernel frees the memory when the daemon has, too."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        del self._rows
        self._map.close()
