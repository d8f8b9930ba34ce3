#!/usr/bin/env python3
"""The drafter stage beside PyTorch: same weights, same inputs, one process, one card.

Loads libstage.so (stage.cu), checks that its results agree with the functions of
torch_baseline.py, and times both, eager and compiled, with events and medians.

Usage: python3 stage.py PATH/torch_baseline.py LIB [--cases 2048x32,2048x128,4096x128] [--no-compile]
"""
import argparse, ctypes, importlib.util, json, sys
import torch

ap = argparse.ArgumentParser()
ap.add_argument("baseline"), ap.add_argument("lib")
ap.add_argument("--cases", default="2048x32,2048x128,4096x128")
ap.add_argument("--no-compile", action="store_true")
args = ap.parse_args()
spec = importlib.util.spec_from_file_location("baseline", args.baseline)
tb = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tb)
lib = ctypes.CDLL(args.lib)
lib.stage_new.restype, lib.stage_get.restype, lib.stage_head_bytes.restype = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_long
torch.manual_seed(0)


class View:
    """A device pointer of the library as an array that torch can read."""
    def __init__(self, ptr, shape, kind):
        self.__cuda_array_interface__ = {"data": (ptr, False), "shape": shape, "typestr": kind, "version": 3}


def view(stage, what, shape, kind):
    return torch.as_tensor(View(lib.stage_get(stage, what), shape, kind), device="cuda")


def once(f):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); f(); b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b)


