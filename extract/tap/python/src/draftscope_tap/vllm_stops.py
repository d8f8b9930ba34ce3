"""Requests of vLLM that a stop string ended.

vLLM looks for stop strings where it makes text of tokens, in the front end,
and then has the scheduler abort the request, as it does for a client that
hangs up. So that the two can be told apart, the front end's abort says of
such a request how many tokens its client was given: a mark of ours stands
among the ids to abort, and the scheduler's side takes it out. The abort is
the one message that goes the same way whichever front end and however many
engine cores there are.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable

_MARK = "draftscope-stopped:"

_stopped: dict[str, int] = {}  # the front end's: tokens of requests that it is about to abort


def patch(tapped: Callable[[Any], bool]) -> None:
    """Wraps the front end's and the scheduler's side, in whichever process
    this is; tapped says of a VllmConfig whether there is a tap."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core_client import AsyncMPClient, InprocClient, SyncMPClient
    from vllm.v1.engine.output_processor import OutputProcessor

    if hasattr(Scheduler.finish_requests, "draftscope_tap"):
        return
    OutputProcessor.process_outputs = _noting(OutputProcessor.process_outputs)
    for client in (SyncMPClient, AsyncMPClient):
        client._send_input = _marking(client._send_input, tapped)
    InprocClient.abort_requests = _marking_here(InprocClient.abort_requests, tapped)
    Scheduler.finish_requests = _reading(Scheduler.finish_requests)


def _noting(process: Callable[..., Any]) -> Any:
    @functools.wraps(process)
    def noting(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        states = {o.request_id: self.request_states.get(o.request_id) for o in outputs}
        out = process(self, outputs, *args, **kwargs)
        for r in out.reqs_to_abort:
            detokenizer = getattr(states.get(r), "detokenizer", None)
            if detokenizer is not None:
                _stopped[r] = int(detokenizer.num_output_tokens())
        return out

    return noting


def _marking(send: Callable[..., Any], tapped: Callable[[Any], bool]) -> Any:
    @functools.wraps(send)
    def marking(self: Any, kind: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if _stopped and kind.name == "ABORT":
            request = marked(request, tapped(self.vllm_config))
        return send(self, kind, request, *args, **kwargs)

    return marking


def _marking_here(abort: Callable[..., Any], tapped: Callable[[Any], bool]) -> Any:
    @functools.wraps(abort)
    def marking(self: Any, ids: list[str]) -> Any:
        return abort(self, marked(ids, tapped(self.engine_core.vllm_config)))

    return marking


def marked(ids: Iterable[str], tapped: bool) -> list[str]:
    """The ids of an abort, and marks for those that a stop string ended."""
    marks = [f"{_MARK}{n}:{r}" for r in ids if (n := _stopped.pop(r, None)) is not None]
    return [*ids, *marks] if tapped else list(ids)


def _reading(finish: Callable[..., Any]) -> Any:
    @functools.wraps(finish)
    def reading(self: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        if ids is not None and not isinstance(ids, str):
            ids, stopped = unmarked(ids)
            for r, n in stopped.items():
                if (request := self.requests.get(r)) is not None:
                    request.draftscope_tap_stopped = n
        return finish(self, ids, *args, **kwargs)

    reading.draftscope_tap = True  # type: ignore[attr-defined]
    return reading


def unmarked(ids: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """The ids without marks, and the tokens that the marks name."""
    plain: list[str] = []
    stopped: dict[str, int] = {}
    for r in ids:
        if r.startswith(_MARK):
            n, _, name = r.removeprefix(_MARK).partition(":")
            stopped[name] = int(n)
        else:
            plain.append(r)
    return plain, stopped


def cut(request: Any) -> int | None:
    """The tokens of a scheduler's request that its client was given before a
    stop string ended it, those of the prompt among them; None if none did."""
    n: int | None = getattr(request, "draftscope_tap_stopped", None)
    return None if n is None else int(request.num_prompt_tokens) + n
