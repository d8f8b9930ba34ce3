"""Taps vLLM in its own processes, beside whatever drafter it runs.

With this package installed, vLLM loads `register` in each of its processes
(entry point vllm.general_plugins). It does nothing unless it is told where
the daemon is, in one of two ways:

    DRAFTSCOPE_TAP_SOCKET=/tmp/tap.sock vllm serve MODEL

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "TapConnector",
      "kv_connector_module_path": "draftscope_tap.vllm", "kv_role": "kv_both",
      "kv_connector_extra_config": {"socket": "/tmp/tap.sock"}}'

The states are those that vLLM's models give for EAGLE-3: outputs of the
compiled and graphed forward pass, so that they are there when a CUDA graph is
replayed. They do not come through the speculative slot: the worker asks the
model for the drafter's and the tap's states together, and hands the drafter
its own. In vLLM the residual stream is two tensors between layers; state c is
their sum behind layer c, and state n is the sum before the final norm.

What becomes of a request is told by the scheduler, which another process may
run: by the connector's own channel, or by an attribute of the scheduler's
output where there is no such connector.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
from typing import Any, Callable, Mapping, Sequence

import torch

from . import vllm_stops
from .client import DTYPES, Client, Refused
from .staging import Staging, cuda
from .steps import End, Fed, Steps

log = logging.getLogger("vllm.draftscope_tap")  # vLLM prints what is below its own name

SOCKET = "DRAFTSCOPE_TAP_SOCKET"
OPTIONS = "DRAFTSCOPE_TAP_OPTIONS"
_BEAM = re.compile(r"-beam-\d+(-|$)")
_ENDS = "draftscope_tap_ends"  # the attribute of a scheduler's output

worker: "WorkerTap | None" = None  # this process's, when it runs the model


@dataclasses.dataclass(frozen=True)
class Options:
    """kv_connector_extra_config, or the JSON of DRAFTSCOPE_TAP_OPTIONS.

    states are those that the model gives; without them, those that the
    daemon asks for while the model is loaded. prefix_cache says what becomes
    of a request whose prefix vLLM has cached: "complete" serves it as ever,
    and the daemon completes it with the rows of another, or records that it
    is incomplete; "recompute" keeps it from reading the cache, so that all its
    rows are there, at the cost of computing them.
    """

    socket: str
    states: tuple[int, ...] = ()
    prefix_cache: str = "complete"
    label: str | None = None
    ring_bytes: int = 256 << 20
    staging_bytes: int = 1 << 30  # of the GPU's memory, for states on their way
    deadline: float = 0.2
    wait: float = 30.0

    def __post_init__(self) -> None:
        if self.prefix_cache not in ("complete", "recompute"):
            raise ValueError(f"prefix_cache is {self.prefix_cache!r}; it is complete or recompute")


def options_of(config: Any) -> Options | None:
    """The tap's options in a VllmConfig or the environment; None without."""
    found = connector_options(config)
    if found is None and SOCKET in os.environ:
        found = {**json.loads(os.environ.get(OPTIONS, "{}")), "socket": os.environ[SOCKET]}
    if found is None:
        return None
    found = {**found, "states": tuple(found.get("states", ()))}
    return Options(**found)


def connector_options(config: Any) -> Mapping[str, Any] | None:
    """The extra config of our connector, as the only one or as one of a
    MultiConnector."""
    transfer = getattr(config, "kv_transfer_config", None)
    if transfer is None:
        return None
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector == "TapConnector":
        return dict(extra)
    for one in extra.get("connectors", ()):
        if one.get("kv_connector") == "TapConnector":
            return dict(one.get("kv_connector_extra_config") or {})
    return None


# -- what vLLM calls ---------------------------------------------------------


