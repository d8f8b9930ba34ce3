"""Where a GPU's states wait: cloned within the forward pass, moved on behind it.

The engine's thread takes a `Stage`, its stream copies states into it, and one
thread of the tap, with a stream of its own, sends what is there. The engine
waits for neither but when all of the memory is taken, and then for one
deadline in each congestion.

That thread takes the interpreter's lock from the engine's. It works on some
passes at a time: on one by one, with what it needs gone from the processor's
caches, it would take several times as long.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from typing import Any, Callable

import torch

log = logging.getLogger("draftscope_tap")
cuda: Any = torch.cuda  # whose functions have types in some versions only

_LEAST = 16  # rows of the smallest stage
_GATHER = 0.1  # seconds in which jobs gather, while there is room for their stages


class Stage:
    """Memory for the rows of one forward pass, [rows, states, hidden]."""

    def __init__(self, rows: int, states: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.rows = torch.empty(rows, states, hidden, dtype=dtype, device=device)
        self.bytes = self.rows.numel() * dtype.itemsize
        self.event = cuda.Event(blocking=True) if device.type == "cuda" else None
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}

    def views(self, size: int, time: int) -> list[torch.Tensor]:
        """The first size*time rows, as [size, time, hidden] for each state."""
        views = self._views.get((size, time))
        if views is None:
            if len(self._views) > 64:
                self._views.clear()
            with torch.inference_mode(False), torch.no_grad():
                part = self.rows[: size * time]
                views = list(part.view(size, time, *part.shape[1:]).unbind(2))
            self._views[size, time] = views
        return views


class Staging:
    """Stages of one device, `limit` bytes of them at most, and the thread
    that empties them in the order of the passes."""

    def __init__(self, device: torch.device, limit: int, deadline: float) -> None:
        self.device, self.limit = device, limit
        self._deadline = deadline
        self._changed = threading.Condition()
        self._free: list[Stage] = []
        self._taken = 0  # bytes that are in use
        self._idle = 0  # bytes that are free
        self._shape: tuple[int, int, torch.dtype] | None = None
        self._congested = False
        self.waits = 0  # congestions in which the engine waited
        self.most = 0  # bytes that the stages ever took
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._hurry = threading.Event()  # somebody waits for the jobs
        self._thread = threading.Thread(target=self._run, name="draftscope-tap-move", daemon=True)
        self._thread.start()

    @property
    def bytes(self) -> int:
        """What the stages take on the device."""
        return self._taken + self._idle

    def take(self, rows: int, states: int, hidden: int, dtype: torch.dtype) -> Stage | None:
        """A stage for so many rows; None when there is no memory for it."""
        with self._changed:
            if self._shape != (states, hidden, dtype):
                self._shape = (states, hidden, dtype)
                self._drop()
            if self._congested and self._taken * 2 <= self.limit:
                self._congested = False
            stage = self._find(rows)
            if self._taken * 4 > self.limit:
                self._hurry.set()
            if stage is None and not self._congested and self._taken > 0:
                self.waits += 1
                end = time.monotonic() + self._deadline
                while stage is None and (left := end - time.monotonic()) > 0:
                    self._changed.wait(left)
                    stage = self._find(rows)
            if stage is None:
                self._congested = True
                return None
            self._taken += stage.bytes
            self.most = max(self.most, self.bytes)
            return stage

    def _find(self, rows: int) -> Stage | None:
        assert self._shape is not None
        states, hidden, dtype = self._shape
        need = -(-rows // _LEAST) * _LEAST * states * hidden * dtype.itemsize
        stage = min((s for s in self._free if s.rows.shape[0] >= rows), key=lambda s: s.bytes, default=None)
        # A decode step leaves the stage of a prefill alone while it can.
        if stage is not None and (stage.bytes <= 4 * need or self.bytes + need > self.limit):
            self._free.remove(stage)
            self._idle -= stage.bytes
            return stage
        rows = -(-rows // _LEAST) * _LEAST
        while self._free and self.bytes + need > self.limit:
            self._idle -= self._free.pop(0).bytes
        if self.bytes + need > self.limit:
            return None
        try:
            return Stage(rows, states, hidden, dtype, self.device)
        except torch.OutOfMemoryError:
            log.warning("the device has no memory for %d bytes of states", need)
            return None

    def give(self, stage: Stage) -> None:
        """Gives a stage back, whose copies have ended."""
        with self._changed:
            self._taken -= stage.bytes
            if self._shape == (stage.rows.shape[1], stage.rows.shape[2], stage.rows.dtype):
                self._free.append(stage)
                self._idle += stage.bytes
            self._changed.notify_all()

    def drop(self) -> None:
        """Frees the memory; what is in use is freed as it is given back."""
        with self._changed:
            self._shape = None
            self._drop()

    def _drop(self) -> None:
        self._free.clear()
        self._idle = 0

    # -- the thread ----------------------------------------------------------

    def put(self, job: Callable[[], None]) -> None:
        """Runs job behind all that were put before."""
        self._jobs.put(job)

    def flush(self, timeout: float = 60.0) -> bool:
        """Waits until all jobs that were put so far have run."""
        done = threading.Event()
        self._jobs.put(done.set)
        self._hurry.set()
        return done.wait(timeout)

    def close(self, timeout: float = 60.0) -> None:
        self._jobs.put(None)
        self._hurry.set()
        self._thread.join(timeout)
        self.drop()

    def _run(self) -> None:
        with self._stream():
            while (job := self._next()) is not None:
                try:
                    job()
                except Exception:  # one pass is lost, and the daemon will find the hole
                    log.exception("a forward pass was not sent")
                del job

    def _next(self) -> Callable[[], None] | None:
        try:
            return self._jobs.get_nowait()
        except queue.Empty:
            job = self._jobs.get()
            self._hurry.wait(_GATHER)
            self._hurry.clear()
            return job

    def _stream(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        torch.cuda.set_device(self.device)
        stream: contextlib.AbstractContextManager[Any] = cuda.stream(cuda.Stream(self.device))
        return stream
