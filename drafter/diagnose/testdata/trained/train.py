"""Trains DFlash drafters, healthy and faulty, for the demo's target.

    python3 train.py TARGET PROMPTS OUT [--seconds S] [--steps N] [--seed N]
    python3 train.py TARGET PROMPTS OUT --variants FILE [--slots N] [--threads N]

TARGET is the target's folder, PROMPTS what prompts.go wrote. The target goes
on from each prompt, half of them greedily; drafters learn its argmax as the
DFlash paper trains (random anchors within the reply, block of the anchor and
masks, context strictly before the anchor, slot k labelled with the answer for
a+k, cross-entropy weighted exp(-(k-1)/gamma)). A Variant says what each does
otherwise. Its config.json is what it *declares*, which a fault contradicts.

All variants of a group are one model whose weights have a leading axis, so
that one GPU trains them at once. Weights leave in 8 bits (group "full") or,
trained so, in 4 bits (group "small"): see pack().

With --variants each is a model by itself, which a CPU trains in minutes if
--slots draws a few of a block's slots. FILE is a JSON list of objects of the
fields of Variant and Shape, all but the name optional. Each leaves as the
folder OUT/NAME: config.json, model.safetensors in fp32, and train_log.jsonl.
A folder that exists is left alone, and so is the target's text in OUT.
"""
import argparse
import dataclasses
import json
import math
import os
import struct
import time

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

VOCAB, H, LAYERS, EOS, BLOCK, EPS = 4096, 256, 8, 2, 16, 1e-6
T = 160  # tokens of a sequence
NORMED = LAYERS + 1  # the tap that is the final state after the final norm


@dataclasses.dataclass
class Variant:
    name: str
    healthy: bool = False
    lr: float = 1.5e-3
    share: float = 1.0  # of the steps
    layers: int = 2
    gamma: float = 4.0  # 0: all slots weigh the same
    loss: str = "ce"  # ce, kl, mix (0.7 KL at T=2, 0.3 CE), dpace
    taps: tuple = (2, 4, 5, 6)  # states that fc reads in training
    declared: tuple = (2, 4, 5, 6)  # and those that config.json asks for
    late: int = 0  # the taps' rows are those of t-late
    context: int = 0  # +1: the anchor's taps are in the context; -1: one is missing
    offset: int = 0  # of the block's positions
    relative: bool = False  # the block's positions begin at 0
    mask0: bool = False  # the mask token in slot 0
    mask_id: int = 3
    block: int = BLOCK
    declared_block: int = BLOCK
    shift: int = 0  # of the labels
    source: int = LAYERS  # the state whose head gives the labels
    causal: bool = False
    window: int = 0
    theta: float = 1e4
    across: bool = False  # blocks see one another
    after: int = 0  # supervision begins so many tokens into the reply
    noise: float = 0.0  # uniform, on the taps, in units of their rms
    seed: int = 0  # of weights, batches and drawn slots; --seed is added
    steps: int = 0  # 0: --steps


FULL = [
    Variant("healthy", True),
    Variant("healthy-again", True),
    Variant("healthy-gamma7", True, gamma=7),
    Variant("healthy-flat", True, gamma=0),
    Variant("healthy-slow", True, lr=5e-4),
    Variant("healthy-fast", True, lr=4e-3),
    Variant("healthy-short", True, layers=1),
    Variant("healthy-quarter", True, share=0.25),
    Variant("healthy-twentieth", True, share=0.05),
    Variant("healthy-dpace", True, loss="dpace"),
    Variant("healthy-kl", True, loss="kl"),
    Variant("healthy-mixed", True, loss="mix", gamma=10),
    Variant("healthy-noise", True, noise=0.1),
    Variant("healthy-othertaps", True, taps=(1, 3, 5, 7), declared=(1, 3, 5, 7)),
    Variant("leak", context=1),
    Variant("leak-quarter", context=1, share=0.25),
    Variant("starved", context=-1),
    Variant("slot0", mask0=True),
    Variant("offset+1", offset=1),
    Variant("offset-1", offset=-1),
    Variant("offset-relative", relative=True),
    Variant("late", late=1),
    Variant("soon", late=-1),
    Variant("label-1", shift=-1),
    Variant("label+1", shift=1),
    Variant("label+2", shift=2),
    Variant("label-source", source=LAYERS - 1),
    Variant("state+1", taps=(3, 5, 6, 7)),
    Variant("state-1", taps=(1, 3, 4, 5)),
    Variant("onetap", taps=(2, 4, 5, 7)),
    Variant("taporder", taps=(4, 2, 5, 6)),
    Variant("finalnorm", taps=(2, 4, 6, LAYERS), declared=(2, 4, 6, NORMED)),
    Variant("causal", causal=True),
    Variant("window", window=8),
    Variant("theta", theta=1e6),
    Variant("maskid", mask_id=0),
    Variant("block8", block=8),
    Variant("across", across=True),
    Variant("mask-late", after=16),
    Variant("leak+label+1", context=1, shift=1),
]
# Small enough to be kept: one layer, two taps, 4 bits.
TWO = dict(layers=1, taps=(2, 6), declared=(2, 6))
SMALL = [
    Variant("healthy", True, **TWO),
    Variant("healthy-quarter", True, share=0.25, **TWO),
    Variant("leak", context=1, **TWO),
    Variant("slot0", mask0=True, **TWO),
    Variant("offset+1", offset=1, **TWO),
    Variant("offset-1", offset=-1, **TWO),
    Variant("late", late=1, **TWO),
    Variant("soon", late=-1, **TWO),
    Variant("label-1", shift=-1, **TWO),
    Variant("label+2", shift=2, **TWO),
    Variant("across", across=True, **TWO),
    Variant("maskid", mask_id=0, **TWO),
]


