"""Taps SGLang in its scheduler's processes (entry point sglang.srt.plugins).

    DRAFTSCOPE_TAP_SOCKET=/tmp/tap.sock python -m sglang.launch_server ...

Without that variable the plugin does nothing. State c, the residual stream
before layer c, is taken where SGLang itself takes a drafter's states: the
callback that a layer is given for it; the last one is what the final norm is
given. Each is copied into a buffer of the tap's that is never moved, so that
the copies are part of a captured CUDA graph and run when it is replayed, with
whatever drafter there is.

Requests with rows are those of the scheduler's batch; drafts are rows of a
verification, and are held back until the request's next position tells how
many were accepted. Trees of drafts are not captured. Ids and positions are
read from the device as the pass is launched, which waits for it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import os
from typing import Any, Mapping, Sequence

import torch

from .client import DTYPES, Client, Refused
from .steps import End, Fed, Steps

log = logging.getLogger("draftscope_tap.sglang")

SOCKET = "DRAFTSCOPE_TAP_SOCKET"
OPTIONS = "DRAFTSCOPE_TAP_OPTIONS"  # JSON: states, rows, label, ring_bytes, deadline, wait
_HEALTH = "HEALTH_CHECK"  # by which the ids of the server's own requests begin
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

tap: "RunnerTap | None" = None  # this process's


def register() -> None:
    """The plugin: SGLang calls it in every process."""
    if SOCKET not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_RUNNER}.load_model", _loaded, HookType.AFTER)
    HookRegistry.register(f"{_RUNNER}.forward", _forward, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.run_batch", _begin, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.process_batch_result", _ended, HookType.AFTER)


# Hooks do not change what SGLang returns, and do not raise.


def _guarded(hook: Any) -> Any:
    @functools.wraps(hook)
    def safe(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Refused as e:
            log.error("the daemon refuses this engine: %s; it serves without a tap", e)
        except Exception:
            log.exception("draftscope's tap, in %s", hook.__name__)

    return safe


@_guarded
def _loaded(_out: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    global tap
    if tap is None and not runner.is_draft_worker:
        tap = attach(runner, os.environ[SOCKET], json.loads(os.environ.get(OPTIONS, "{}")))


@_guarded
def _forward(_out: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if tap is not None and tap.runner is runner:
        tap.forward(batch)


@_guarded
def _begin(_scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if tap is not None:
        tap.requests(batch.reqs or ())


@_guarded
def _ended(_out: Any, _scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if tap is not None:
        tap.ended(batch.reqs or ())


def attach(runner: Any, socket: str, options: Mapping[str, Any]) -> "RunnerTap | None":
    """Taps a model runner whose model is loaded, on the first rank."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.pp_size > 1:
        raise NotImplementedError("pipeline parallelism: a stage has the states of its own layers only")
    if parallel.tp_rank != 0:
        return None
    options = dict(options)
    states, rows, label = options.pop("states", None), options.pop("rows", None), options.pop("label", None)
    dtype = runner.dtype
    client = Client(socket, hello_of(runner, label), dtype=dtype, **{"wait": 30.0, **options})
    states = sorted(set(states or client.states))
    if not states:
        client.close(1.0)
        log.error("no daemon at %s, and no states were named: nothing is captured", socket)
        return None
    most = (getattr(runner.server_args, name, None) for name in ("chunked_prefill_size", "max_prefill_tokens"))
    rows = rows or max(8192, *(n or 0 for n in most)) + 2048
    return RunnerTap(runner, Steps(client, states), rows)


