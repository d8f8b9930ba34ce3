"""The memory that rows go through: sealed, nameless, shared by descriptor."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import math
import mmap
import os
import struct
from typing import Any, Iterable, Sequence

import torch

from .staging import cuda

log = logging.getLogger("draftscope_tap")

OFFSET = 4096
_F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_F_SEAL_SHRINK = getattr(fcntl, "F_SEAL_SHRINK", 2)
_HEAD = 16  # where this side says how many slots it has filled
_LOCKED = 64 << 20  # bytes that are page-locked, or let go, by one call: the engine's launches wait for it


class Ring:
    """`slots` rows of `states` vectors. Not thread-safe: the client locks.

    With the device of a GPU the memory is page-locked, so that the GPU copies
    into it by itself and at the full rate of the bus.
    """

    def __init__(self, states: int, hidden: int, dtype: torch.dtype, size: int, device: torch.device | None = None) -> None:
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
        self.head = 0  # slots filled, ever
        # What is page-locked together: whole slots and whole pages.
        unit = math.lcm(self.slot_bytes, mmap.PAGESIZE)
        self._part = max(1, _LOCKED // unit) * unit // self.slot_bytes
        self._pinned: list[int] = []  # addresses of parts that are page-locked
        self._copied: Any = None  # an event, on a GPU
        if device is not None and device.type == "cuda":
            self._pin(device)

    def _pin(self, device: torch.device) -> None:
        address, size = self._rows.data_ptr(), self.slots * self.slot_bytes
        # Touched first, so that the driver, which the engine shares, finds
        # the pages there and is done soon.
        ctypes.memset(address, 0, size)
        part = self._part * self.slot_bytes
        with cuda.device(device):
            self._copied = cuda.Event(blocking=True)
            for at in range(0, size, part):
                try:
                    code = int(cuda.cudart().cudaHostRegister(address + at, min(part, size - at), 1))  # 1: for every context
                except RuntimeError as e:
                    log.debug("page-locking the ring: %s", e)
                    code = -1
                if code != 0:
                    log.warning("the ring could not be page-locked (CUDA error %d); copies into it are slower", code)
                    self._unpin()
                    return
                self._pinned.append(address + at)

    def _unpin(self) -> None:
        while self._pinned:
            cuda.cudart().cudaHostUnregister(self._pinned.pop())

    @property
    def pinned(self) -> bool:
        return bool(self._pinned)

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
        self._fill(n)
        return first

    def copy(self, staged: torch.Tensor, runs: Iterable[tuple[int, int]]) -> None:
        """Copies runs (lo, n) of rows of staged, [rows, states, hidden], into
        the next slots, which must be free. From a GPU it does so on this
        thread's stream, and waits for that."""
        at = self.head % self.slots
        total = 0
        for lo, n in runs:
            total += n
            while n > 0:
                piece = min(n, self.slots - at, self._part - at % self._part)
                self._rows[at : at + piece].copy_(staged[lo : lo + piece], non_blocking=True)
                lo, n, at = lo + piece, n - piece, (at + piece) % self.slots
        if self._copied is not None:
            self._copied.record()
            self._copied.synchronize()
        self._fill(total)

    def _fill(self, n: int) -> None:
        self.head += n
        struct.pack_into("<Q", self._map, _HEAD, self.head)

    def close(self) -> None:
        """Unmaps; the kernel frees the memory when the daemon has, too."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._unpin()
        del self._rows
        self._map.close()