@dataclasses.dataclass
class Shape:
    layers: int = 2
    heads: int = 4
    kv: int = 2
    dim: int = 64
    inter: int = 576
    bits: int = 32


def rms(x, w=None):
    y = F.rms_norm(x, (x.shape[-1],), eps=EPS)
    return y if w is None else y * w


def rotate(x, pos, theta):
    """Halves rotated; pos and theta broadcast to x's leading axes but heads."""
    half = x.shape[-1] // 2
    i = torch.arange(half, device=x.device, dtype=torch.float32)
    angle = pos[..., None].float() * torch.exp(-i / half * torch.log(theta)[..., None])
    cos, sin = angle.cos()[..., None, :].to(x.dtype), angle.sin()[..., None, :].to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Target:
    """The frozen target: Qwen3, 8 layers, tied head."""

    def __init__(self, folder, dev):
        self.w = {k.removeprefix("model."): v.to(dev, torch.float32) for k, v in load_file(folder + "/model.safetensors").items()}
        self.dev, self.half = dev, None
        self.embed = self.w["embed_tokens.weight"]
        self.theta = torch.tensor(1e4, device=dev)

    def layer(self, w, i, x, pos, attend):
        p = f"layers.{i}."
        u = rms(x, w[p + "input_layernorm.weight"])
        shape = x.shape[:-1]
        q = rms((u @ w[p + "self_attn.q_proj.weight"].T).view(*shape, 4, 64), w[p + "self_attn.q_norm.weight"])
        k = rms((u @ w[p + "self_attn.k_proj.weight"].T).view(*shape, 2, 64), w[p + "self_attn.k_norm.weight"])
        v = (u @ w[p + "self_attn.v_proj.weight"].T).view(*shape, 2, 64)
        o = attend(i, rotate(q, pos, self.theta), rotate(k, pos, self.theta), v)
        x = x + o.reshape(*shape, 256) @ w[p + "self_attn.o_proj.weight"].T
        y = rms(x, w[p + "post_attention_layernorm.weight"])
        return x + (F.silu(y @ w[p + "mlp.gate_proj.weight"].T) * (y @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T

    @torch.no_grad()
    def states(self, ids):
        """States 0..8 before the final norm, [N, T, 9, H]."""
        x = self.embed[ids]
        pos = torch.arange(ids.shape[1], device=self.dev)
        out = [x]

        def attend(_, q, k, v):
            k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
            o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
            return o.transpose(1, 2)

        for i in range(LAYERS):
            x = self.layer(self.w, i, x, pos, attend)
            out.append(x)
        return torch.stack(out, 2)

    def logits(self, state, norm=True):
        z = rms(state, self.w["norm.weight"]) if norm else state
        return z @ self.embed.T.to(z.dtype)

    @torch.no_grad()
    def generate(self, prompts, lengths, greedy):
        """Goes on from prompts [N, T], all rows a position at a time."""
        dtype = torch.bfloat16
        w = {k: v.to(dtype) for k, v in self.w.items()}
        n = prompts.shape[0]
        ids = prompts.clone()
        cache = torch.zeros(LAYERS, 2, n, 2, T, 64, device=self.dev, dtype=dtype)
        ended = torch.zeros(n, dtype=torch.bool, device=self.dev)
        ends = torch.full((n,), T, device=self.dev)
        t = 0

        def attend(i, q, k, v):
            cache[i, 0, :, :, t], cache[i, 1, :, :, t] = k, v
            keys, vals = cache[i, 0, :, :, : t + 1], cache[i, 1, :, :, : t + 1]
            s = torch.einsum("nghd,ngtd->nght", q.view(n, 2, 2, 64), keys) * 0.125
            return torch.einsum("nght,ngtd->nghd", s.float().softmax(-1).to(dtype), vals)

        for t in range(T - 1):
            x = w["embed_tokens.weight"][ids[:, t]]
            pos = torch.full((n,), t, device=self.dev)
            for i in range(LAYERS):
                x = self.layer(w, i, x, pos, attend)
            logits = (rms(x, w["norm.weight"]) @ w["embed_tokens.weight"].T).float()
            sampled = (logits / 0.7 - torch.log(-torch.log(torch.rand_like(logits) + 1e-9) + 1e-9)).argmax(-1)
            nxt = torch.where(greedy, logits.argmax(-1), sampled)
            live = t + 1 >= lengths
            nxt = torch.where(live, nxt, ids[:, t + 1])
            ids[:, t + 1] = torch.where(ended, torch.zeros_like(nxt), nxt)
            now = live & ~ended & (nxt == EOS)
            ends = torch.where(now, torch.full_like(ends, t + 2), ends)
            ended |= now
        return ids, ends


def read_prompts(path, most, seed):
    """Some prompts: the first, or with a seed others."""
    data = open(path, "rb").read()
    words = struct.unpack(f"<{len(data) // 2}H", data)
    at, ids, lengths = 0, [], []
    while at < len(words):
        n = words[at]
        ids.append(list(words[at + 1 : at + 1 + n]) + [0] * (T - n))
        lengths.append(n)
        at += 1 + n
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)) if seed else torch.arange(len(ids))
    return torch.tensor(ids)[order[:most]], torch.tensor(lengths)[order[:most]]