class RunnerTap:
    """A model runner that is tapped; at most `rows` rows in a pass."""

    def __init__(self, runner: Any, steps: Steps, rows: int) -> None:
        self.runner, self.steps = runner, steps
        model = decoder_of(runner.model)
        hidden, device = int(runner.model_config.hidden_size), next(model.layers[0].parameters()).device
        # Never moved: a captured graph writes to these addresses.
        self._rows = torch.zeros(len(steps.states), rows, hidden, dtype=runner.dtype, device=device)
        self._seen: dict[str, Any] = {}  # requests by id, of the batches since the last end
        for i, c in enumerate(steps.states):
            if c < len(model.layers):
                model.layers[c].register_forward_pre_hook(functools.partial(self._before_layer, i), with_kwargs=True)
            else:
                model.norm.register_forward_pre_hook(functools.partial(self._before_norm, i), with_kwargs=True)

    def _keep(self, i: int, hidden: torch.Tensor) -> None:
        n = min(hidden.shape[0], self._rows.shape[1])
        self._rows[i, :n].copy_(hidden[:n])

    def _before_layer(self, i: int, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        theirs = kwargs.get("capture_output")

        def capture(hidden: torch.Tensor, **more: Any) -> None:
            self._keep(i, hidden)
            if theirs is not None:
                theirs(hidden, **more)

        return args, {**kwargs, "capture_output": capture}

    def _before_norm(self, i: int, _norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0]
        residual = args[1] if len(args) > 1 else kwargs.get("residual")
        self._keep(i, hidden if residual is None else hidden + residual)

    # -- what the scheduler says -----------------------------------------------

    def requests(self, reqs: Sequence[Any]) -> None:
        for req in reqs:
            self._seen.setdefault(req.rid, req)

    def forward(self, batch: Any) -> None:
        """The rows of a pass that was launched on this thread's stream."""
        mode, order = batch.forward_mode, batch.rids
        if mode.is_idle() or not order:
            return
        if mode.is_target_verify():
            each = int(batch.spec_info.draft_token_num)
            if int(getattr(batch.spec_info, "topk", 1) or 1) > 1:
                for r in order:
                    self.steps.ignore(r)
            counts, drafts = [each] * len(order), each - 1
        elif mode.is_extend_without_speculative():
            counts, drafts = [int(n) for n in batch.extend_seq_lens_cpu], 0
        elif mode.is_decode():
            counts, drafts = [1] * len(order), 0
        else:
            return
        n = sum(counts)
        if n > self._rows.shape[1]:
            log.error("a pass of %d rows; there is room for %d (option rows)", n, self._rows.shape[1])
            return
        positions = batch.positions if batch.positions.dim() == 1 else batch.positions[0]
        ids, at = torch.stack([batch.input_ids[:n].to(torch.int64), positions[:n].to(torch.int64)]).tolist()
        fed, lo = [], 0
        for r, count in zip(order, counts):
            req = self._seen.get(r)
            if count > 0 and req is not None:
                self._open(req, at[lo])
                fed.append(Fed(r, lo, at[lo], ids[lo : lo + count], drafts))
            lo += count
        self.steps.step(fed, list(self._rows[:, :n]))

    def _open(self, req: Any, first: int) -> None:
        if req.rid.startswith(_HEALTH) or req.multimodal_inputs is not None or req.lora_id is not None or req.input_embeds is not None:
            return self.steps.ignore(req.rid)
        params = req.sampling_params
        custom = params.custom_params if isinstance(params.custom_params, dict) else {}
        # SGLang writes temperature 0 as 1 with the most likely token.
        temperature = 0.0 if params.top_k == 1 else float(params.temperature)
        tags = dict(t.split("=", 1) for t in str(custom.get("draftscope_tags", "")).split(",") if "=" in t)
        # Before several answers to one prompt SGLang runs the prompt alone, for
        # its cache: the name is for an answer.
        name = custom.get("draftscope_id") if params.max_new_tokens != 0 else None
        self.steps.begin(
            req.rid, [int(t) for t in req.origin_input_ids], name=str(name) if name is not None else None, cached=first,
            temperature=temperature, tags=tags, optout=custom.get("draftscope") == "off",
        )

    def ended(self, reqs: Sequence[Any]) -> None:
        ends = []
        for req in reqs:
            if req.finished() and self._seen.pop(req.rid, None) is not None:
                kind = type(req.finished_reason).__name__
                if "ABORT" in kind:
                    ends.append(End(req.rid, "aborted", None))
                else:
                    ids = [int(t) for t in req.origin_input_ids] + [int(t) for t in req.output_ids_through_stop]
                    ends.append(End(req.rid, "length" if "LENGTH" in kind else "stop", ids))
        if ends:
            self.steps.end(ends)


def decoder_of(model: Any) -> Any:
    """The module whose layers are the decoder's."""
    model = getattr(model, "language_model", model)
    decoder = getattr(model, "model", model)
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise TypeError(f"{type(model).__name__} has no layers and final norm that could be tapped")
    return decoder


def hello_of(runner: Any, label: str | None) -> dict[str, Any]:
    """What the daemon has to know of the model."""
    import sglang

    config, text = runner.model_config, runner.model_config.hf_text_config
    w = decoder_of(runner.model).norm.weight.detach().to("cpu", torch.float32).contiguous()
    return {
        "engine": "sglang",
        "engine_version": sglang.__version__,
        "model": {
            "label": label or os.path.basename(str(config.model_path).rstrip("/")), "fingerprint": "",
            "layers": int(text.num_hidden_layers), "hidden": int(config.hidden_size), "vocab": int(config.vocab_size),
        },
        "dtype": DTYPES[runner.dtype],
        "final_norm": {
            "eps": float(getattr(text, "rms_norm_eps", 0.0)),
            "sha256": hashlib.sha256(ctypes.string_at(w.data_ptr(), w.numel() * 4)).hexdigest(),
        },
    }