def turns(fs, n=15, warm=4):
    """Medians of several functions that take turns, so that heat meets all alike."""
    for _ in range(warm):
        for f in fs.values():
            f()
    torch.cuda.synchronize()
    t = {k: [] for k in fs}
    for _ in range(n):
        for k, f in fs.items():
            f()  # leave the cache and the clocks as a row of such calls would
            t[k].append(once(f))
    return {k: sorted(v)[n // 2] for k, v in t.items()}


def rel(a, b):
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())


def main():
    m, m2 = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tflops = 2 * 8192 ** 3 / tb.median_ms(lambda: m @ m2) / 1e9
    src = torch.empty(4 << 30, device="cuda", dtype=torch.uint8); dst = torch.empty_like(src)
    tbs = 2 * src.numel() / tb.median_ms(lambda: dst.copy_(src)) / 1e9
    del src, dst, m, m2
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "matmul_tflops": round(tflops, 1), "copy_tb_s": round(tbs, 3)}), flush=True)
    H, V, B = tb.H, tb.V, tb.B
    layers = [tb.Layer() for _ in range(tb.LAYERS)]
    one = lambda n: torch.ones(n, device="cuda", dtype=torch.bfloat16) + 0.1 * torch.randn(n, device="cuda", dtype=torch.bfloat16)
    for l in layers:
        l.qn, l.kn, l.n1, l.n2 = one(tb.HD), one(tb.HD), one(H), one(H)
    fc, hn, norm, W, emb = tb.weight(H, tb.TAPS * H), one(H), one(H), tb.weight(V, H), tb.weight(4096, H)
    compiled = [] if args.no_compile else [torch.compile(f, dynamic=False) for f in (tb.context, tb.draft, tb.head)]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    with torch.inference_mode():
        for case in args.cases.split(","):
            n, a = map(int, case.split("x"))
            taps, cpos = torch.randn(n, tb.TAPS * H, device="cuda", dtype=torch.bfloat16), torch.arange(n, device="cuda")
            anchor = torch.linspace(n // 8, n - B - 2, a, device="cuda").long()
            pos = (anchor[:, None] + torch.arange(B, device="cuda")).reshape(-1)
            x = emb[torch.randint(0, 4096, (a * B,), device="cuda")].contiguous()
            qa, qb = anchor.repeat_interleave(B), torch.arange(a, device="cuda").repeat_interleave(B)
            mask = torch.cat([cpos[None] < qa[:, None], qb[:, None] == qb[None]], 1)[None, None]
            label = torch.randint(0, V, (a * (B - 1),), device="cuda")
            spans = torch.stack([torch.zeros_like(qa), qa, qb * B, qb * B + B], 1).int().contiguous()
            ints = [cpos.int(), pos.int(), label.int()]
            keep = [taps, fc, hn, x, norm, W, *ints, spans]
            for l in layers:
                keep += [l.q, l.k, l.v, l.o, l.gate, l.up, l.down, l.qn, l.kn, l.n1, l.n2]
            torch.cuda.synchronize()
            stage = ctypes.c_void_p(lib.stage_new(ctypes.c_long(n), ctypes.c_long(a), (ctypes.c_uint64 * len(keep))(*[t.data_ptr() for t in keep])))
            launch = lambda part: lib.stage_launch(stage, part, stream)
            # --- agreement ---
            launch(3); torch.cuda.synchronize()
            M = a * (B - 1)
            z = view(stage, 0, (M, H // 2), "<i4").view(torch.bfloat16)
            lse, logits, ids, ll = view(stage, 1, (M,), "<f4"), view(stage, 2, (M, 8), "<f4"), view(stage, 3, (M, 8), "<i4"), view(stage, 4, (M,), "<f4")
            kv = tb.context(taps, cpos, fc, hn, layers)
            mine = view(stage, 6, (n, tb.LAYERS, 2, tb.KVH, tb.HD // 2), "<i4").view(torch.bfloat16).view(n, tb.LAYERS, 2, tb.KVH, tb.HD)
            gap_k = max(rel(mine[:, i, 0].transpose(0, 1), kv[i][0]) for i in range(tb.LAYERS))
            gap_v = max(rel(mine[:, i, 1].transpose(0, 1), kv[i][1]) for i in range(tb.LAYERS))
            take = lambda d: d.view(a, B, H)[:, 1:].reshape(-1, H).contiguous()
            ref = take(tb.draft(x, pos, mask, kv, layers, norm))
            # The head is judged on our own z, in float32 logits, 64 rows at a time.
            gap_lse = gap_top = 0.0; same = 0
            for i in range(0, min(M, 256), 64):
                lg = torch.cat([(z[i:i + 64].float() @ W[j:j + 32768].float().t()) for j in range(0, V, 32768)], 1)
                r = torch.logsumexp(lg.double(), -1)
                top, tid = lg.topk(8, -1)
                gap_lse = max(gap_lse, float((lse[i:i + 64].double() - r).abs().max()))
                gap_top = max(gap_top, float((logits[i:i + 64] - top).abs().max()), float((lg.gather(1, ids[i:i + 64].long()) - top).abs().max()))
                gap_top = max(gap_top, float((ll[i:i + 64] - lg.gather(1, label[i:i + 64, None])[:, 0]).abs().max()))
                same += int((tid == ids[i:i + 64]).sum())
            agree = {"k": gap_k, "v": gap_v, "z": rel(z, ref), "lse": gap_lse, "top": gap_top, "same_ids": same / (min(M, 256) * 8)}
            # bf16 results of another order of roundings: percents at z, after five layers.
            ok = gap_k < 1e-2 and gap_v < 1e-2 and agree["z"] < 4e-2 and gap_lse < 1e-3 and gap_top < 1e-3
            # --- times ---
            zt = ref
            r = {"ctx": n, "anchors": a, "agrees": ok, **{k: float(f"{v:.2e}") for k, v in agree.items()}}
            c, d, h = compiled if compiled else (None, None, None)
            for name, part, eager, comp in (
                    ("context", 0, lambda: tb.context(taps, cpos, fc, hn, layers), lambda: c(taps, cpos, fc, hn, layers)),
                    ("draft", 1, lambda: tb.draft(x, pos, mask, kv, layers, norm), lambda: d(x, pos, mask, kv, layers, norm)),
                    ("head", 2, lambda: tb.head(zt, W, label), lambda: h(zt, W, label))):
                # As torch_baseline.py does: each by itself, 15 in a row.
                fs = {"ours": lambda: launch(part), "eager": eager}
                if compiled:
                    fs["compiled"] = comp
                for k, f in fs.items():
                    r[f"{name}_{k}_ms"] = tb.median_ms(f)
            r["head_matmul_ms"] = tb.median_ms(lambda: zt @ W.t())
            t = turns({"head": lambda: launch(2), "matmul": lambda: zt @ W.t()})
            r["head_in_turns_ms"], r["matmul_in_turns_ms"] = t["head"], t["matmul"]
            # The three together, 15 in a row: long enough for the power cap to set the clock.
            r["row_ours_ms"] = tb.median_ms(lambda: launch(3))
            if compiled:
                r["row_compiled_ms"] = tb.median_ms(lambda: (c(taps, cpos, fc, hn, layers), d(x, pos, mask, kv, layers, norm), h(zt, W, label)))
                torch.cuda.reset_peak_memory_stats(); base = torch.cuda.memory_allocated(); h(zt, W, label); torch.cuda.synchronize()
                r["head_compiled_extra_gb"] = (torch.cuda.max_memory_allocated() - base) / 1e9
            flop = {"context": 2 * n * (tb.TAPS * H * H + tb.LAYERS * 2 * H * tb.KVH * tb.HD),
                    "draft": tb.LAYERS * 2 * a * B * (H * tb.QH * tb.HD * 2 + H * tb.KVH * tb.HD * 2 + 3 * H * tb.FF)
                    + tb.LAYERS * 4 * tb.QH * tb.HD * B * int((anchor + B).sum()), "head": 2 * a * (B - 1) * H * V}
            byte = {"context": 2 * (tb.TAPS * H * H + tb.LAYERS * 2 * H * tb.KVH * tb.HD + n * tb.TAPS * H),
                    "draft": 2 * tb.LAYERS * (2 * H * tb.QH * tb.HD + 2 * H * tb.KVH * tb.HD + 3 * H * tb.FF), "head": 2 * V * H}
            floor = {k: max(flop[k] / tflops / 1e9, byte[k] / tbs / 1e9) for k in flop}
            total = sum(floor.values())
            for k in floor:
                r[f"{k}_floor_ms"] = floor[k]
            part_sum = lambda tag: sum(r[f"{k}_{tag}_ms"] for k in floor)
            r["ours_over_floor"], r["eager_over_ours"] = part_sum("ours") / total, part_sum("eager") / part_sum("ours")
            r["row_ours_over_floor"] = r["row_ours_ms"] / total
            if compiled:
                r["compiled_over_floor"], r["compiled_over_ours"] = part_sum("compiled") / total, part_sum("compiled") / part_sum("ours")
                r["row_compiled_over_ours"] = r["row_compiled_ms"] / r["row_ours_ms"]
            r["head_in_turns_over_matmul"] = t["head"] / t["matmul"]
            r["head_over_matmul"] = r["head_ours_ms"] / r["head_matmul_ms"]
            r["head_extra_memory_gb"] = lib.stage_head_bytes(stage) / 1e9
            print(json.dumps({k: round(v, 6 if "e-" in str(v) else 3) if isinstance(v, float) else v for k, v in r.items()}), flush=True)
            lib.stage_shares(stage)
            lib.stage_free(stage)
            torch.cuda.empty_cache()


main()