def register() -> None:
    """The plugin: vLLM calls it in every process, maybe more than once."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if not hasattr(WorkerWrapperBase.init_device, "draftscope_tap"):
        WorkerWrapperBase.init_device = _wrapped(WorkerWrapperBase.init_device, _after_init_device)
    vllm_stops.patch(lambda config: options_of(config) is not None)
    if SOCKET in os.environ:
        _patch_scheduler()


def __getattr__(name: str) -> Any:
    # The connector's base class costs an import that register does not need.
    if name == "TapConnector":
        from .vllm_connector import TapConnector

        return TapConnector
    raise AttributeError(name)


def _wrapped(method: Callable[..., Any], after: Callable[..., None]) -> Any:
    @functools.wraps(method)
    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = method(self, *args, **kwargs)
        after(self, out, *args, **kwargs)
        return out

    both.draftscope_tap = True  # type: ignore[attr-defined]
    return both


def _after_init_device(wrapper: Any, _out: Any) -> None:
    global worker
    options = options_of(wrapper.vllm_config)
    runner = getattr(wrapper.worker, "model_runner", None)
    if options is not None and runner is not None and worker is None:
        worker = WorkerTap(runner, wrapper.vllm_config, options)
        wrapper.worker.shutdown = functools.partial(_shutdown, wrapper.worker.shutdown)


def _shutdown(shutdown: Callable[[], None]) -> None:
    global worker
    if worker is not None:
        worker.close()
        worker = None
    shutdown()


# -- the scheduler's side ----------------------------------------------------


def end_of(request: Any) -> End:
    """How a vLLM request ended. What the scheduler made behind a stop string,
    before it heard of it, is no part of the sequence."""
    from vllm.v1.request import RequestStatus

    ids = [int(t) for t in request.all_token_ids]
    if request.status == RequestStatus.FINISHED_ABORTED and (n := vllm_stops.cut(request)) is not None:
        return End(request.request_id, "stop", ids[:n], cut=True)
    match request.status:
        case RequestStatus.FINISHED_STOPPED:
            return End(request.request_id, "stop", ids)
        case RequestStatus.FINISHED_LENGTH_CAPPED:
            return End(request.request_id, "length", ids)
        case RequestStatus.FINISHED_ABORTED:
            return End(request.request_id, "aborted", None)
        case status:
            return End(request.request_id, status.name.removeprefix("FINISHED_").lower(), None)


def _patch_scheduler() -> None:
    """Sends the ends of requests along with the scheduler's next output."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler._free_request, "draftscope_tap"):
        return

    def added(self: Any, _out: Any, request: Any, *args: Any) -> None:
        options = options_of(self.vllm_config)
        if options is not None and options.prefix_cache == "recompute":
            request.skip_reading_prefix_cache = True

    def freed(self: Any, _out: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        if connector_options(self.vllm_config) is None:
            self.__dict__.setdefault(_ENDS, []).append(end_of(request))

    def scheduled(self: Any, output: Any, *args: Any, **kwargs: Any) -> None:
        ends = self.__dict__.get(_ENDS)
        if ends:
            setattr(output, _ENDS, list(ends))
            ends.clear()

    Scheduler.add_request = _wrapped(Scheduler.add_request, added)
    Scheduler._free_request = _wrapped(Scheduler._free_request, freed)
    Scheduler.schedule = _wrapped(Scheduler.schedule, scheduled)


# -- the worker's side -------------------------------------------------------


class WorkerTap:
    """A model runner that is tapped: the methods of the one instance are
    wrapped, whichever of vLLM's runners it is."""

    def __init__(self, runner: Any, config: Any, options: Options) -> None:
        self.runner, self.config, self.options = runner, config, options
        self.steps: Steps | None = None
        self._states: list[int] = []  # that the model gives, ascending
        self._tapped: list[int] = []  # where the tap's stand among them
        self._drafter: list[int] = []  # where the drafter's do
        self._staging: Staging | None = None  # on a GPU: what is behind the passes
        self._asked = bool(getattr(runner, "use_aux_hidden_state_outputs", False))
        self._warned: set[str] = set()
        self._load = runner.load_model
        self._execute = runner.execute_model
        runner.load_model = self._load_model
        runner.execute_model = self._execute_model
        for name in ("_dummy_run", "capture_model"):
            if (method := getattr(runner, name, None)) is not None:
                setattr(runner, name, functools.partial(self._with_states, method))

    # -- while the model is loaded: before it is compiled ----------------------

    def _load_model(self, *args: Any, **kwargs: Any) -> None:
        self._load(*args, **kwargs)
        try:
            self._attach()
        except Refused as e:
            log.error("the daemon refuses this engine: %s; it serves without a tap", e)
        except Exception:
            log.exception("this engine is not tapped")

    def _attach(self) -> None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        if get_pp_group().world_size > 1:
            raise NotImplementedError("pipeline parallelism: a stage has the states of its own layers only")
        model = self.runner.get_model()
        if not hasattr(model, "set_aux_hidden_state_layers"):
            raise NotImplementedError(f"{type(model).__name__} gives no states of its layers")
        holder = decoder_of(model)
        group = get_tp_group()
        client: Client | None = None
        states: list[int] | None = None
        if group.rank_in_group == 0:  # all ranks have the whole residual stream
            try:
                client = Client(
                    self.options.socket, hello_of(holder, self.config, self.options.label), dtype=self.config.model_config.dtype,
                    ring_bytes=self.options.ring_bytes, deadline=self.options.deadline, wait=self.options.wait, device=self.runner.device,
                )
                states = sorted(set(self.options.states or client.states))
                if not states:
                    client.close(1.0)
                    log.error("no daemon at %s, and no states were named: nothing is captured", self.options.socket)
            finally:
                states = group.broadcast_object(states, src=0)
        else:
            states = group.broadcast_object(None, src=0)
        if not states:
            return
        own = sorted(set(getattr(holder, "aux_hidden_state_layers", ()))) if self._asked else []
        self._states = sorted({*own, *states})
        self._tapped = [self._states.index(c) for c in states]
        self._drafter = [self._states.index(c) for c in own]
        _keep_embedding(holder)
        model.set_aux_hidden_state_layers(tuple(self._states))
        # A compiled graph is cached by its configuration, which must
        # therefore say that this one has more outputs.
        if isinstance(self.config.additional_config, dict):
            self.config.additional_config = {**self.config.additional_config, "draftscope_tap_states": self._states}
        if client is not None:
            self.steps = Steps(client, states)
            if self.runner.device.type == "cuda":
                self._staging = Staging(self.runner.device, self.options.staging_bytes, self.options.deadline)
            log.info("states %s go to %s", states, self.options.socket)

    # -- forward passes --------------------------------------------------------

    def _with_states(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the runner that runs the model; outside of it the
        runner is as its drafter wants it."""
        if not self._states:
            return method(*args, **kwargs)
        before = self.runner.use_aux_hidden_state_outputs
        self.runner.use_aux_hidden_state_outputs = True
        try:
            return method(*args, **kwargs)
        finally:
            self.runner.use_aux_hidden_state_outputs = before

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._states:
            return self._execute(scheduler_output, *args, **kwargs)
        dummy = bool(kwargs.get("dummy_run"))
        if not dummy:
            self.end(getattr(scheduler_output, _ENDS, ()))
        out = self._with_states(self._execute, scheduler_output, *args, **kwargs)
        state = getattr(self.runner, "execute_model_state", None)
        aux = getattr(state, "aux_hidden_states", None)
        if state is None or aux is None:
            return out
        if self.steps is not None and not dummy:
            try:
                self._step(scheduler_output, state, aux)
            except Exception:  # the daemon will find the hole
                log.exception("a forward pass was not captured")
        mine = [aux[i] for i in self._drafter] if self._asked else None
        self.runner.execute_model_state = state._replace(aux_hidden_states=mine)
        return out

    def end(self, ends: Sequence[End]) -> None:
        """Requests that have ended before this step."""
        if self.steps is not None and ends:
            steps, patient = self.steps, self._staging is not None
            self._do(lambda: steps.end(ends, patient=patient))

    def _do(self, job: Callable[[], None]) -> None:
        """Runs a job for steps: behind all others, on a GPU in a thread."""
        if self._staging is not None:
            self._staging.put(job)
            return
        try:
            job()
        except Exception:  # the daemon will find the hole
            log.exception("a forward pass was not captured")

    def _step(self, scheduled: Any, state: Any, aux: Sequence[torch.Tensor]) -> None:
        if self.steps is None or self.steps.wanted() is None:
            return  # a request that is not begun now will not be
        batch = getattr(state, "input_batch", None)  # of the newer runner
        if batch is not None:
            order, n = batch.req_ids, int(batch.num_tokens)
            starts = [int(x) for x in batch.query_start_loc_np[: len(order) + 1]]
            ids, positions = batch.input_ids[:n], batch.positions[:n]
        else:
            order, n = self.runner.input_batch.req_ids, scheduled.total_num_scheduled_tokens
            starts = [0]
            for r in order:
                starts.append(starts[-1] + scheduled.num_scheduled_tokens[r])
            ids, positions = self.runner.input_ids.gpu[:n], self.runner.positions[:n]
        new = list(scheduled.scheduled_new_reqs)
        drafts = {r: len(d) for r, d in scheduled.scheduled_spec_decode_tokens.items()}
        where = torch.stack([ids.to(torch.int64), positions.to(torch.int64)])
        states = [aux[i] for i in self._tapped]
        if self._staging is None:
            self._do(lambda: self._send(new, list(order), starts, drafts, where.tolist(), states))
        else:
            self._stage(new, list(order), starts, drafts, where, states)

    def _stage(self, new: list[Any], order: list[str], starts: list[int], drafts: dict[str, int], where: torch.Tensor, states: list[torch.Tensor]) -> None:
        """Clones on the engine's stream, in whose order a replay would
        overwrite the states, and leaves the rest to the tap's thread: nothing
        here waits for the GPU."""
        staging, n = self._staging, starts[-1]
        assert staging is not None
        stage = staging.take(n, len(states), states[0].shape[1], states[0].dtype)
        if stage is not None:
            for i, rows in enumerate(states):
                stage.rows[:n, i].copy_(rows[:n])
        host = torch.empty(where.shape, dtype=where.dtype, pin_memory=True)
        host.copy_(where, non_blocking=True)
        ready = cuda.Event(blocking=True)
        ready.record(cuda.current_stream(staging.device))

        def job() -> None:
            ready.synchronize()
            try:
                self._send(new, order, starts, drafts, host.tolist(), stage.rows if stage is not None else None)
            finally:
                if stage is not None:
                    staging.give(stage)

        staging.put(job)

    def _send(
        self, new: list[Any], order: list[str], starts: list[int], drafts: dict[str, int], where: list[list[int]], states: list[torch.Tensor] | torch.Tensor | None
    ) -> None:
        assert self.steps is not None
        for request in new:
            self._begin(request)
        fed: list[Fed] = []
        for r, lo, hi in zip(order, starts, starts[1:]):
            if hi > lo:
                fed.append(Fed(r, lo, where[1][lo], where[0][lo:hi], min(drafts.get(r, 0), hi - lo - 1)))
        self.steps.step(fed, states, patient=self._staging is not None)

    def _begin(self, new: Any) -> None:
        assert self.steps is not None
        why = next((w for w, is_so in (
            ("prompt embeddings", new.prompt_token_ids is None or new.prompt_embeds is not None),
            ("images or sounds", bool(new.mm_features)),
            ("an adapter", new.lora_request is not None),
            ("pooling", new.sampling_params is None),
            ("a beam search", beam(new)),
        ) if is_so), None)
        if why is not None:
            if why not in self._warned:
                self._warned.add(why)
                log.warning("requests with %s are not captured", why)
            self.steps.ignore(new.req_id)
            return
        name, meta = meta_of(new.sampling_params)
        self.steps.begin(new.req_id, new.prompt_token_ids, name=name, cached=new.num_computed_tokens, **meta)

    def close(self) -> None:
        """Says goodbye, and prints both sides' counts."""
        if self.steps is not None:
            if self._staging is not None:
                self._staging.flush()
                self._staging.close()
            daemon = self.steps.close()
            log.info("counts %s", json.dumps({"engine": dataclasses.asdict(self.steps.client.counts()), "daemon": daemon, "refused": self.steps.client.refused}))
            self.steps = None


def beam(new: Any) -> bool:
    """Whether a request is a step of a beam search over HTTP: vLLM makes one
    for each beam and token, and does not hand on what the client said of its
    own, which may be that it is to be kept out."""
    return new.sampling_params is not None and new.sampling_params.max_tokens == 1 and bool(_BEAM.search(new.req_id))


def meta_of(params: Any) -> tuple[str | None, dict[str, Any]]:
    """What a client says of its request in SamplingParams.extra_args, which
    are vllm_xargs over HTTP: draftscope ("off" keeps it out), draftscope_id,
    and draftscope_tags ("tenant=a,plan=b")."""
    extra = params.extra_args or {}
    tags = dict(t.split("=", 1) for t in str(extra.get("draftscope_tags", "")).split(",") if "=" in t)
    name = extra.get("draftscope_id")
    return (str(name) if name is not None else None), {
        "temperature": float(params.temperature), "tags": tags, "optout": extra.get("draftscope") == "off",
    }


def decoder_of(model: Any) -> Any:
    """The module whose layers are the decoder's, as vLLM finds it to set the
    states that it gives."""
    if hasattr(model, "get_language_model"):
        model = model.get_language_model()
    elif hasattr(model, "language_model"):
        model = model.language_model
    return getattr(model, "model", model)


def _keep_embedding(holder: Any) -> None:
    """State 0 is given as it is, not as a sum; the first layer's norm then
    writes the residual stream into the same memory."""
    add = getattr(holder, "_maybe_add_hidden_state", None)
    if add is None:
        return

    def keep(aux: list[torch.Tensor], c: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> list[torch.Tensor]:
        out: list[torch.Tensor] = add(aux, c, hidden.clone() if residual is None else hidden, residual)
        return out

    holder._maybe_add_hidden_state = keep


def hello_of(holder: Any, config: Any, label: str | None) -> dict[str, Any]:
    """What the daemon has to know of the model."""
    import vllm

    text = config.model_config.hf_text_config
    norm: dict[str, Any] = {}
    if getattr(getattr(holder, "norm", None), "weight", None) is not None:
        w = holder.norm.weight.detach().to("cpu", torch.float32).contiguous()
        norm = {
            "eps": float(getattr(text, "rms_norm_eps", 0.0)),
            "sha256": hashlib.sha256(ctypes.string_at(w.data_ptr(), w.numel() * 4)).hexdigest(),
        }
    return {
        "engine": "vllm",
        "engine_version": vllm.__version__,
        "model": {
            "label": label or os.path.basename(config.model_config.model.rstrip("/")), "fingerprint": "",
            "layers": int(text.num_hidden_layers), "hidden": config.model_config.get_hidden_size(),
            "vocab": config.model_config.get_vocab_size(),
        },
        "dtype": DTYPES[config.model_config.dtype],
        "final_norm": norm,
    }
