"""Rows of engines that pack the tokens of many requests into one forward pass.

vLLM and SGLang schedule requests step by step, run ahead of their own results,
and let a drafter put tokens into a pass that are rejected afterwards. `Steps`
turns what they say of a pass into the client's requests and rows:

- A request begins with its first rows, at its first position that is not
  cached.
- Rows of drafts wait until it is known how many were accepted: the next
  position of the request tells, or its ids at its end. Rows of rejected
  drafts are never sent.
- An end comes with the ids as the scheduler has them, which the daemon
  compares with the ids that were fed.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Mapping, Sequence

import torch

from .client import Client, Request, Rows

log = logging.getLogger("draftscope_tap")


@dataclasses.dataclass
class Fed:
    """Consecutive rows of one request in a pass, `lo` among the pass's rows.
    The last `drafts` of them are a drafter's."""

    id: str
    lo: int
    pos: int
    ids: list[int]
    drafts: int = 0


@dataclasses.dataclass(frozen=True)
class End:
    """How a request ended. ids are None when it was given up. cut says that
    the engine may have run on behind them: rows of that are taken back."""

    id: str
    reason: str
    ids: list[int] | None
    cut: bool = False


@dataclasses.dataclass
class _Waiting:
    """Rows of a request whose drafts are not verified yet."""

    rows: Fed
    states: list[torch.Tensor] | torch.Tensor  # copies, shared by the requests of a pass


class Steps:
    """The requests of one engine. Not thread-safe: one thread runs passes.

    states are those that the engine's passes give, in ascending order.
    """

    def __init__(self, client: Client, states: Sequence[int]) -> None:
        self.client, self.states = client, list(states)
        self._open: dict[str, Request | None] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._wrong: list[int] = []  # a daemon's states that were complained of

    def wanted(self) -> list[int] | None:
        """Where the daemon's states stand among the engine's; None without a
        daemon, or with one that wants what the passes do not give."""
        want = self.client.states
        if not want or want == self._wrong:
            return None
        try:
            return [self.states.index(c) for c in want]
        except ValueError:
            self._wrong = want
            log.error("the daemon wants states %s, and the engine was started with %s; nothing is captured", want, self.states)
            return None

    def begin(self, id: str, prompt: Sequence[int], *, name: str | None = None, **meta: Any) -> None:
        """A request, by the engine's id; name is the one for the record. A
        request that is open goes on: it was preempted."""
        if id in self._open:
            return
        self._open[id] = self.client.begin(prompt, id=name or id, **meta) if self.wanted() is not None else None

    def ignore(self, id: str) -> None:
        """A request that cannot be captured."""
        self._open.setdefault(id, None)

    def step(self, fed: Sequence[Fed], states: Sequence[torch.Tensor] | torch.Tensor | None, *, patient: bool = False) -> None:
        """The rows of a pass; states are all of the engine's, each
        [rows, hidden] or longer, or one tensor [rows, states, hidden]. They
        are copied before this returns. None says that there was no memory
        for them; patient is the client's."""
        at = self.wanted()
        now: list[Rows] = []
        held: list[Fed] = []
        verified: list[tuple[_Waiting, int]] = []
        for f in fed:
            request = self._open.get(f.id)
            if request is None or not self.client.wants(request):
                self._waiting.pop(f.id, None)
                continue
            waiting = self._waiting.pop(f.id, None)
            if waiting is not None:
                verified.append((waiting, f.pos - waiting.rows.pos))
            if f.drafts > 0:
                held.append(f)
            else:
                now.append(Rows(request, f.lo, f.pos, f.ids))
        self._send(verified, patient)
        if at is None:
            return
        if states is None:
            now.extend(Rows(request, f.lo, f.pos, f.ids) for f in held if (request := self._open[f.id]) is not None)
            self.client.step(now, None)
            return
        wanted: Any = states  # a tensor is sent as it is when it holds just what is wanted
        if not isinstance(states, torch.Tensor) or at != list(range(states.shape[1])):
            every = states.unbind(1) if isinstance(states, torch.Tensor) else states
            wanted = [every[i] for i in at]
        if now:
            self.client.step(now, wanted, patient=patient)
        if held:
            device = (wanted if isinstance(wanted, torch.Tensor) else wanted[0]).device
            index = torch.tensor([f.lo + i for f in held for i in range(len(f.ids))], device=device)
            copies = wanted.index_select(0, index) if isinstance(wanted, torch.Tensor) else [s.index_select(0, index) for s in wanted]
            lo = 0
            for f in held:
                self._waiting[f.id] = _Waiting(dataclasses.replace(f, lo=lo), copies)
                lo += len(f.ids)

    def _send(self, verified: Sequence[tuple[_Waiting, int]], patient: bool) -> None:
        """Sends the first rows of each: those that were verified."""
        groups: dict[int, tuple[list[torch.Tensor] | torch.Tensor, list[Rows]]] = {}
        for w, n in verified:
            request = self._open.get(w.rows.id)
            n = min(n, len(w.rows.ids))
            if request is None or n <= 0:  # it was preempted: its rows come again
                continue
            sure = len(w.rows.ids) - w.rows.drafts
            rows = Rows(request, w.rows.lo, w.rows.pos, w.rows.ids[:n], accepted=max(0, n - sure))
            groups.setdefault(id(w.states), (w.states, []))[1].append(rows)
        for states, rows_of in groups.values():
            self.client.step(rows_of, states, patient=patient)

    def end(self, ends: Sequence[End], *, patient: bool = False) -> None:
        """Ends requests, those that never began among them."""
        verified: list[tuple[_Waiting, int]] = []
        for e in ends:
            waiting = self._waiting.pop(e.id, None)
            if waiting is None or e.ids is None:
                continue
            # What was fed and is the sequence's; the last token may be fed.
            there = e.ids[waiting.rows.pos :]
            same = next((i for i, (a, b) in enumerate(zip(waiting.rows.ids, there)) if a != b), min(len(there), len(waiting.rows.ids)))
            verified.append((waiting, same))
        self._send(verified, patient)
        for e in ends:
            request = self._open.pop(e.id, None)
            if e.ids is None:
                self.client.abort(request, e.reason)
            else:
                self.client.finish(request, e.ids, e.reason, cut=e.cut)

    def close(self, timeout: float = 60.0) -> Mapping[str, int] | None:
        self._open.clear()
        self._waiting.clear()
        return self.client.close(timeout)