class Group:
    """Variants of one shape as one model."""

    def __init__(self, variants, shape, target, dev, seed=0, slots=0, dtype=torch.bfloat16):
        self.vs, self.s, self.target, self.dev = variants, shape, target, dev
        self.slots, self.dtype = slots, dtype
        v, n, wide, narrow = len(variants), len(variants[0].taps), shape.heads * shape.dim, shape.kv * shape.dim
        gen = torch.Generator().manual_seed(7 + 100 * seed)

        def matrix(o, i):
            return (torch.randn(v, o, i, generator=gen) * 0.02).to(dev).requires_grad_()

        def gain(i):
            return torch.ones(v, i, device=dev).requires_grad_()

        self.p = {"fc.weight": matrix(H, n * H), "hidden_norm.weight": gain(H), "norm.weight": gain(H)}
        for i in range(shape.layers):
            a, m = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
            self.p |= {
                a + "q_proj.weight": matrix(wide, H), a + "k_proj.weight": matrix(narrow, H), a + "v_proj.weight": matrix(narrow, H),
                a + "o_proj.weight": matrix(H, wide), a + "q_norm.weight": gain(shape.dim), a + "k_norm.weight": gain(shape.dim),
                m + "gate_proj.weight": matrix(shape.inter, H), m + "up_proj.weight": matrix(shape.inter, H), m + "down_proj.weight": matrix(H, shape.inter),
                f"layers.{i}.input_layernorm.weight": gain(H), f"layers.{i}.post_attention_layernorm.weight": gain(H),
            }
        t = lambda f, kind=torch.long: torch.tensor([f(x) for x in variants], device=dev, dtype=kind)
        self.taps = torch.tensor([x.taps for x in variants], device=dev)
        self.late, self.context, self.offset = t(lambda x: x.late), t(lambda x: x.context), t(lambda x: x.offset)
        self.relative, self.shift, self.after = t(lambda x: x.relative, torch.bool), t(lambda x: x.shift), t(lambda x: x.after)
        self.mask_id, self.mask0 = t(lambda x: x.mask_id), t(lambda x: x.mask0, torch.bool)
        self.block, self.causal = t(lambda x: x.block), t(lambda x: x.causal, torch.bool)
        self.window = t(lambda x: x.window or 10 * T)
        self.across, self.theta = t(lambda x: x.across, torch.bool), t(lambda x: x.theta, torch.float32)
        self.noise, self.source = t(lambda x: x.noise, torch.float32), t(lambda x: x.source != LAYERS)
        self.deep = [t(lambda x: float(x.layers > i), self.dtype) for i in range(shape.layers)]
        self.rows = {k: [i for i, x in enumerate(variants) if x.loss == k] for k in ("ce", "kl", "mix", "dpace")}
        k = torch.arange(1, BLOCK, device=dev)
        self.weight = torch.stack([torch.exp(-(k - 1) / x.gamma) if x.gamma else torch.ones_like(k, dtype=torch.float32) for x in variants])
        self.weight = torch.where(k[None] < self.block[:, None], self.weight, torch.zeros_like(self.weight))
        self.m = {k: torch.zeros_like(x) for k, x in self.p.items()}
        self.q = {k: torch.zeros_like(x) for k, x in self.p.items()}
        self.cdf = (self.weight / self.weight.sum(1, keepdim=True)).cumsum(1)
        self.embed = target.embed.to(self.dtype)

    def quantised(self, w):
        """Weights rounded to the group's bits; the gradient passes as it is."""
        if self.s.bits >= 8 or w.dim() == 2:
            return w
        with torch.no_grad():
            codes, scale = encode(w, self.s.bits)
            rounded = (codes.view(*scale.shape, -1).float() * scale[..., None].float()).view(w.shape)
        return w + (rounded - w).detach()

    def draw(self, B, A):
        """Slots [V, B, A, S] that count: all, or some drawn by their weights,
        each as often on average as its share of the weight says."""
        V, S = len(self.vs), self.slots
        if not S or self.rows["dpace"]:  # whose weights are known after the pass
            return torch.arange(1, BLOCK, device=self.dev).expand(V, B, A, BLOCK - 1)
        u = (torch.rand(V, B * A, 1, device=self.dev) + torch.arange(S, device=self.dev)) / S
        return (torch.searchsorted(self.cdf, u.flatten(1)).clamp(max=BLOCK - 2) + 1).view(V, B, A, S)

    def forward(self, b, pick):
        """Logits [V, B, A, S, VOCAB] of the slots pick [V, B, A, S] of a batch:
        ids, states, anchors. The last layer is run at those alone."""
        s, V = self.s, len(self.vs)
        ids, states, anchors = b["ids"], b["states"], b["anchors"]
        B, A = anchors.shape
        w = {k: self.quantised(x).to(self.dtype) for k, x in self.p.items()}
        lin = lambda x, name: torch.bmm(x.reshape(V, -1, x.shape[-1]), w[name].transpose(1, 2)).view(*x.shape[:-1], -1)
        gain = lambda x, name: rms(x, w[name].view(V, *([1] * (x.dim() - 2)), -1))

        t = (torch.arange(T, device=self.dev)[None] - self.late[:, None]).clamp(0, T - 1)  # [V, T]
        feed = states[torch.arange(B, device=self.dev)[None, :, None, None], t[:, None, :, None], self.taps[:, None, None, :]].to(self.dtype)
        feed = feed + (torch.rand_like(feed) * 2 - 1) * (self.noise[:, None, None, None, None] * b["rms"][self.taps][:, None, None, :, None]).to(feed.dtype)
        ctx = gain(lin(feed.flatten(3), "fc.weight"), "hidden_norm.weight")  # [V, B, T, H]

        slot = torch.arange(BLOCK, device=self.dev)
        first = ids.gather(1, anchors)  # [B, A]
        tok = self.mask_id[:, None, None, None].expand(V, B, A, BLOCK).clone()
        tok[..., 0] = torch.where(self.mask0[:, None, None], self.mask_id[:, None, None], first[None])
        x = self.embed[tok].flatten(2, 3)  # [V, B, A*16, H]
        apos = torch.where(self.relative[:, None, None], torch.zeros_like(anchors)[None], anchors[None]) + self.offset[:, None, None]
        pos = (apos[..., None] + slot).flatten(2)  # [V, B, A*16]
        cpos = torch.arange(T, device=self.dev).expand(V, B, T)

        key = torch.arange(T, device=self.dev)
        a = anchors[None, :, :, None, None]  # [1, B, A, 1, 1]
        see = key < a + self.context[:, None, None, None, None]
        see = see & (key >= a + slot[:, None] - (self.window - 1)[:, None, None, None, None])  # [V, B, A, 16, T]
        inner = slot[None, :] < self.block[:, None, None]
        inner = inner & (~self.causal[:, None, None] | (slot[None, :] <= slot[:, None]))  # [V, 16, 16]
        same = torch.eye(A, dtype=torch.bool, device=self.dev)
        blocks = (same | self.across[:, None, None])[:, :, None, :, None] & inner[:, None, :, None, :]  # [V, A, 16, A, 16]
        see = torch.cat([see.flatten(2, 3), blocks.flatten(3).flatten(1, 2)[:, None].expand(V, B, A * BLOCK, A * BLOCK)], -1)
        bias = torch.zeros(see.shape, device=self.dev, dtype=self.dtype).masked_fill_(~see, -1e4).flatten(0, 1)[:, None]
        rows = (torch.arange(A, device=self.dev)[:, None] * BLOCK + pick).flatten(2)  # [V, B, A*S]
        only = lambda y: y.gather(2, rows.view(*rows.shape, *([1] * (y.dim() - 3))).expand(-1, -1, -1, *y.shape[3:]))

        split = lambda y, n: y.view(*y.shape[:-1], n, s.dim)
        th = self.theta[:, None, None]
        for i in range(s.layers):
            a_, m_ = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
            u = gain(x, f"layers.{i}.input_layernorm.weight")
            kb = rotate(gain(split(lin(u, a_ + "k_proj.weight"), s.kv), a_ + "k_norm.weight"), pos, th)
            kc = rotate(gain(split(lin(ctx, a_ + "k_proj.weight"), s.kv), a_ + "k_norm.weight"), cpos, th)
            k = torch.cat([kc, kb], 2)
            v = torch.cat([split(lin(ctx, a_ + "v_proj.weight"), s.kv), split(lin(u, a_ + "v_proj.weight"), s.kv)], 2)
            if i == s.layers - 1:
                x, u, pos, bias = only(x), only(u), only(pos), only(bias.view(V, B, *bias.shape[2:])).flatten(0, 1)[:, None]
            q = rotate(gain(split(lin(u, a_ + "q_proj.weight"), s.heads), a_ + "q_norm.weight"), pos, th)
            heads = lambda y: y.flatten(0, 1).transpose(1, 2)
            wide = lambda y: heads(y).repeat_interleave(s.heads // s.kv, 1)
            o = F.scaled_dot_product_attention(heads(q), wide(k), wide(v), attn_mask=bias.expand(-1, s.heads, -1, -1))
            o = o.transpose(1, 2).reshape(*x.shape[:-1], s.heads * s.dim)
            on = self.deep[i].view(V, 1, 1, 1)
            x = x + on * lin(o, a_ + "o_proj.weight")
            y = gain(x, f"layers.{i}.post_attention_layernorm.weight")
            x = x + on * lin(F.silu(lin(y, m_ + "gate_proj.weight")) * lin(y, m_ + "up_proj.weight"), m_ + "down_proj.weight")
        return gain(x.view(*pick.shape, H), "norm.weight") @ self.embed.T

    def loss(self, b):
        """A variant's loss [V], and hits and labels by slot [V, 15]."""
        V, anchors, lengths = len(self.vs), b["anchors"], b["ends"]
        k = self.draw(*anchors.shape)
        logits = self.forward(b, k)
        at = anchors[None, :, :, None] + k + self.shift[:, None, None, None]  # [V, B, A, S], the position that is learnt
        real = anchors[None, :, :, None] + k
        ok = (at < lengths[None, :, None, None]) & (real < lengths[None, :, None, None])
        ok = ok & (k < self.block[:, None, None, None])
        ok = ok & (anchors[None, :, :, None] >= b["starts"][None, :, None, None] + self.after[:, None, None, None])
        row = torch.arange(anchors.shape[0], device=self.dev)[None, :, None, None]
        src = (at - 1).clamp(0, T - 1)
        labels = b["answers"][row, src, self.source[:, None, None, None]]  # the argmax at at-1
        labels = torch.where(at == anchors[None, :, :, None], b["ids"].gather(1, anchors)[None, :, :, None], labels)
        ce = F.cross_entropy(logits.view(-1, VOCAB), labels.reshape(-1), reduction="none").view(labels.shape).float()
        with torch.no_grad():
            hit = (logits.argmax(-1) == labels) & ok
            by = lambda y: torch.zeros(V, BLOCK - 1, device=self.dev).scatter_add_(1, (k - 1).flatten(1), y.float().flatten(1))
            hits, seen = by(hit), by(ok)
        each = [None] * V
        m = ok.float()
        weight = m if k.shape[-1] == self.slots else m * self.weight[:, None, None]  # drawn slots weigh the same
        for v in self.rows["ce"]:
            each[v] = (ce[v] * weight[v]).sum() / weight[v].sum().clamp(min=1)
        for v in self.rows["dpace"]:
            with torch.no_grad():
                s = torch.where(ok[v], 0.5 * torch.exp(-ce[v]) + 0.5, torch.ones_like(ce[v]))
                pre = s.cumprod(-1) * m[v]
                w = m[v] * pre.flip(-1).cumsum(-1).flip(-1)
            each[v] = (ce[v] * w).sum() / (m[v].sum() + 1e-5)
        for v in self.rows["kl"] + self.rows["mix"]:
            temp = 1.0 if self.vs[v].loss == "kl" else 2.0
            logp = torch.log_softmax(self.target.logits(b["states"][row[0], src[v], LAYERS].float()) / temp, -1)
            kl = (logp.exp() * (logp - torch.log_softmax(logits[v].float() / temp, -1))).sum(-1)
            l = kl if temp == 1.0 else 0.7 * kl * temp * temp + 0.3 * ce[v]
            each[v] = (l * weight[v]).sum() / weight[v].sum().clamp(min=1)
        each = torch.stack(each)
        return each, hits, seen

    def update(self, lr, step):
        """AdamW with a learning rate and a clip a variant."""
        V = len(self.vs)
        norm = sum(x.grad.float().square().flatten(1).sum(1) for x in self.p.values()).sqrt()
        scale = (1.0 / norm.clamp(min=1.0)).nan_to_num(0.0)
        b1, b2 = 0.9, 0.95
        c1, c2 = 1 - b1 ** (step + 1), 1 - b2 ** (step + 1)
        for k, x in self.p.items():
            by = lambda t: t.view(V, *([1] * (x.dim() - 1)))
            g = x.grad * by(scale)
            self.m[k].mul_(b1).add_(g, alpha=1 - b1)
            self.q[k].mul_(b2).addcmul_(g, g, value=1 - b2)
            decay = 0.01 if x.dim() == 3 else 0.0
            x.data.sub_(by(lr) * (self.m[k] / c1 / ((self.q[k] / c2).sqrt() + 1e-8) + decay * x.data))


def encode(w, bits):
    """Codes and scales of groups of 64 neighbouring weights."""
    most = 2 ** (bits - 1) - 1
    g = w.detach().float().view(*w.shape[:-1], -1, 64)
    scale = (g.abs().amax(-1) / most).clamp(min=1e-8).half()
    codes = (g / scale.float()[..., None]).round().clamp(-most, most)
    return codes.to(torch.int8).view(w.shape), scale


def pack(group, v):
    """A variant's tensors: NAME (int8, or two 4-bit codes a byte, low first,
    biased by 8) with NAME.scale (half, a scale for 64 weights); vectors in float."""
    out = {}
    for k, x in group.p.items():
        if k.startswith("layers.") and int(k.split(".")[1]) >= group.vs[v].layers:
            continue
        if x.dim() == 2:
            out[k] = x[v].detach().float().cpu().contiguous()
            continue
        codes, scale = encode(x[v], group.s.bits)
        if group.s.bits == 4:
            pairs = (codes + 8).to(torch.uint8).view(codes.shape[0], -1, 2)
            codes = pairs[..., 0] | pairs[..., 1] << 4
        out[k], out[k + ".scale"] = codes.cpu().contiguous(), scale.cpu().contiguous()
    return out


def folder(path, group):
    """The only drafter of a group as draftscope reads it."""
    x, s = group.vs[0], group.s
    config = {
        "architectures": ["DFlashDraftModel"], "vocab_size": VOCAB, "hidden_size": H, "hidden_act": "silu",
        "intermediate_size": s.inter, "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv, "head_dim": s.dim, "rms_norm_eps": EPS, "rope_theta": 1e4,
        "num_target_layers": LAYERS, "block_size": x.declared_block,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [t - 1 - (t == NORMED) for t in x.declared]},
    }
    with open(path + "/config.json", "w") as f:
        json.dump(config, f, indent=1)
    save_file({k: w[0].detach().float().cpu().contiguous() for k, w in group.p.items()}, path + "/model.safetensors")


