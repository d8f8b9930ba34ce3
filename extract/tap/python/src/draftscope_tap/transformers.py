"""Taps a Hugging Face transformers model in this process.

    tap = draftscope_tap.transformers.attach(model, "/tmp/tap.sock")

Forward hooks on the decoder's layers clone the states that the daemon wants.
What the rows are is found out behind the pass: on a GPU by a thread of the
tap, so that the engine's own thread launches copies and waits for nothing.
Rows of padding are left out, and positions count a request's own tokens. A
call of `generate` is as many requests as its batch has rows; a forward pass
outside of one is the prefill of requests that go on for as long as its cache
lives. Of a call of `generate` with a cache that was filled before, the daemon
is told how many rows the cache has.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import logging
import os
import threading
import weakref
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from .client import DTYPES, Client, Request, Rows
from .staging import Stage, Staging, cuda

log = logging.getLogger("draftscope_tap")

_UNKNOWN = "a cache that was filled before with tokens that are not known"
_MANY = 1024  # rows of a pass whose copies are worth some thought


@dataclasses.dataclass
class _Meta:
    """What the caller says of the requests of its next call."""

    ids: Sequence[str] | None = None
    tags: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None
    optout: bool | Sequence[bool] = False

    def of(self, row: int) -> dict[str, Any]:
        def pick(x: Any) -> Any:
            return x[row] if isinstance(x, (list, tuple)) else x

        return {"id": pick(self.ids) if self.ids is not None else None, "tags": pick(self.tags), "optout": bool(pick(self.optout))}


class _Batch:
    """The requests of one call of generate, or of one cache. The engine's
    thread makes it; what says so belongs to whoever sends the rows."""

    def __init__(self, meta: _Meta, temperature: float, eos: Sequence[int], pad: int | None, generates: bool) -> None:
        self.meta, self.temperature = meta, temperature
        self.stops = frozenset(eos) | ({pad} if pad is not None else frozenset())
        self.generates = generates
        self.session: Any = None  # the connection that its requests belong to
        self.size = 0
        self.width = 0  # of the prompts, padded; 0: of the first pass
        self.inputs: torch.Tensor | None = None  # the prompts, as generate got them
        self.broken: str | None = None
        self.live = True  # whether any of its rows may still be wanted
        # The sender's:
        self.requests: list[Request | None] = []
        self.fed: list[list[int]] = []  # ids that went through the model, by row
        self.prompts: list[list[int]] = []
        self.over: list[bool] = []  # rows that go on only because others do
        self.real: list[list[bool]] | None = None  # which tokens of width are no padding; None: all


@dataclasses.dataclass(slots=True)
class _Pass:
    """One forward pass. The tensors are on the host, or will be when `ready`
    has passed."""

    batch: _Batch
    ids: torch.Tensor
    mask: torch.Tensor | None  # None: all tokens are real, but for the prompts' padding
    past: int  # tokens before these, padding among them
    first: bool
    size: int
    time: int
    states: int
    stage: Stage | None
    views: list[torch.Tensor] | None  # of the stage, or clones that the hooks put there
    inputs: torch.Tensor | None = None  # the prompts, where a cache had some of them before
    kept: int = 0
    ready: torch.cuda.Event | None = None


class Tap:
    """A model that is tapped. `close` takes the hooks off."""

    def __init__(self, model: nn.Module, client: Client, *, staging_bytes: int = 2 << 30, deadline: float = 0.2, background: bool | None = None) -> None:
        """background says whether a thread of its own sends the rows; None
        means on a GPU. staging_bytes bounds the device's memory for states."""
        self.model, self.client = model, client
        self._decoder = decoder_of(model)
        weight = next(self._decoder.layers[0].parameters())
        self._hidden, self._dtype = int(text_config(model).hidden_size), weight.dtype
        self._staging: Staging | None = None
        if background or background is None and weight.device.type == "cuda":
            self._staging = Staging(weight.device, staging_bytes, deadline)
        self._local = threading.local()
        self._manual: dict[int, _Batch] = {}  # by id of the cache
        self._arming = threading.Lock()
        self._armed: Any = None  # the connection whose states are hooked
        self._on_layers: list[Any] = []
        self._on_decoder: list[Any] = []
        self._generate = getattr(model, "generate", None)
        self.resume()

    def resume(self) -> None:
        """Captures again after a `pause`."""
        if self._on_decoder:
            return
        self._on_decoder = [
            self._decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
            self._decoder.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]
        if self._generate is not None:
            vars(self.model)["generate"] = self._wrapped

    def pause(self) -> None:
        """Takes the hooks off. Requests that are open must not go on."""
        for hook in self._on_decoder:
            hook.remove()
        self._on_decoder.clear()
        self._arm(None)
        if self._generate is not None and "generate" in vars(self.model):
            del self.model.generate

    def _arm(self, session: Any) -> None:
        """Hooks the layers whose states a connection wants."""
        with self._arming:
            if self._armed is session:
                return
            for hook in self._on_layers:
                hook.remove()
            self._on_layers.clear()
            self._armed = session
            if session is None:
                if self._staging is not None:
                    self._staging.drop()
                return
            layers = self._decoder.layers
            for i, c in enumerate(session.states):
                if c == 0:
                    hook = layers[0].register_forward_pre_hook(functools.partial(self._embedded, i), with_kwargs=True)
                else:
                    hook = layers[c - 1].register_forward_hook(functools.partial(self._layer, i))
                self._on_layers.append(hook)

    def flush(self, timeout: float = 60.0) -> bool:
        """Waits until what was captured so far is sent."""
        return self._staging is None or self._staging.flush(timeout)

    def _put(self, job: Callable[[], None]) -> None:
        if self._staging is not None:
            self._staging.put(job)
        else:
            job()

    # -- what the caller says ------------------------------------------------

    @contextlib.contextmanager
    def request(
        self,
        *,
        ids: Sequence[str] | None = None,
        tags: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        optout: bool | Sequence[bool] = False,
    ) -> Iterator[None]:
        """Names the requests of the calls within, by row of the batch."""
        before = getattr(self._local, "meta", None)
        self._local.meta = _Meta(ids, tags, optout)
        try:
            yield
        finally:
            self._local.meta = before

    def close(self) -> Mapping[str, int] | None:
        """Takes the hooks off and says goodbye; the daemon's counts."""
        self.pause()
        self._generate = None
        for batch in list(self._manual.values()):
            self._put(functools.partial(self._finish_manual, batch))
        self._manual.clear()
        if self._staging is not None:
            self._staging.close()
        return self.client.close()

    def __enter__(self) -> "Tap":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- generate ------------------------------------------------------------

    def _wrapped(self, *args: Any, **kwargs: Any) -> Any:
        generate = self._generate
        assert generate is not None
        config = kwargs.get("generation_config") or getattr(self.model, "generation_config", None)

        def option(name: str) -> Any:
            value = kwargs.get(name)
            return value if value is not None else getattr(config, name, None)

        eos = option("eos_token_id")
        # What ends rows one by one, besides eos, shows in their padding only.
        pad = option("pad_token_id") if kwargs.get("stopping_criteria") or option("stop_strings") else None
        eos = [] if eos is None else [int(x) for x in torch.as_tensor(eos).flatten().tolist()]
        greedy = not option("do_sample")
        temperature = option("temperature")
        batch = _Batch(self._meta(), 0.0 if greedy else float(1.0 if temperature is None else temperature), eos, pad, True)
        inputs = next((x for x in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")) if isinstance(x, torch.Tensor)), None)
        if inputs is not None and inputs.dim() == 2:
            batch.width, batch.inputs = inputs.shape[1], inputs
        if (option("num_beams") or 1) > 1:
            batch.broken = "beam search"
            log.warning("beam search is not captured")
        outer = getattr(self._local, "batch", None)
        self._local.batch = batch
        try:
            out = generate(*args, **kwargs)
        except BaseException as e:
            self._put(functools.partial(self._abort, batch, type(e).__name__))
            raise
        finally:
            self._local.batch = outer
        try:
            if batch.size > 0:
                sequences, ready = self._fetch(out if isinstance(out, torch.Tensor) else out.sequences)
                self._put(functools.partial(self._finish, batch, sequences, ready, frozenset(eos)))
        except Exception:
            log.exception("the end of a call of generate was not captured")
        return out

    def _meta(self) -> _Meta:
        return getattr(self._local, "meta", None) or _Meta()

    @staticmethod
    def _fetch(x: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Has a tensor copied to the host, and the event after that."""
        if x.device.type != "cuda":
            return x.detach().clone(), None
        ready = cuda.Event(blocking=True)
        host = x.to("cpu", non_blocking=True)
        ready.record(torch.cuda.current_stream(x.device))
        return host, ready

    def _abort(self, batch: _Batch, reason: str) -> None:
        for request in batch.requests:
            self.client.abort(request, reason)

    def _finish(self, batch: _Batch, sequences: torch.Tensor, ready: torch.cuda.Event | None, eos: frozenset[int]) -> None:
        """Ends the requests, with the ids as generate returned them."""
        if not any(r is not None for r in batch.requests):
            return
        if batch.broken is not None:
            self._abort(batch, batch.broken)
            return
        if ready is not None:
            ready.synchronize()
        for row, (request, whole) in enumerate(zip(batch.requests, sequences.tolist())):
            made = whole[batch.width :]
            prompt = whole[: batch.width]
            if batch.real is not None:
                prompt = [t for t, real in zip(prompt, batch.real[row]) if real]
            fed = len(batch.fed[row]) - len(prompt)  # generated tokens that went through the model
            if batch.over[row]:
                made = made[: fed + 1]
            ids = prompt + made
            self.client.finish(request, ids, "stop" if made and made[-1] in eos else "length")

    # -- the forward pass, on the engine's thread -------------------------------

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._local.now = None
        try:
            self._local.now = self._begin_pass(args, kwargs)
        except Exception:  # the model's own errors are not ours to hide, and ours are not its
            log.exception("a forward pass was not captured")

    def _begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pass | None:
        session = self.client.session
        if session is not self._armed:
            self._arm(session)
        if session is None:
            return None
        batch: _Batch | None = getattr(self._local, "batch", None)
        cache = kwargs.get("past_key_values")
        if cache is None:
            cache = kwargs.get("cache")  # its name in later versions
        manual = batch is None
        if batch is None and cache is not None:
            batch = self._manual.get(id(cache))
        first = batch is None or batch.size == 0
        if batch is not None and (batch.broken is not None or not first and batch.session is not session):
            return None
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None or ids.dim() != 2:
            return None
        if ids.device.type == "cuda" and cuda.is_current_stream_capturing():
            self._broken(batch, "a forward pass that is recorded into a CUDA graph, which runs without hooks")
            return None
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Mapping) or mask is not None and mask.dim() != 2:
            self._broken(batch, "an attention mask that is not two-dimensional")
            return None
        size, time = ids.shape
        if mask is None:
            past = int(cache.get_seq_length()) if cache is not None else 0
        else:
            past = mask.shape[1] - time
        if past < 0:
            self._broken(batch, "an attention mask shorter than its tokens")
            return None
        if batch is None:
            if past > 0:
                return None  # its beginning was not seen
            batch = _Batch(self._meta(), 0.0, (), None, False)
        if first:
            # With an assistant, drafts come behind the prompts at once.
            batch.width = batch.width or time
            if past > 0 and (batch.inputs is None or past >= batch.width or size % batch.inputs.shape[0] != 0):
                self._broken(batch, _UNKNOWN)
                return None
            if past + time < batch.width:
                self._broken(batch, "a prompt that is prefilled in chunks")
                return None
            batch.session, batch.size = session, size
        elif batch.size != size:
            self._broken(batch, f"a batch of {size} rows that began with {batch.size}")
            return None
        if manual:
            self._local.manual = batch
        if not first and batch.generates and past >= batch.width:
            mask = None  # generate appends ones, and to copy them each time costs
        return self._take(batch, ids, mask, past, first, len(session.states))

    def _take(self, batch: _Batch, ids: torch.Tensor, mask: torch.Tensor | None, past: int, first: bool, states: int) -> _Pass:
        """Copies what the pass is fed, and finds room for what comes of it."""
        size, time = ids.shape
        stage = None
        inputs = batch.inputs if first and past > 0 else None
        batch.inputs = None
        if self._staging is None:
            ids = ids.detach().clone()
            mask = mask.detach().clone() if mask is not None else None
            inputs = inputs.detach().clone() if inputs is not None else None
        else:
            if batch.live:
                stage = self._staging.take(size * time, states, self._hidden, self._dtype)
            if mask is not None and mask.numel() > 1 << 14:
                mask = mask.to(torch.bool)
            ids = ids.to("cpu", non_blocking=True, copy=True)
            mask = mask.to("cpu", non_blocking=True, copy=True) if mask is not None else None
            inputs = inputs.to("cpu", non_blocking=True, copy=True) if inputs is not None else None
        views = stage.views(size, time) if stage is not None else None
        if self._staging is None and batch.live:
            views = [ids] * states  # the hooks put clones there
        return _Pass(batch, ids, mask, past, first, size, time, states, stage, views, inputs)

    def _broken(self, batch: _Batch | None, reason: str) -> None:
        """Gives the batch up: what comes cannot be told apart."""
        if batch is not None and batch.broken is None:
            batch.broken = reason
            log.warning("not captured: %s", reason)
            self._put(functools.partial(self._abort, batch, reason))

    def _keep(self, i: int, hidden: torch.Tensor) -> None:
        now: _Pass | None = getattr(self._local, "now", None)
        if now is None:
            return
        now.kept |= 1 << i
        views = now.views
        if views is None:
            return
        try:
            if now.stage is None:
                views[i] = hidden.detach().reshape(now.size * now.time, -1).clone()
                return
            view, hidden = views[i], hidden.detach()
            if (
                now.size * now.time >= _MANY and hidden.dtype is view.dtype and hidden.shape[-1] % 8 == 0
                and hidden.storage_offset() % 8 == 0 and hidden.is_contiguous()
            ):
                # The same bytes as larger values, which are copied faster.
                view, hidden = view.view(torch.int64), hidden.view(torch.int64)
            view.copy_(hidden)
        except Exception:
            now.kept = 0
            log.exception("a state was not kept")

    def _embedded(self, i: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if hidden is not None:
            self._keep(i, hidden)

    def _layer(self, i: int, _module: nn.Module, _args: Any, output: Any) -> None:
        self._keep(i, output[0] if isinstance(output, tuple) else output)

    def _leave(self, _module: nn.Module, _args: Any, _kwargs: dict[str, Any], output: Any) -> None:
        now: _Pass | None = getattr(self._local, "now", None)
        manual: _Batch | None = getattr(self._local, "manual", None)
        self._local.now = self._local.manual = None
        try:
            if now is not None:
                self._send(now, output is not None)
            if manual is not None:
                if output is None:  # it raised
                    self._broken(manual, "the forward pass failed")
                else:
                    self._remember(manual, getattr(output, "past_key_values", None))
        except Exception:
            log.exception("a forward pass was not captured")

    def _send(self, now: _Pass, ran: bool) -> None:
        """Hands a pass over to be sent."""
        staging = self._staging
        whole = ran and now.kept == (1 << now.states) - 1
        if ran and not whole and now.batch.session is self.client.session:
            self._broken(now.batch, f"states {[i for i in range(now.states) if not now.kept >> i & 1]} of those wanted did not come")
        if staging is not None and staging.device.type == "cuda":
            now.ready = now.stage.event if now.stage is not None else cuda.Event(blocking=True)
            assert now.ready is not None
            now.ready.record(torch.cuda.current_stream(staging.device))
        self._put(functools.partial(self._deliver, now, whole))

    # -- behind the pass ---------------------------------------------------------

    def _deliver(self, now: _Pass, whole: bool) -> None:
        """Sends the rows of a pass whose states are there."""
        try:
            if now.ready is not None:
                now.ready.synchronize()
            batch = now.batch
            if batch.broken is not None or not whole:
                return
            rows = self._rows(now)
            if rows:
                states: Any = now.stage.rows if now.stage is not None else None
                if self._staging is None:
                    states = now.views
                self.client.step(rows, states, patient=self._staging is not None)
            batch.live = any(r is not None and r.state == "open" for r in batch.requests)
        finally:
            if now.stage is not None:
                assert self._staging is not None
                self._staging.give(now.stage)

    def _begin(self, batch: _Batch, prompts: list[list[int]], real: list[list[bool]] | None, past: int) -> None:
        """The requests of a batch; a cache has the first `past` columns."""
        batch.real = [row[: batch.width] for row in real] if real is not None else None
        for row, ids in enumerate(prompts):
            prompt, cached = ids[: batch.width], past
            if batch.real is not None:
                prompt = [t for t, is_real in zip(prompt, batch.real[row]) if is_real]
                cached = sum(batch.real[row][:past])
            batch.prompts.append(prompt)
            batch.fed.append(prompt[:cached])
            batch.over.append(False)
            batch.requests.append(self.client.begin(prompt, cached=cached, temperature=batch.temperature, **batch.meta.of(row)))

    def _rows(self, now: _Pass) -> list[Rows]:
        """What the rows of a pass are."""
        batch, time = now.batch, now.time
        fed: list[list[int]] = now.ids.tolist()
        real = before = None
        if now.mask is not None:
            mask = now.mask.to(torch.bool)
            if not bool(mask.all()):
                real, before = mask[:, now.past :].tolist(), mask[:, : now.past].sum(1).tolist()
        if now.first:
            prompts = fed
            if now.inputs is not None:
                prompts = now.inputs.repeat_interleave(now.size // now.inputs.shape[0], 0).tolist()
                if any(p[now.past :] != ids[: batch.width - now.past] for p, ids in zip(prompts, fed)):
                    self._broken(batch, _UNKNOWN)
                    return []
            self._begin(batch, prompts, mask.tolist() if real is not None else None, now.past)
        rows: list[Rows] = []
        wants = self.client.wants
        stoppable = batch.generates and batch.size > 1
        for r, request in enumerate(batch.requests):
            if batch.over[r]:
                continue
            ids, at = fed[r], None
            prompt = len(batch.prompts[r])
            if real is not None:
                at = [t for t in range(time) if real[r][t]]
                ids = [ids[t] for t in at]
                if not ids:
                    continue
            if before is not None:
                pos = before[r]
            elif now.mask is None and batch.real is not None and now.past >= batch.width:
                pos = prompt + now.past - batch.width
            else:
                pos = now.past
            if stoppable and pos >= prompt and not batch.stops.isdisjoint(ids):
                # A token that ends the reply is fed only because other rows
                # of the batch go on: its row would depend on them.
                batch.over[r] = True
                ids = ids[: next(i for i, t in enumerate(ids) if t in batch.stops)]
                if not ids:
                    continue
            batch.fed[r][pos:] = ids
            if request is None or not wants(request):
                continue
            if at is None or at[len(ids) - 1] - at[0] == len(ids) - 1:
                rows.append(Rows(request, r * time + (at[0] if at is not None else 0), pos, ids))
            else:  # there is padding in between
                rows.extend(Rows(request, r * time + t, pos + i, [ids[i]]) for i, t in enumerate(at[: len(ids)]))
        return rows

    # -- forward passes outside of generate ------------------------------------

    def _remember(self, batch: _Batch, cache: Any) -> None:
        """Requests end with their cache."""
        if cache is None:
            self._put(functools.partial(self._finish_manual, batch))
        elif id(cache) not in self._manual:
            self._manual[id(cache)] = batch
            weakref.finalize(cache, self._forget, id(cache))

    def _forget(self, key: int) -> None:
        batch = self._manual.pop(key, None)
        if batch is not None:
            self._put(functools.partial(self._finish_manual, batch))

    def _finish_manual(self, batch: _Batch) -> None:
        if batch.broken is None:
            for request, ids in zip(batch.requests, batch.fed):
                self.client.finish(request, ids, "given")


def decoder_of(model: nn.Module) -> Any:
    """The module whose layers are the decoder's."""
    get = getattr(model, "get_decoder", None)
    for candidate in (get() if get is not None else None, getattr(model, "model", None), model):
        if candidate is not None and hasattr(candidate, "layers"):
            return candidate
    raise TypeError(f"{type(model).__name__} has no decoder with layers that could be tapped")


def text_config(model: nn.Module) -> Any:
    """The configuration of the decoder."""
    config: Any = getattr(decoder_of(model), "config", None) or model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def hello_of(model: nn.Module, label: str | None = None) -> dict[str, Any]:
    """What the daemon has to know of the model."""
    import transformers

    decoder, text = decoder_of(model), text_config(model)
    weight = next(decoder.layers[0].parameters())
    name = label or str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    norm: dict[str, Any] = {}
    if getattr(decoder, "norm", None) is not None:
        w = decoder.norm.weight.detach().to("cpu", torch.float32).contiguous()
        norm = {
            "eps": float(getattr(text, "rms_norm_eps", 0.0)),
            "sha256": hashlib.sha256(ctypes.string_at(w.data_ptr(), w.numel() * 4)).hexdigest(),
        }
    return {
        "engine": "transformers",
        "engine_version": transformers.__version__,
        "model": {
            "label": os.path.basename(name.rstrip("/")) or name, "fingerprint": "", "layers": len(decoder.layers),
            "hidden": int(text.hidden_size), "vocab": int(text.vocab_size),
        },
        "dtype": DTYPES[weight.dtype],
        "final_norm": norm,
    }


def attach(
    model: nn.Module,
    socket: str | os.PathLike[str],
    *,
    label: str | None = None,
    staging_bytes: int = 2 << 30,
    background: bool | None = None,
    **options: Any,
) -> Tap:
    """Taps a loaded model. staging_bytes and background are those of Tap,
    options those of Client."""
    weight = next(decoder_of(model).layers[0].parameters())
    client = Client(socket, hello_of(model, label), dtype=weight.dtype, device=weight.device, **options)
    return Tap(model, client, staging_bytes=staging_bytes, deadline=options.get("deadline", 0.2), background=background)
