"""The connection to the daemon: requests, rows, credit, counts.

Whatever happens to the daemon, no method raises or waits longer than the
deadline: serving goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import queue
import secrets
import socket
import threading
import time
from typing import Any, Mapping, Sequence

import torch

from . import protocol
from .ring import Ring

log = logging.getLogger("draftscope_tap")

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_MAX_QUEUE = 1 << 16  # messages that a daemon may leave unread
_MAX_NAMES = 1 << 16  # names of requests, the latest, that are not used again
_PIECE = 64  # rows that a message may have however small the ring is
_POLL = 0.002  # seconds between looks at the ring's counter: in a busy
# process the thread that reads the socket may wait long for its turn


class Refused(Exception):
    """The daemon does not want this engine, for good."""


@dataclasses.dataclass
class Counts:
    """What this side counts; docs/tap.md says what each is."""

    begun: int = 0
    finished: int = 0
    aborted: int = 0
    shed: int = 0
    steps: int = 0
    rows: int = 0
    shed_rows: int = 0
    unsampled: int = 0
    optout: int = 0
    lost: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One request that the daemon knows of."""

    id: str
    prompt: list[int]
    age: int
    session: "_Session"
    rows: int = 0  # sent and not taken back
    computed: int = 0  # of a request that was shed: rows in all
    state: str = "open"  # open, dropped (by the daemon), shed, ended


@dataclasses.dataclass(slots=True)
class Rows:
    """Consecutive rows of one request in a step: their place among the rows
    of the states, their position in the request, and their ids."""

    request: Request
    lo: int
    pos: int
    ids: list[int]
    accepted: int | None = None


