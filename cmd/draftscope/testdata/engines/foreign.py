"""Writes the states of a target as other systems do, with their own
serialisers: foreign.py MODEL SEQUENCES OUT."""

import gzip
import io
import json
import pathlib
import struct
import sys

import torch

torch.set_num_threads(1)

import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

transformers.logging.disable_progress_bar()
model_dir, sequences, out = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
states: dict[int, torch.Tensor] = {}
for c in range(1, 9):
    model.model.layers[c - 1].register_forward_hook(lambda _m, _a, o, c=c: states.__setitem__(c, o[0]))
with open(sequences) as f:
    seqs = [json.loads(line) for line in f][:4]
for name in ("vllm", "specforge/rows_0-2000", "dflash", "deepspec"):
    (out / name).mkdir(parents=True)
index, shard = b"", b""
for i, s in enumerate(seqs):
    ids = torch.tensor(s["input_ids"])
    mask = (torch.arange(len(ids)) >= s["prompt_len"]).long()
    with torch.inference_mode():
        model.model(ids[None])
        normed = model.model.norm(states[8])
    taps = torch.cat([states[c] for c in (2, 4, 5)], -1)
    save_file({"hidden_states": torch.stack([states[c] for c in (2, 4, 5, 8)], 1).contiguous(), "token_ids": ids}, out / f"vllm/cmpl-{i}.safetensors")
    torch.save(
        {"input_ids": ids, "loss_mask": mask, "aux_hidden_state": taps[None], "hidden_state": normed[None]},
        out / f"specforge/rows_0-2000/data_{i}.ckpt",
    )
    whole = io.BytesIO()
    torch.save({"input_ids": ids, "loss_mask": mask, "hidden_states": taps[None]}, whole)
    with gzip.open(out / f"dflash/data_{i}.ckpt.gz", "wb", 6) as z:
        z.write(whole.getvalue())
    offsets = []
    for t in (ids.int(), torch.ones(len(ids), dtype=torch.uint8), mask.to(torch.uint8), taps, normed):
        offsets.append(len(shard))
        shard += bytes(t.contiguous().view(torch.uint8).flatten().tolist())
    index += struct.pack("<QII5Q", i, 0, len(ids), *offsets)
(out / "deepspec/samples.idx").write_bytes(index)
(out / "deepspec/shard-00000.bin").write_bytes(shard)
(out / "deepspec/manifest.json").write_text(json.dumps({
    "version": 2, "num_samples": len(seqs), "num_shards": 1, "target_layer_ids": [1, 3, 4], "hidden_dtype": "bfloat16",
    "token_dtype": "int32", "index_record_size": 56, "hidden_size": 256,
}))