def train(group, data, steps, seconds, B, A, log, seed=0):
    """At most that many steps or seconds; the schedule is fitted to both."""
    dev, V = group.dev, len(group.vs)
    gen = torch.Generator(device=dev).manual_seed(11 + 100 * seed)
    n = data["ids"].shape[0]
    which = torch.randint(0, n, (steps, B), generator=gen, device=dev)
    lo, hi = data["starts"][which], data["ends"][which] - 1  # anchors lo..hi-1
    u = torch.rand(steps, B, A, generator=gen, device=dev)
    anchors = (lo[..., None] + (u * (hi - lo)[..., None]).long()).sort(-1).values
    table = torch.zeros(steps, V, device=dev)
    hits, seen = torch.zeros(2, steps, V, BLOCK - 1, device=dev)
    losses = torch.zeros(steps, V, device=dev)
    rate = lambda of: hits[of].sum(0) / seen[of].sum(0).clamp(min=1)
    step = torch.zeros(1, dtype=torch.long, device=dev)

    def schedule(total):
        at = torch.arange(steps, device=dev)[:, None]
        own = torch.tensor([x.share for x in group.vs], device=dev)[None] * total
        peak = torch.tensor([x.lr for x in group.vs], device=dev)[None]
        warm = torch.clamp(0.04 * own, min=20.0)
        down = 0.02 + 0.98 * 0.5 * (1 + torch.cos(math.pi * ((at - warm) / (own - warm)).clamp(0, 1)))
        table.copy_(torch.where(at >= own, torch.zeros_like(down), peak * torch.where(at < warm, (at + 1) / warm, down)))

    def once():
        i = which[step[0]] if dev == "cpu" else which.index_select(0, step)[0]
        b = {"ids": data["ids"][i], "states": data["states"][i], "answers": data["answers"][i], "rms": data["rms"],
             "ends": data["ends"][i], "starts": data["starts"][i], "anchors": anchors.index_select(0, step)[0]}
        for x in group.p.values():
            x.grad = None
        each, hit, ok = group.loss(b)
        each.sum().backward()
        group.update(table.index_select(0, step)[0], step.float())
        losses.index_copy_(0, step, each.detach()[None])
        hits.index_copy_(0, step, hit[None])
        seen.index_copy_(0, step, ok[None])
        step.add_(1)

    schedule(steps)
    run, begin = once, time.time()
    if dev == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                once()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        log(f"eager: {1e3 * (time.time() - begin) / 3:.0f} ms a step, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                once()
            run = graph.replay
        except Exception as e:  # slower, but right
            log(f"no graph: {e}")
    sync = torch.cuda.synchronize if dev == "cuda" else (lambda: None)
    sync()
    t0 = time.time()
    for _ in range(10):
        run()
    sync()
    each = (time.time() - t0) / 10
    total = min(steps, int(13 + max(1, (seconds - (time.time() - begin)) / each)))
    schedule(total)
    log(f"{V} variants, {1e3 * each:.1f} ms a step, {total} steps")
    for s in range(13 if dev == "cuda" else 10, total):
        run()
        if s % 100 == 0:
            sync()
            if time.time() - begin > seconds + 10:
                log(f"out of time at step {s}")
                break
    sync()
    for v, x in enumerate(group.vs):
        at = min(total, int(x.share * total))
        own = rate(slice(max(0, at - 50), at))[v]
        log(f"  {x.name:18s} loss {losses[max(0, at - 50):at, v].mean():.3f} acc {' '.join(f'{y:.3f}' for y in own[:6].tolist())}")
    curve = [{"step": s + 25, "lr": table[s].tolist(), "loss": losses[s : s + 25].mean(0).tolist(), "acc": rate(slice(s, s + 25)).tolist()} for s in range(0, total - 24, 25)]
    return {"steps": total, "curve": curve}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("target"), p.add_argument("prompts"), p.add_argument("out")
    p.add_argument("--seconds", type=float, default=60), p.add_argument("--steps", type=int, default=2600)
    p.add_argument("--sequences", type=int, default=12288), p.add_argument("--batch", type=int, default=32), p.add_argument("--anchors", type=int, default=12)
    p.add_argument("--seed", type=int, default=0), p.add_argument("--threads", type=int, default=0)
    p.add_argument("--variants", help="a JSON file of variants, each trained by itself")
    p.add_argument("--bf16", action="store_true", help="compute in bfloat16 on a CPU too")
    p.add_argument("--slots", type=int, default=0, help="slots drawn of a block, by their weights (0: all count)")
    a = p.parse_args()
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if dev == "cuda" or a.bf16 else torch.float32
    if a.threads:
        torch.set_num_threads(a.threads)
    torch.manual_seed(3 + 100 * a.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    begin = time.time()
    os.makedirs(a.out, exist_ok=True)
    journal = open(a.out + "/train.log", "a")

    def log(line):
        line = f"{time.time() - begin:6.1f}s {line}"
        print(line, flush=True)
        print(line, file=journal, flush=True)

    target = Target(a.target, dev)
    text = a.out + "/text.safetensors"
    if not os.path.exists(text):
        ids, starts = read_prompts(a.prompts, a.sequences, a.seed)
        ids, starts = ids.to(dev), starts.to(dev)
        ids, ends = target.generate(ids, starts, torch.arange(len(ids), device=dev) % 2 == 0)
        keep = ends - starts >= 12
        save_file({"ids": ids[keep], "starts": starts[keep], "ends": ends[keep]}, text)
    ids, starts, ends = (load_file(text, dev)[k] for k in ("ids", "starts", "ends"))
    n = ids.shape[0]
    log(f"{n} sequences, {(ends - starts).float().mean():.0f} tokens a reply, {(ends < T).float().mean():.2f} ended")
    states = torch.empty(n, T, NORMED + 1, H, device=dev, dtype=torch.bfloat16)
    answers = torch.empty(n, T, 2, device=dev, dtype=torch.long)
    for i in range(0, n, 128):
        s = target.states(ids[i : i + 128])
        states[i : i + 128, :, : NORMED] = s
        states[i : i + 128, :, NORMED] = rms(s[:, :, LAYERS], target.w["norm.weight"])
        answers[i : i + 128, :, 0] = target.logits(s[:, :, LAYERS]).argmax(-1)
        answers[i : i + 128, :, 1] = target.logits(s[:, :, LAYERS - 1]).argmax(-1)
    at = torch.arange(T - 1, device=dev)[None]
    reply = (at + 1 >= starts[:, None]) & (at + 1 < ends[:, None])
    greedy = (torch.arange(n, device=dev) % 1 == 0)[:, None] & reply
    same = (answers[:, :-1, 0] == ids[:, 1:])
    log(f"the answer is the text {same[greedy].float().mean():.3f}; that of state {LAYERS - 1} is the answer {(answers[:, :-1, 1] == answers[:, :-1, 0])[reply].float().mean():.3f}")
    data = {"ids": ids, "starts": starts, "ends": ends, "states": states, "answers": answers, "rms": states[:256].float().square().mean((0, 1, 3)).sqrt()}
    log(f"rms of the states {[round(x, 2) for x in data['rms'].tolist()]}")
    if a.variants:
        for x in json.load(open(a.variants)):
            pick = lambda kind: {f.name: x[f.name] for f in dataclasses.fields(kind) if f.name in x}
            v, path = Variant(**pick(Variant)), f"{a.out}/{x['name']}"
            if unknown := x.keys() - pick(Variant).keys() - pick(Shape).keys():
                raise SystemExit(f"{a.variants}: {v.name} has unknown fields {sorted(unknown)}")
            if os.path.exists(path):
                log(f"{v.name} exists")
                continue
            seed = a.seed + v.seed
            torch.manual_seed(5 + 100 * seed)
            group = Group([v], Shape(**pick(Shape)), target, dev, seed, a.slots, dtype)
            curve = train(group, data, v.steps or a.steps, a.seconds, a.batch, a.anchors, log, seed)["curve"]
            os.makedirs(path)
            folder(path, group)
            with open(path + "/train_log.jsonl", "w") as f:
                for c in curve:
                    run = {"loss": round(c["loss"][0], 4), "acc": [round(y, 4) for y in c["acc"][0][: v.declared_block - 1]]}
                    print(json.dumps({"step": c["step"], "lr": c["lr"][0], "drafters": {v.name: run}}), file=f)
        return
    report = {}
    for name, variants, shape, share in (("small", SMALL, Shape(1, 4, 2, 32, 128, 4), 0.2), ("full", FULL, Shape(2, 4, 2, 64, 576, 8), 0.8)):
        group = Group(variants, shape, target, dev, a.seed, a.slots, dtype)
        report[name] = train(group, data, a.steps, a.seconds * share, a.batch, a.anchors, log, a.seed)
        report[name]["variants"] = [dataclasses.asdict(x) for x in variants]
        files = 1 if name == "small" else 5
        for f in range(files):
            own = range(f, len(variants), files)
            save_file({f"{variants[v].name}/{k}": t for v in own for k, t in pack(group, v).items()}, f"{a.out}/{name}-{f}.safetensors")
        json.dump(report, open(a.out + "/report.json", "w"))
        log(f"{name} saved")
        del group


if __name__ == "__main__":
    main()
