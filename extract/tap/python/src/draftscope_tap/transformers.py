"""Taps a Hugging Face transformers model in this process.

    tap = draftscope_tap.transformers.attach(model, "/tmp/tap.sock")

Forward hooks on the decoder's layers copy the states that the daemon wants.
Rows of padding are left out, and positions count a request's own tokens. A
call of `generate` is as many requests as its batch has rows; a forward pass
outside of one is the prefill of requests that go on for as long as its cache
lives.
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
from typing import Any, Iterator, Mapping, Sequence

import torch
from torch import nn

from .client import DTYPES, Client, Request, Rows

log = logging.getLogger("draftscope_tap")


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
    """The requests of one call of generate, or of one cache."""

    def __init__(self, meta: _Meta, temperature: float, eos: Sequence[int], pad: int | None, generates: bool) -> None:
        self.meta, self.temperature = meta, temperature
        self.stops = frozenset(eos) | ({pad} if pad is not None else frozenset())
        self.generates = generates
        self.requests: list[Request | None] = []
        self.fed: list[list[int]] = []  # ids that went through the model, by row
        self.prompts: list[list[int]] = []
        self.over: list[bool] = []  # rows that go on only because others do
        self.broken: str | None = None
        self.width = 0  # of the prompts, padded; 0: of the first pass
        self.real: list[list[bool]] = []  # which tokens of that width are no padding


@dataclasses.dataclass
class _Pass:
    """One forward pass on its way through the layers."""

    batch: _Batch
    rows: list[Rows]
    index: torch.Tensor  # of the wanted rows among batch*time
    states: list[int]
    kept: dict[int, torch.Tensor]


class Tap:
    """A model that is tapped. `close` takes the hooks off."""

    def __init__(self, model: nn.Module, client: Client) -> None:
        self.model, self.client = model, client
        self._decoder = decoder_of(model)
        self._local = threading.local()
        self._manual: dict[int, _Batch] = {}  # by id of the cache
        self._hooks = [
            self._decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
            self._decoder.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
            self._decoder.layers[0].register_forward_pre_hook(self._embedded, with_kwargs=True),
        ]
        for i, layer in enumerate(self._decoder.layers):
            self._hooks.append(layer.register_forward_hook(functools.partial(self._layer, i + 1)))
        self._generate = getattr(model, "generate", None)
        if self._generate is not None:
            model.generate = self._wrapped  # type: ignore[method-assign, assignment]

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
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._generate is not None:
            del self.model.generate
            self._generate = None
        for batch in list(self._manual.values()):
            self._finish_manual(batch)
        self._manual.clear()
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
        batch.width = inputs.shape[1] if inputs is not None and inputs.dim() == 2 else 0
        if (option("num_beams") or 1) > 1:
            batch.broken = "beam search"
            log.warning("beam search is not captured")
        outer = getattr(self._local, "batch", None)
        self._local.batch = batch
        try:
            out = generate(*args, **kwargs)
        except BaseException as e:
            for request in batch.requests:
                self.client.abort(request, type(e).__name__)
            raise
        finally:
            self._local.batch = outer
        sequences = out if isinstance(out, torch.Tensor) else out.sequences
        self._finish(batch, sequences, frozenset(eos))
        return out

    def _meta(self) -> _Meta:
        return getattr(self._local, "meta", None) or _Meta()

    def _finish(self, batch: _Batch, sequences: torch.Tensor, eos: frozenset[int]) -> None:
        """Ends the requests, with the ids as generate returned them."""
        if not any(r is not None for r in batch.requests):
            return
        for row, request in enumerate(batch.requests):
            if batch.broken is not None:
                self.client.abort(request, batch.broken)
                continue
            whole = sequences[row].tolist()
            made = whole[batch.width :]
            prompt = [t for t, real in zip(whole[: batch.width], batch.real[row]) if real]
            fed = len(batch.fed[row]) - len(prompt)  # generated tokens that went through the model
            if batch.over[row]:
                made = made[: fed + 1]
            ids = prompt + made
            self.client.finish(request, ids, "stop" if made and made[-1] in eos else "length")

    # -- the forward pass ------------------------------------------------------

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._local.now = None
        try:
            self._local.now = self._begin_pass(args, kwargs)
        except Exception:  # the model's own errors are not ours to hide, and ours are not its
            log.exception("a forward pass was not captured")

    def _begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pass | None:
        states = self.client.states
        batch: _Batch | None = getattr(self._local, "batch", None)
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        manual = batch is None
        if batch is None and cache is not None:
            batch = self._manual.get(id(cache))
        if not states and (batch is None or not batch.requests):
            return None
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None or ids.dim() != 2:
            return None
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Mapping) or mask is not None and mask.dim() != 2:
            return self._broken(batch, "an attention mask that is not two-dimensional")
        size, time = ids.shape
        if mask is None:
            past = int(cache.get_seq_length()) if cache is not None else 0
            real = torch.ones(size, past + time, dtype=torch.bool)
        else:
            real = mask.detach().to("cpu", torch.bool)
            past = real.shape[1] - time
        if past < 0:
            return self._broken(batch, "an attention mask shorter than its tokens")
        if batch is None:
            if past > 0:
                return None  # its beginning was not seen
            batch = _Batch(self._meta(), 0.0, (), None, False)
        if batch.broken is not None:
            return None
        fed = ids.tolist()
        if not batch.requests:
            if past > 0:
                return self._broken(batch, "a cache that was filled before")
            # With an assistant, drafts come behind the prompts at once.
            batch.width = batch.width or real.shape[1]
            if real.shape[1] < batch.width:
                return self._broken(batch, "a prompt that is prefilled in chunks")
            self._begin(batch, fed, real[:, : batch.width])
        elif len(batch.requests) != size:
            return self._broken(batch, f"a batch of {size} rows that began with {len(batch.requests)}")
        now = self._rows(batch, fed, real, past, ids.device)
        if manual:
            self._local.manual = batch
        return now

    def _broken(self, batch: _Batch | None, reason: str) -> None:
        """Gives the batch up: what comes cannot be told apart."""
        if batch is not None and batch.broken is None:
            batch.broken = reason
            log.warning("not captured: %s", reason)
            for request in batch.requests:
                self.client.abort(request, reason)

    def _begin(self, batch: _Batch, fed: list[list[int]], real: torch.Tensor) -> None:
        batch.real = real.tolist()
        for row, ids in enumerate(fed):
            prompt = [t for t, is_real in zip(ids, batch.real[row]) if is_real]
            batch.prompts.append(prompt)
            batch.fed.append([])
            batch.over.append(False)
            batch.requests.append(self.client.begin(prompt, temperature=batch.temperature, **batch.meta.of(row)))

    def _rows(self, batch: _Batch, fed: list[list[int]], real: torch.Tensor, past: int, device: torch.device) -> _Pass | None:
        time = len(fed[0])
        positions = real.long().cumsum(1) - 1
        now_real, now_pos = real[:, past:].tolist(), positions[:, past:].tolist()
        rows: list[Rows] = []
        index: list[int] = []
        for r, request in enumerate(batch.requests):
            if batch.over[r]:
                continue
            at = [t for t in range(time) if now_real[r][t]]
            ids = [fed[r][t] for t in at]
            if not ids:
                continue
            pos = now_pos[r][at[0]]
            if batch.generates and len(batch.requests) > 1 and pos >= len(batch.prompts[r]):
                # A token that ends the reply is fed only because other rows
                # of the batch go on: its row would depend on them.
                stop = next((i for i, t in enumerate(ids) if t in batch.stops), None)
                if stop is not None:
                    batch.over[r] = True
                    at, ids = at[:stop], ids[:stop]
                    if not ids:
                        continue
            batch.fed[r][pos:] = ids
            if not self.client.wants(request):
                continue
            assert request is not None
            rows.append(Rows(request, len(index), pos, ids))
            index.extend(r * time + t for t in at)
        if not rows:
            return None
        states = rows[0].request.session.states
        return _Pass(batch, rows, torch.tensor(index, device=device), states, {})

    def _keep(self, c: int, hidden: torch.Tensor) -> None:
        now: _Pass | None = getattr(self._local, "now", None)
        if now is None or c not in now.states:
            return
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        now.kept[c] = flat.index_select(0, now.index.to(flat.device))  # a copy

    def _embedded(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if hidden is not None:
            self._keep(0, hidden)

    def _layer(self, c: int, _module: nn.Module, _args: Any, output: Any) -> None:
        self._keep(c, output[0] if isinstance(output, tuple) else output)

    def _leave(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        now: _Pass | None = getattr(self._local, "now", None)
        manual: _Batch | None = getattr(self._local, "manual", None)
        self._local.now = self._local.manual = None
        if output is None:  # it raised
            if manual is not None:
                self._broken(manual, "the forward pass failed")
            return
        try:
            if now is not None and len(now.kept) == len(now.states):
                self.client.step(now.rows, [now.kept[c] for c in now.states])
            elif now is not None:
                self._broken(now.batch, f"layers {sorted(set(now.states) - set(now.kept))} did not run")
            if manual is not None:
                self._remember(manual, getattr(output, "past_key_values", None))
        except Exception:
            log.exception("a forward pass was not captured")

    # -- forward passes outside of generate ------------------------------------

    def _remember(self, batch: _Batch, cache: Any) -> None:
        """Requests end with their cache."""
        if cache is None:
            self._finish_manual(batch)
        elif id(cache) not in self._manual:
            self._manual[id(cache)] = batch
            weakref.finalize(cache, self._forget, id(cache))

    def _forget(self, key: int) -> None:
        batch = self._manual.pop(key, None)
        if batch is not None:
            self._finish_manual(batch)

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


def hello_of(model: nn.Module, label: str | None = None) -> dict[str, Any]:
    """What the daemon has to know of the model."""
    import transformers

    decoder = decoder_of(model)
    config: Any = getattr(decoder, "config", None) or model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
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


def attach(model: nn.Module, socket: str | os.PathLike[str], *, label: str | None = None, **options: Any) -> Tap:
    """Taps a loaded model. options are those of Client."""
    hello = hello_of(model, label)
    dtype = next(decoder_of(model).layers[0].parameters()).dtype
    return Tap(model, Client(socket, hello, dtype=dtype, **options))
