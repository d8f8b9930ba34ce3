"""What a tap costs an engine: tokens/s of the same loop with and without it.

    PYTHONPATH=extract/tap/python/src python extract/tap/python/bench/overhead.py --draftscope bin/draftscope

One process serves a model of a real shape with random weights; `draftscope
tap`, a process of its own, reads five taps and the final state of every row.
Loops with the tap and without take turns. Prefill is a forward pass over
batch*prompt tokens, `--passes` of them one after the other; decode is greedy,
`--new` steps a loop and 2*`--turns` loops a round, and the host takes the
tokens of every step, as an engine does. Prints JSON
objects, one a line, and a table last.

The daemon checks and counts (--check-only); with --out DIR, one that stores a
dataset comes after it for a short time. Their counts are compared with the
engine's, and with the rows that the loops fed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Iterator

import torch
import transformers

import draftscope_tap.transformers as tapped


class Daemon:
    """`draftscope tap` as a process."""

    def __init__(self, a: argparse.Namespace, states: list[int], out: str | None) -> None:
        self.dir = tempfile.TemporaryDirectory()
        self.socket = str(pathlib.Path(self.dir.name) / "s")
        args = [a.draftscope, "tap", "--socket", self.socket, "--states", ",".join(map(str, states)), "--once", "--memory", str(a.memory)]
        args += ["--out", out] if out else ["--check-only"]
        self.process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self) -> dict[str, Any]:
        t = time.perf_counter()
        out, err = self.process.communicate(timeout=300)
        return {"ended_after_s": round(time.perf_counter() - t, 2), "exit": self.process.returncode, "said": out.strip(), "log": err.strip().splitlines()[-4:]}

    def gpu(self) -> dict[str, Any]:
        """What the daemon has to do with a GPU."""
        with open(f"/proc/{self.process.pid}/maps") as f:
            mapped = any("libcuda" in line for line in f)
        fds = pathlib.Path(f"/proc/{self.process.pid}/fd")
        devices = [os.readlink(fd) for fd in fds.iterdir()]
        return {"libcuda_mapped": mapped, "nvidia_devices_open": sum("nvidia" in d for d in devices)}


class Loops:
    """The loops that are measured."""

    def __init__(self, a: argparse.Namespace, model: Any) -> None:
        self.a, self.model = a, model
        self.device = next(model.parameters()).device
        self.ids = torch.randint(0, a.vocab, (a.batch, a.prompt), device=self.device)
        self.short = self.ids[:, : a.decode_prompt]
        self.rows = 0  # that were fed with the tap on
        self.requests = 0

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.inference_mode()
    def prefill(self, passes: int) -> float:
        """Tokens/s of so many forward passes."""
        self.sync()
        t = time.perf_counter()
        for _ in range(passes):
            self.model.model(self.ids, use_cache=False)
        self.sync()
        self.rows += passes * self.ids.numel()
        self.requests += passes * self.a.batch
        return passes * self.ids.numel() / (time.perf_counter() - t)

    @torch.inference_mode()
    def decode(self, steps: int, each: Callable[[int], None] | None = None) -> list[float]:
        """Seconds of each step of greedy decoding."""
        cache = transformers.DynamicCache()
        o = self.model(self.short, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = o.logits[:, -1].argmax(-1, keepdim=True)
        self.sync()
        took, t = [], time.perf_counter()
        for step in range(steps):
            o = self.model(token, past_key_values=cache, use_cache=True)
            token = o.logits[:, -1].argmax(-1, keepdim=True)
            token.tolist()
            now = time.perf_counter()
            took.append(now - t)
            t = now
            if each is not None:
                each(step)
        self.rows += self.short.numel() + steps * self.a.batch
        self.requests += self.a.batch
        return took


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def pinned_rate(device: torch.device, size: int) -> float:
    """Bytes/s from the device into page-locked memory of torch's own."""
    src = torch.ones(size, dtype=torch.uint8, device=device)
    dst = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    rates = []
    for _ in range(6):
        torch.cuda.synchronize()
        t = time.perf_counter()
        dst.copy_(src, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(size / (time.perf_counter() - t))
    return statistics.median(rates[1:])


class Bulk:
    """Times the tap's copies of many rows from the device into the ring."""

    def __init__(self, ring: Any, least: int) -> None:
        self.rates: list[float] = []
        copy = ring.copy

        def timed(staged: torch.Tensor, runs: list[tuple[int, int]]) -> None:
            size = sum(n for _, n in runs) * ring.slot_bytes
            t = time.perf_counter()
            copy(staged, runs)
            if size >= least:
                self.rates.append(size / (time.perf_counter() - t))

        ring.copy = timed


def settle(tap: tapped.Tap) -> float:
    """Waits until the daemon has read everything; seconds."""
    t = time.perf_counter()
    tap.flush(120)
    session = tap.client.session
    while session is not None and session.ring.free < session.ring.slots and session.alive:
        time.sleep(0.001)
    return time.perf_counter() - t


MODES = ("plain", "tap")


class Alternating:
    """The loops with the tap and without, and what they took."""

    def __init__(self, loops: Loops, tap: tapped.Tap) -> None:
        self.loops, self.tap = loops, tap
        self.got = self._nothing()
        self.drain = 0.0  # the longest time that the daemon needed behind a loop

    @staticmethod
    def _nothing() -> dict[str, dict[str, list[float]]]:
        return {m: {"prefill": [], "decode": [], "step": [], "processor": []} for m in MODES}

    def forget(self) -> None:
        self.got = self._nothing()

    @contextlib.contextmanager
    def _mode(self, mode: str) -> Iterator[None]:
        loops, tap = self.loops, self.tap
        rows, requests = loops.rows, loops.requests
        if mode == "tap":
            tap.resume()
        else:
            tap.pause()
        yield
        if mode == "tap":
            self.drain = max(self.drain, settle(tap))
        else:
            loops.rows, loops.requests = rows, requests

    def prefill(self, mode: str, passes: int) -> None:
        with self._mode(mode):
            self.loops.prefill(1)
            self.got[mode]["prefill"].append(self.loops.prefill(passes))

    def decode(self, mode: str, new: int) -> None:
        with self._mode(mode):
            began: list[float] = []
            steps = self.loops.decode(new, lambda step: began.append(time.process_time()) if step == 0 else None)
            self.got[mode]["processor"].append((time.process_time() - began[0]) / (new - 1))
            self.got[mode]["step"] += steps
            self.got[mode]["decode"].append(self.loops.a.batch * new / sum(steps))


def overhead(a: argparse.Namespace, model: Any, states: list[int], out: str | None, rounds: int, passes: int) -> dict[str, Any]:
    loops = Loops(a, model)
    daemon = Daemon(a, states, out)
    tap = tapped.attach(model, daemon.socket, label="random", ring_bytes=a.ring_bytes, staging_bytes=a.staging_bytes, wait=60)
    session = tap.client.session
    if session is None:
        raise SystemExit(f"no connection to the daemon: {daemon.end()}")
    bulk = Bulk(session.ring, 64 << 20)
    loop = Alternating(loops, tap)
    for mode in MODES:  # warms up
        loop.prefill(mode, 1)
        loop.decode(mode, a.new)
    loop.forget()
    for n in range(rounds):  # the order turns, so that no mode is always first
        order = MODES if n % 2 == 0 else MODES[::-1]
        for mode in order:
            loop.prefill(mode, passes)
        for mode in (order + order[::-1]) * a.turns:
            loop.decode(mode, a.new)
        say(round=n, **{m: {k: [round(x, 1) for x in loop.got[m][k][-(1 if k == "prefill" else 2 * a.turns):]] for k in ("prefill", "decode")} for m in MODES})
    got, waits = loop.got, loop.drain
    tap.resume()
    result: dict[str, Any] = {"reader": daemon.gpu(), "staging_mib": tap._staging.most >> 20 if tap._staging is not None else 0, "ring_pinned": session.ring.pinned}
    if tap._staging is not None:
        result["congestions"] = tap._staging.waits
    theirs = tap.close()
    ours = tap.client.counts()
    result["daemon"] = daemon.end()
    result["engine_counts"], result["daemon_counts"] = dataclasses.asdict(ours), theirs
    result["fed"] = {"rows": loops.rows, "requests": loops.requests}
    kept = re.search(r"; (\d+) (?:stored|checked and not stored,) with (\d+) tokens", result["daemon"]["said"])
    kept_all = kept is not None and (int(kept[1]), int(kept[2])) == (loops.requests, loops.rows)
    result["equal"] = kept_all and theirs is not None and theirs["rows"] == ours.rows == loops.rows and theirs["steps"] == ours.steps
    for k in ("prefill", "decode"):
        runs = {m: got[m][k] for m in MODES}
        result[k] = {
            **{m: round(statistics.median(runs[m]), 1) for m in MODES},
            "of": round(statistics.median(runs["tap"]) / statistics.median(runs["plain"]), 4),
            "of_means": round(statistics.harmonic_mean(runs["tap"]) / statistics.harmonic_mean(runs["plain"]), 4),
            "runs": len(runs["tap"]), "spread": {m: [round(min(runs[m]), 1), round(max(runs[m]), 1)] for m in MODES},
        }
    result["step_ms"] = {m: {f"p{q}": round(1e3 * statistics.quantiles(got[m]["step"], n=100)[q - 1], 3) for q in (10, 50, 90)} for m in MODES}
    # Of all threads, the tap's among them.
    result["processor_ms_a_step"] = {m: round(1e3 * statistics.median(got[m]["processor"]), 3) for m in MODES}
    result["longest_drain_s"] = round(waits, 3)
    if bulk.rates:
        result["bulk_gb_s"] = round(statistics.median(bulk.rates) / 1e9, 2)
    return result


def killed(a: argparse.Namespace, model: Any, states: list[int]) -> dict[str, Any]:
    """Decoding goes on while the daemon is killed: loops of 2*new steps, in
    the middle of one of which it dies. The halves of a loop are not alike, as
    the cache grows; so the second ones are compared, of loops with the tap's
    hooks off, with a daemon that dies, and with hooks and no daemon."""
    loops = Loops(a, model)
    memory = torch.cuda.memory_allocated() if loops.device.type == "cuda" else 0
    daemon = Daemon(a, states, None)
    tap = tapped.attach(model, daemon.socket, label="random", ring_bytes=a.ring_bytes, staging_bytes=a.staging_bytes, wait=60, retry=5)
    halves: dict[str, list[tuple[float, float]]] = {"plain": [], "killed": [], "hooks": []}
    longest: dict[str, list[float]] = {k: [] for k in halves}

    def kill(step: int) -> None:
        if step == a.new:
            os.kill(daemon.process.pid, signal.SIGKILL)

    tap.pause()
    loops.decode(2 * a.new)  # warms the allocator up for so long a cache
    result: dict[str, Any] = {}
    for kind in ("plain", "killed", "plain", "hooks", "plain", "hooks"):
        if kind == "plain":
            tap.pause()
        else:
            tap.resume()
        steps = loops.decode(2 * a.new, kill if kind == "killed" else None)
        first, second = steps[: a.new], steps[a.new + 1 :]
        halves[kind].append((a.batch * len(first) / sum(first), a.batch * len(second) / sum(second)))
        longest[kind].append(1e3 * max(second))
        if kind == "killed":
            daemon.process.wait()
            with open("/proc/self/maps") as f:
                result["ring_mapped"] = any("memfd:draftscope-tap" in line for line in f)
            result["connected"], result["lost"] = tap.client.connected, tap.client.counts().lost
            if loops.device.type == "cuda":
                result["gpu_bytes_kept"] = torch.cuda.memory_allocated() - memory
    tap.close()
    result["tok_s_by_half"] = {k: [[round(x, 1) for x in pair] for pair in v] for k, v in halves.items()}
    result["longest_step_of_second_half_ms"] = {k: [round(x, 1) for x in v] for k, v in longest.items()}
    return result


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for k, v in dict(
        layers=36, hidden=4096, inter=12288, heads=32, kv=8, vocab=151936, batch=32, prompt=512, decode_prompt=128, new=64,
        passes=3, rounds=3, turns=2, ring_bytes=2 << 30, staging_bytes=2 << 30, memory=32 << 30,
    ).items():
        p.add_argument("--" + k.replace("_", "-"), type=int, default=v)
    p.add_argument("--draftscope", default="bin/draftscope")
    p.add_argument("--device", default="cuda")
    p.add_argument("--out", help="store a dataset here")
    p.add_argument("--kills", type=int, default=0, help="so often, kill a daemon in the middle of decoding, too")
    a = p.parse_args()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=a.vocab, hidden_size=a.hidden, intermediate_size=a.inter, num_hidden_layers=a.layers,
        num_attention_heads=a.heads, num_key_value_heads=a.kv, head_dim=128, max_position_embeddings=8192,
    )
    torch.set_default_dtype(torch.bfloat16)
    build: Any = transformers.Qwen3ForCausalLM  # which has types in some versions only
    with torch.device(a.device):
        model: Any = build(config)
    model.eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    n = a.layers
    states = [round(1 + i * (n - 4) / 4) + 1 for i in range(5)] + [n]
    cuda = a.device == "cuda"
    say(device=torch.cuda.get_device_name() if cuda else "cpu", torch=torch.__version__, transformers=transformers.__version__, states=states, bytes_per_token=len(states) * a.hidden * 2)
    result = overhead(a, model, states, None, a.rounds, a.passes)
    if cuda:
        result["pinned_gb_s"] = round(pinned_rate(torch.device(a.device), 256 << 20) / 1e9, 2)
    say(**result)
    whole = result["equal"]
    if a.out:
        stored = overhead(a, model, states, a.out, 1, 1)
        whole = whole and stored["equal"]
        say(stored=stored)
    for _ in range(a.kills):
        say(kill=killed(a, model, states))
    for k in ("prefill", "decode"):
        print(f"{k:8} {result[k]['plain']:>10} tokens/s, with the tap {result[k]['tap']:>10}: {100 * result[k]['of']:.2f} %")
    print(f"every row accounted for: {whole}; bulk {result.get('bulk_gb_s')} GB/s of pinned {result.get('pinned_gb_s')}")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
