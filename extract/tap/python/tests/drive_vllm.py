"""vLLM as an engine for draftscope's own tests: serves prompts at once and
prints, as one JSON object, what it served.

usage: drive_vllm.py --model DIR --socket PATH --sequences FILE [options]

The model runs in a process of vLLM's own, which prints the counts of its tap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

from driving import arguments, round_of, sequences

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# One thread, bound to no core: the machine is shared with the daemon.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

torch.set_num_threads(1)

from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402


def lie() -> None:
    """Installs the plugin `lying` for the processes that vLLM starts."""
    site = pathlib.Path(tempfile.mkdtemp())
    info = site / "lying-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lying\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nlying = lying:register\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(site))


async def serve(engine: Any, s: dict[str, Any], new: int, patience: int | None, extra: dict[str, Any]) -> dict[str, Any] | None:
    """One request; given up after so many tokens, where patience says so. A
    sequence's own stop strings are the request's."""
    stops = s.get("stop")
    params = SamplingParams(
        temperature=0, max_tokens=new, detokenize=stops is not None, stop=stops, stop_token_ids=[2], extra_args={"draftscope_id": s["id"], **extra}
    )
    prompt = s["input_ids"][: s["prompt_len"]]
    made: list[int] = []
    reason = None
    stream = engine.generate({"prompt_token_ids": prompt}, params, s["id"])
    try:
        async for out in stream:
            made, reason = list(out.outputs[0].token_ids), out.outputs[0].stop_reason
            if patience is not None and len(made) >= patience and not out.finished:
                return None
    finally:
        await stream.aclose()
    return {"id": s["id"], "prompt_len": len(prompt), "input_ids": prompt + made, "stop_reason": reason}


async def main(a: argparse.Namespace) -> None:
    seqs = sequences(a.sequences, a.count)
    rng = random.Random(a.seed)
    options: dict[str, Any] = {"prefix_cache": a.prefix_cache, "ring_bytes": a.ring_bytes}
    more: dict[str, Any] = json.loads(a.engine)
    if a.connector:
        more["kv_transfer_config"] = {
            "kv_connector": "TapConnector", "kv_connector_module_path": "draftscope_tap.vllm", "kv_role": "kv_both",
            "kv_connector_extra_config": {**options, "socket": a.socket},
        }
    else:
        os.environ["DRAFTSCOPE_TAP_SOCKET"] = a.socket
        os.environ["DRAFTSCOPE_TAP_OPTIONS"] = json.dumps(options)
    args = {"model": a.model, "dtype": a.dtype, "skip_tokenizer_init": not any("stop" in s for s in seqs), "max_model_len": 1024, "max_num_seqs": 16, "enforce_eager": True, **more}
    config = AsyncEngineArgs(**args).create_engine_config()
    # vLLM's processes import it once each when they are spawned, as they are
    # by default on a CPU: half a minute of computing for each of two.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    engine = AsyncLLM.from_vllm_config(config)
    start = time.monotonic()
    served: list[dict[str, Any]] = []
    given_up: list[str] = []
    for n in range(a.rounds):
        part = round_of(seqs, n)
        patience = [rng.randint(1, 8) if rng.random() < a.abort else None for _ in part]
        jobs = [serve(engine, s, rng.randint(4, a.new) if a.random else a.new, p, {}) for s, p in zip(part, patience)]
        for s, out in zip(part, await asyncio.gather(*jobs)):
            if out is None:
                given_up.append(s["id"])
            else:
                served.append(out)
    seconds = time.monotonic() - start
    engine.shutdown(timeout=60)  # of the 5 s that it has otherwise, a loaded machine needs more
    print(json.dumps({"served": served, "given_up": given_up, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    p = arguments()
    p.add_argument("--random", action="store_true", help="random numbers of new tokens")
    p.add_argument("--abort", type=float, default=0.0, help="the share of requests that are given up")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--connector", action="store_true", help="the KV connector instead of the plugin by itself")
    p.add_argument("--prefix-cache", default="complete")
    p.add_argument("--ring-bytes", type=int, default=256 << 20)
    p.add_argument("--seed", type=int, default=1)
    if "DRAFTSCOPE_TAP_TEST_LIE" in os.environ:
        lie()
    asyncio.run(main(p.parse_args()))
    sys.exit(0)
