"""kvlab's side of the whole-step benchmarks: an engine whose sequences hold `context` tokens, ready to decode.

The prompts are not run through the model: in its place a stand-in hands random keys and values to the method,
layer by layer, so scheduling, block tables, encoding and sealing are the real ones, and no two sequences share a block.
What a decode step costs does not depend on the content of the cache. From then on the model runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

POOL = 4096  # random tokens; slices of them differ between layers and sequences


@dataclass(frozen=True)
class Setting:
    """method and its options, what the lean step's matrices are made of, and other fields of EngineCfg."""

    method: str
    options: tuple[tuple[str, object], ...] = ()
    weights: str = "model"
    runtime: tuple[tuple[str, object], ...] = ()


def setting(method: str, weights: str = "model", runtime: dict | None = None, **options) -> Setting:
    return Setting(method, tuple(options.items()), weights, tuple((runtime or {}).items()))


def named(name: str, weights: str, options: dict) -> Setting:
    """A setting from a name that begins with its method; "... fast": with the kernels' fast arithmetic."""
    return setting(name.split()[0], weights, {"arithmetic": "fast"} if name.endswith(" fast") else None, **options)


class Ours:
    """One Lab per setting. Converted weights are shared between the settings that use the same kind."""

    def __init__(self, loaded) -> None:
        self.loaded = loaded
        self._kinds: dict[str, object] = {}

    def lab(self, s: Setting, batch: int, context: int, room: int):
        """A Lab with `batch` sequences of `context` tokens, for `room` more."""
        from kvlab import registry
        from kvlab.engine.config import EngineCfg
        from kvlab.engine.sequence import Sampling
        from kvlab.lab import Lab

        loaded = self._kinds.setdefault(s.weights, replace(self.loaded))  # Loaded keeps one kind of converted weights
        cfg = EngineCfg(
            max_seqs=batch, max_len=context + room, chunk=context, max_batch_tokens=context + batch, weights=s.weights,
            **dict(s.runtime),
        )  # fmt: skip
        lab = Lab(loaded, registry.build(s.method, **dict(s.options)), cfg)
        model, lab.engine.forward = lab.engine.forward, Filler(lab.geom, lab.vocab, lab.engine.device).forward
        # a step fills one sequence, and the earlier ones take a token each: prompts shorter by what they take
        seqs = [lab.engine.add([5] * (context - i), Sampling(max_tokens=room)) for i in reversed(range(batch))]
        while any(q.missing != 1 for q in seqs):
            lab.engine.step()
        lab.engine.forward = model
        held = [q.computed for q in seqs]
        assert max(held) - min(held) <= batch and abs(held[0] - context) <= batch, f"{s}: {held} tokens"
        return lab

    @staticmethod
    def step(lab):
        """A decode step of all its sequences; RuntimeError for one that has none left, which would take no time."""

        def step():
            if not lab.engine.step():
                raise RuntimeError("a step without tokens: the sequences have no more room")

        return step

    def row(self, lab, s: Setting) -> dict:
        """The facts of a row: what ran."""
        from kvlab.kernels import dispatch

        cache = lab.compressor.label() + (" fast" if lab.cfg.arithmetic == "fast" else "")
        told = "".join(f", {k} {v}" for k, v in s.runtime if k != "arithmetic")
        return {
            "side": f"kvlab {cache}, {_weights(lab, s)} weights{told}",
            "who": "kvlab",
            "method": s.method,
            "cache": cache,
            "weights": _weights(lab, s),
            "step": lab.runner.facts,
            "kernels": dispatch.chosen(str(lab.engine.device), lab.cfg.kernels)["attention"],
            "arithmetic": lab.cfg.arithmetic,
            "block": lab.cfg.block,
            "cache_bytes": lab.ledger().total.physical,
        }


def _weights(lab, s: Setting) -> str:
    return (
        {"torch.float32": "fp32", "torch.bfloat16": "bf16"}[str(lab.loaded.dtype)]
        if s.weights == "model"
        else s.weights
    )


class Filler:
    """Stands for the model while prompts run: nothing is computed, the cache is given random keys and values."""

    def __init__(self, geom, vocab: int, device="cpu") -> None:
        import torch

        gen = torch.Generator().manual_seed(0)
        self.k, self.v = (torch.randn(1, geom.Hk, POOL, geom.D, generator=gen).to(device, geom.dtype) for _ in "kv")
        self.layers, self.vocab, self.device = geom.L, vocab, device

    def forward(self, tokens, positions, rows, compressor, pages):
        import torch

        where = torch.arange(len(tokens), device=self.device)
        for layer in range(self.layers):
            at = (where + 997 * layer) % POOL
            compressor.write(layer, self.k[:, :, at], self.v[:, :, at], pages)
        return torch.zeros(len(rows), self.vocab, device=self.device)