class _Session:
    """One connection, from welcome to its end."""

    def __init__(self, sock: socket.socket, welcome: Mapping[str, Any], ring: Ring) -> None:
        self.sock, self.ring = sock, ring
        self.states: list[int] = list(welcome["states"])
        self.share = float(welcome.get("sample", 1))
        self.steps = 0
        self.open: dict[str, Request] = {}
        self.congested = False
        self.alive = True
        self.counts: Counts = Counts()
        self.goodbye: Mapping[str, int] | None = None
        self.lock = threading.Lock()
        self.behind = 0  # messages that are left to the sender
        self.out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.sender = threading.Thread(target=self._send, name="draftscope-tap-send", daemon=True)
        self.sender.start()

    def _send(self) -> None:
        while (data := self.out.get()) is not None:
            try:
                self.sock.sendall(data)
            except OSError:
                self.hang_up()
                return
            with self.lock:
                self.behind -= 1

    def put(self, message: Mapping[str, Any]) -> None:
        self.put_frame(protocol.encode(message))

    def put_frame(self, data: bytes) -> None:
        """Sends from this thread what the socket takes at once; what it does
        not is left to the sender, and so is all that comes behind it."""
        with self.lock:
            if self.behind == 0:
                try:
                    data = data[self.sock.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return self.hang_up()
            if not data:
                return
            self.behind += 1
            if self.behind > _MAX_QUEUE:
                log.warning("the daemon does not read; the connection is closed")
                return self.hang_up()
            self.out.put(data)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Client:
    """Connects to the daemon at `path`, and again whenever it has gone.

    hello is the message without its type, protocol and pid. Methods may be
    called from any thread. With the device of a GPU, the ring is page-locked.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        hello: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        ring_bytes: int = 256 << 20,
        deadline: float = 0.2,
        wait: float = 10.0,
        retry: float = 1.0,
        device: torch.device | None = None,
    ) -> None:
        self._path = os.fspath(path)
        self._hello = {**hello, "type": "hello", "protocol": protocol.PROTOCOL, "pid": os.getpid(), "bulk": ["memfd"]}
        self._hidden = int(hello["model"]["hidden"])
        self._dtype, self._ring_bytes, self._device = dtype, ring_bytes, device
        self._deadline, self._retry = deadline, retry
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._session: _Session | None = None
        self._past = Counts()  # of sessions that have ended
        self._closed = threading.Event()
        self._refused: str | None = None
        self._ages = itertools.count()
        self._prefix = "t" + secrets.token_hex(4)
        self._names: dict[str, None] = {}  # that were asked for and given
        self._reader = threading.Thread(target=self._run, name="draftscope-tap", daemon=True)
        self._reader.start()
        with self._changed:
            self._changed.wait_for(lambda: self._session is not None or self._refused is not None, wait)
            if self._refused is not None:
                raise Refused(self._refused)
            if self._session is None:
                log.warning("no daemon at %s yet; capture begins when there is one", self._path)

    # -- the connection ----------------------------------------------------

    @property
    def states(self) -> list[int]:
        """The states that the daemon wants; none while there is no daemon."""
        session = self._session
        return session.states if session is not None else []

    @property
    def session(self) -> _Session | None:
        """The connection there is now; requests belong to one."""
        return self._session

    @property
    def connected(self) -> bool:
        return self._session is not None

    @property
    def refused(self) -> str | None:
        """Why the daemon closed the connection for good."""
        return self._refused

    def counts(self) -> Counts:
        with self._lock:
            total = dataclasses.replace(self._past)
            if self._session is not None:
                _add(total, self._session.counts)
            return total

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                session = self._connect()
            except (OSError, EOFError, ValueError, KeyError, protocol.ProtocolError) as e:
                log.debug("connecting to %s: %s", self._path, e)
                self._closed.wait(self._retry)
                continue
            except Refused as e:
                self._refuse(str(e))
                return
            with self._changed:
                self._session = session
                self._changed.notify_all()
            self._listen(session)
            self._lose(session)
            if self._refused is not None or session.goodbye is not None:
                return

    def _refuse(self, reason: str) -> None:
        log.error("the daemon refuses this engine: %s", reason)
        with self._changed:
            self._refused = reason
            self._changed.notify_all()

    def _connect(self) -> _Session:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(10)
            sock.connect(self._path)
            sock.sendall(protocol.encode(self._hello))
            sock.settimeout(None if self._closed.is_set() else 60)
            answer = protocol.receive(sock)
            if answer["type"] == "refuse":
                raise Refused(str(answer.get("reason")))
            if answer["type"] != "welcome" or answer["protocol"] != protocol.PROTOCOL or answer["bulk"] != "memfd":
                raise protocol.ProtocolError(f"an answer that is no welcome: {answer}")
            ring = Ring(len(answer["states"]), self._hidden, self._dtype, self._ring_bytes, self._device)
            try:
                socket.send_fds(sock, [protocol.encode(ring.describe())], [ring.fd])
                if protocol.receive(sock)["type"] != "credit":
                    raise protocol.ProtocolError("no credit for the ring")
            except BaseException:
                ring.close()
                raise
            sock.settimeout(None)
            return _Session(sock, answer, ring)
        except BaseException:
            sock.close()
            raise

    def _listen(self, session: _Session) -> None:
        try:
            while True:
                message = protocol.receive(session.sock)
                kind = message["type"]
                with self._changed:
                    if kind == "drop":
                        request = session.open.get(message["r"])
                        if request is not None and request.state == "open":
                            request.state = "dropped"
                    elif kind == "bye":
                        session.goodbye = message["counts"]
                        return
                    elif kind == "refuse":
                        self._refuse(str(message.get("reason")))
                        return
                    self._changed.notify_all()
        except (OSError, EOFError, ValueError, KeyError, protocol.ProtocolError) as e:
            log.warning("the daemon at %s has gone (%s); serving goes on without capture", self._path, type(e).__name__)

    def _lose(self, session: _Session) -> None:
        with self._changed:
            session.alive = False
            session.counts.lost += len(session.open)
            session.open.clear()
            _add(self._past, session.counts)
            self._session = None
            session.out.put(None)
            session.hang_up()
            session.sock.close()
            session.ring.close()
            self._changed.notify_all()

    def close(self, timeout: float = 60.0) -> Mapping[str, int] | None:
        """Says goodbye and returns the daemon's counts, None without one."""
        with self._changed:
            self._closed.set()
            session = self._session
            if session is not None:
                for request in list(session.open.values()):
                    self._end("abort", request, "the tap was closed", None)
                session.put({"type": "bye", "counts": dataclasses.asdict(self.counts_of(session))})
        self._reader.join(timeout)
        if session is not None and self._reader.is_alive():
            session.hang_up()
            self._reader.join(timeout)
        return session.goodbye if session is not None else None

    @staticmethod
    def counts_of(session: _Session) -> Counts:
        return session.counts

    # -- requests ----------------------------------------------------------

    def begin(
        self,
        prompt: Sequence[int],
        *,
        id: str | None = None,
        cached: int = 0,
        temperature: float = 0.0,
        tags: Mapping[str, str] | None = None,
        optout: bool = False,
    ) -> Request | None:
        """A new request; None when it is not to be captured. An id that the
        protocol does not take is replaced; behind one that was used before
        stands another."""
        with self._lock:
            session = self._session
            if session is None or self._closed.is_set():
                return None
            if optout or (tags or {}).get("draftscope") == "off":
                session.counts.optout += 1
                return None
            age = next(self._ages)
            id = self._name(id, f"{self._prefix}-{age}", session)
            if not protocol.sampled(id, session.share):
                session.counts.unsampled += 1
                return None
            request = Request(id, list(prompt), age, session)
            try:
                data = protocol.encode({
                    "type": "begin", "r": id, "prompt": request.prompt, "cached": cached,
                    "temperature": temperature, "tags": dict(tags or {}),
                })
            except protocol.ProtocolError as e:  # tags without end
                log.warning("request %s is not captured: %s", id, e)
                return None
            session.open[id] = request
            session.counts.begun += 1
            session.put_frame(data)
            return request

    def _name(self, wanted: str | None, own: str, session: _Session) -> str:
        """The id of a new request. The lock is held."""
        if wanted is None:
            return own
        if not protocol.GOOD_ID.match(wanted):
            log.warning("request id %r is not usable; it is replaced", wanted)
            return own
        if wanted in self._names or wanted in session.open:
            both = f"{wanted}.{own}"
            return both if protocol.GOOD_ID.match(both) else own
        self._names[wanted] = None
        if len(self._names) > _MAX_NAMES:
            del self._names[next(iter(self._names))]
        return wanted

    def wants(self, request: Request | None) -> bool:
        """Whether rows of the request are still of use. Those of a request
        that was shed are to be told to step all the same, which counts them."""
        return request is not None and request.session.alive and request.state in ("open", "shed")

    def step(self, rows: Sequence[Rows], states: Sequence[torch.Tensor] | torch.Tensor | None, *, patient: bool = False) -> None:
        """Sends the rows of one forward pass. states are the session's
        states, each [rows, hidden], or one tensor [rows, states, hidden]; they
        are copied before this returns. None says that there was no memory for
        them: their requests are shed. patient waits for credit as long as the
        connection lasts."""
        with self._changed:
            session = self._session
            if session is None:
                return
            if session.congested and session.ring.free * 2 >= session.ring.slots:
                session.congested = False
            end = math.inf if patient else time.monotonic() + (0 if session.congested else self._deadline)
            todo = []
            for r in rows:
                if r.request.session is not session or not r.ids:
                    continue
                if r.request.state == "shed":
                    session.counts.shed_rows += len(r.ids)
                elif r.request.state == "open":
                    todo.append(r)
            todo.sort(key=lambda r: r.request.age)
            if states is None:
                self._shed(session, todo, "no memory for its rows on the device")
                return
            while todo and session.alive:
                free = session.ring.free
                if free <= 0:
                    left = end - time.monotonic()
                    if left <= 0:
                        session.congested = True
                        self._shed(session, todo, f"no credit within {self._deadline * 1000:.0f} ms")
                        return
                    self._changed.wait(min(left, _POLL))
                    continue
                # Large steps go in pieces, of which the daemon reads one
                # while the next one is copied.
                todo = self._send(session, todo, states, min(free, max(_PIECE, session.ring.slots // 8)))

    def _send(self, session: _Session, todo: list[Rows], states: Sequence[torch.Tensor] | torch.Tensor, most: int) -> list[Rows]:
        """Sends at most so many rows in one message, and returns the rest."""
        entries: list[str] = []
        rest: list[Rows] = []
        runs: list[tuple[int, int]] = []  # (lo, n) of rows next to each other
        lo = end = 0  # of the run at hand
        first = slot = session.ring.head
        last = first + most
        for r in todo:
            request, ids = r.request, r.ids
            if request.state != "open":
                continue  # dropped while this step waited
            n = len(ids)
            if n > last - slot:
                n = last - slot
                rest.append(Rows(request, r.lo + n, r.pos + n, ids[n:]))
                if n == 0:
                    continue
                ids = ids[:n]
            # Of numbers, and letters that JSON takes as they are: the costliest
            # part of a step, in a thread that the engine's own may wait for.
            tail = "}" if r.accepted is None else f',"accepted":{r.accepted}}}'
            entries.append(f'{{"r":"{request.id}","pos":{r.pos},"ids":{ids if n > 1 else f"[{ids[0]}]"},"slot":{slot}{tail}')
            if r.lo != end:
                if end > lo:
                    runs.append((lo, end - lo))
                lo = end = r.lo
            end += n
            request.rows = r.pos + n
            slot += n
        if end > lo:
            runs.append((lo, end - lo))
        if entries:
            if isinstance(states, torch.Tensor):
                session.ring.copy(states, runs)
            else:
                for lo, n in runs:
                    session.ring.write(states, lo, n)
            message = f'{{"type":"step","n":{session.steps},"at":{time.time():.6f},"rows":[{",".join(entries)}]}}'
            session.put_frame(protocol.frame(message.encode()))
            session.steps += 1
            session.counts.steps += 1
            session.counts.rows += slot - first
        return rest

    def _shed(self, session: _Session, todo: Sequence[Rows], reason: str) -> None:
        gone = 0
        for r in todo:
            if r.request.state != "open":
                if r.request.state == "shed":  # by an entry before this one
                    session.counts.shed_rows += len(r.ids)
                continue
            gone += 1
            session.put({"type": "shed", "r": r.request.id, "reason": reason, "rows": r.request.rows})
            session.counts.shed += 1
            session.counts.shed_rows += r.request.rows + len(r.ids)
            session.open.pop(r.request.id, None)
            r.request.state = "shed"
        if gone:
            log.warning("the daemon is slow: %d requests were shed (%s)", gone, reason)

    def finish(self, request: Request | None, ids: Sequence[int], reason: str, *, cut: bool = False) -> None:
        """The request is over; ids are its whole sequence, as the front end
        has it. With cut, rows behind them are taken back."""
        if request is not None and cut and request.rows > len(ids):
            self._end("finish", request, reason, list(ids), taken=request.rows - len(ids))
        else:
            self._end("finish", request, reason, list(ids))

    def abort(self, request: Request | None, reason: str) -> None:
        self._end("abort", request, reason, None)

    def _end(self, kind: str, request: Request | None, reason: str, ids: list[int] | None, taken: int = 0) -> None:
        with self._lock:
            if request is None or request.state not in ("open", "dropped") or not request.session.alive:
                return
            session = request.session
            message: dict[str, Any] = {"type": kind, "r": request.id, "reason": reason, "rows": request.rows - taken}
            if taken > 0:
                message["taken"] = taken
            if ids is not None:
                message["ids"] = ids
            session.put(message)
            if kind == "finish":
                session.counts.finished += 1
            else:
                session.counts.aborted += 1
            session.open.pop(request.id, None)
            request.state = "ended"


def _add(total: Counts, more: Counts) -> None:
    for field in dataclasses.fields(Counts):
        setattr(total, field.name, getattr(total, field.name) + getattr(more, field.name))
