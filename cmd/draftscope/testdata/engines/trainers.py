"""Reads what draftscope exported with the data classes of a trainer, and
compares it with a dataset's states: trainers.py TRAINER FOLDER NATIVE [MODEL],
where NATIVE is a vllm export of the run that FOLDER holds, and MODEL the
target's folder, whose final norm EAGLE3's samples need."""

import json
import pathlib
import sys

import torch

torch.set_num_threads(1)

from safetensors.torch import load_file  # noqa: E402

trainer, folder, native = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
want = {tuple(w["token_ids"].tolist()): w["hidden_states"] for w in map(load_file, native.glob("*.safetensors"))}
dtype = next(iter(want.values())).dtype
equal = 0
if trainer == "speculators":
    # As speculators' trainer does: the last state is the verifier's.
    from speculators.train.data import ArrowDataset, CollateFn

    data = ArrowDataset(4096, folder, on_missing="raise", hidden_states_dtype=dtype)
    samples = [data[i] for i in range(len(data))]
    for s in samples:
        h = want.pop(tuple(s["input_ids"].tolist()))
        assert torch.equal(s["hidden_states"], h[:, :-1].flatten(1)) and torch.equal(s["verifier_last_hidden_states"], h[:, -1])
        assert s["loss_mask"].shape == s["input_ids"].shape and set(s["loss_mask"].tolist()) == {0, 1}
        equal += 1
    batch = CollateFn(1024, h.shape[2], h.shape[1] - 1, dtype)(samples)
    assert batch["error_records"] == 0 and int((batch["document_ids"] >= 0).sum()) == sum(len(s["input_ids"]) for s in samples)
elif trainer == "specforge-eagle3":
    import transformers
    from specforge.algorithms.eagle3.data import build_offline_reader, normalize_offline_sample
    from specforge.runtime.data_plane.feature_store import load_feature_file

    norm = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[4], dtype=torch.float32).model.norm
    reader = build_offline_reader(str(folder), run_id="r", ttt_length=7, max_len=4096)
    reader.validate_files = True
    worst = 0.0
    for ref in reader.read():
        s = normalize_offline_sample(load_feature_file(ref.feature_store_uri.removeprefix("file://")), 4096)
        h = want.pop(tuple(s["input_ids"][0].tolist()))
        assert torch.equal(s["hidden_state"][0], h[:, :-1].flatten(1)) and ref.num_tokens == h.shape[0]
        # The norm is another implementation's: in f32 its last bits may differ, in bf16 one rounding.
        got, normed = s["target"][0], norm(h[:, -1].float()).detach()
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), normed, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-6)
        worst = max(worst, float(((got.float() - normed).abs() / normed.abs().clamp_min(1e-6)).max()))
        mask = s["loss_mask"][0].tolist()
        assert len(mask) == h.shape[0] and set(mask) == {0, 1} and mask[-1] == 0
        equal += 1
    print(f"the final norm: largest relative difference {worst:.3g}")
else:
    # As SpecForge's trainer does, through its own reader and normaliser.
    from specforge.algorithms.common.dflash_family_data import build_offline_reader, normalize_offline_sample
    from specforge.runtime.data_plane.feature_store import load_feature_file

    reader = build_offline_reader("dflash", str(folder), run_id="r", ttt_length=7, max_len=4096)
    reader.validate_files = True
    for ref in reader.read():
        s = normalize_offline_sample(load_feature_file(ref.feature_store_uri.removeprefix("file://")), 4096)
        h = want.pop(tuple(s["input_ids"][0].tolist()))
        assert torch.equal(s["hidden_states"][0], h.flatten(1)) and ref.num_tokens == h.shape[0]
        assert s["loss_mask"].shape == s["input_ids"].shape and set(s["loss_mask"][0].tolist()) == {0, 1}
        equal += 1
assert not want
print(json.dumps({"equal": equal}))
