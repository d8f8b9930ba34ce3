"""The ring's memory in parts, on the CPU: what is page-locked where there is a GPU."""

from __future__ import annotations

import torch

from draftscope_tap import ring as rings


def test_rows_go_round_whatever_the_parts(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(rings, "_LOCKED", 1)
    # 1,536 bytes a slot: the least part of whole slots and whole pages is 8.
    r = rings.Ring(3, 128, torch.float32, rings.OFFSET + 20 * 1536)
    assert (r.slots, r._part) == (20, 8)
    staged = torch.arange(60 * 3 * 128, dtype=torch.float32).view(60, 3, 128)
    want = torch.zeros(20, 3, 128)
    at = 0
    for lo, n in ((0, 5), (5, 13), (20, 20), (41, 1), (42, 18)):
        r.copy(staged, [(lo, n)])
        for i in range(n):
            want[(at + i) % 20] = staged[lo + i]
        at += n
        assert torch.equal(r._rows, want) and r.head == at
    r.close()
    r.close()


class _Runtime:
    """cudaHostRegister and its opposite, of which the call `fails` does."""

    def __init__(self, fails: int) -> None:
        self.fails, self.calls = fails, 0
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.calls == self.fails:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


class _Cuda:
    def __init__(self, runtime: _Runtime) -> None:
        self.cudart = lambda: runtime

    def device(self, _: torch.device):  # type: ignore[no-untyped-def]
        return torch.inference_mode()  # any context

    def Event(self, blocking: bool) -> None:
        return None


def test_all_of_the_memory_is_locked_or_none(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(rings, "_LOCKED", 1)
    for fails in (0, 1, 3):
        runtime = _Runtime(fails)
        monkeypatch.setattr(rings, "cuda", _Cuda(runtime))
        r = rings.Ring(3, 128, torch.float32, rings.OFFSET + 20 * 1536, torch.device("cuda"))
        first = r._rows.data_ptr()
        whole = {first: 8 * 1536, first + 8 * 1536: 8 * 1536, first + 16 * 1536: 4 * 1536}
        assert runtime.locked == ({} if fails else whole) and r.pinned == (not fails)
        r.close()
        assert runtime.locked == {}
