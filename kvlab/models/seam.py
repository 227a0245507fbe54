"""The seam to transformers: a `cache=` object and a registered attention function. No forward is copied, nothing
patched.

The model runs on packed tokens `[1, T]` with explicit positions. In every layer it hands exact post-RoPE k, v to
`StepCache.update` (pages are written, complete blocks sealed), then calls our attention function, which reads pages.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlab.cache.paged import StepPages
from kvlab.compressor import Compressor

NAME = "kvlab"


class StepCache(Cache):
    """What the model sees as its cache during one step."""

    def __init__(self, compressor: Compressor, pages: StepPages) -> None:
        super().__init__(layers=[])
        self.compressor, self.pages = compressor, pages

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """k, v [1, Hk, T', D] with T' >= T: rows beyond the step's T are padding and are not written."""
        T = self.pages.step.T
        self.compressor.write(layer_idx, key_states[:, :, :T], value_states[:, :, :T], self.pages)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    is_compileable = False


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    kvlab_step: StepCache | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """query [1, H, T', D], key, value [1, Hk, T', D] -> [1, T', H, D]; padding rows give zeros."""
    if kvlab_step is None:
        raise RuntimeError("attention 'kvlab' runs inside kvlab's engine only: call Engine.step, not the model itself")
    geom = kvlab_step.compressor.geom
    layer = module.layer_idx
    assert scaling is None or abs(scaling - geom.scale) < 1e-9, (
        f"layer {layer}: scale {scaling}, cache has {geom.scale}"
    )
    assert sliding_window == geom.windows[layer], (
        f"layer {layer}: window {sliding_window}, cache has {geom.windows[layer]}"
    )
    T = kvlab_step.pages.step.T
    out = kvlab_step.compressor.attend(layer, query[:, :, :T], key[:, :, :T], value[:, :, :T], kvlab_step.pages)
    if query.shape[2] > T:
        out = torch.cat([out, out.new_zeros(1, query.shape[2] - T, *out.shape[2:])], 1)
    return out, None


class Runner:
    """A transformers causal LM that reads and writes kvlab's pages. Sets the model's attention implementation.

    min_rows: a step is padded to this many rows. Below 4 rows torch's linear takes other code and differs in the last
    bit,
    so a sequence alone would not equal itself in a batch; 1 is faster for a single sequence.
    """

    def __init__(self, model: nn.Module, min_rows: int = 4) -> None:
        self.min_rows = min_rows
        self.facts = {"step": "hf", "weights": "model"}  # for result rows
        ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)
        model.set_attn_implementation(NAME)
        self.model = model
        # 5.24 renamed the keyword; the model's own forward decides.
        names = inspect.signature(model.forward).parameters
        self.keyword = "cache" if "cache" in names else "past_key_values"

    def forward(
        self, tokens: Tensor, positions: Tensor, rows: Tensor, compressor: Compressor, pages: StepPages
    ) -> Tensor:
        """tokens, positions int64 [T]; rows int64 [k]: packed rows whose logits are wanted. Returns float [k,
        vocab]."""
        T, k = len(tokens), len(rows)
        pad = max(self.min_rows - T, 0)
        if pad:
            tokens = torch.cat([tokens, tokens.new_zeros(pad)])
            positions = torch.cat([positions, positions.new_zeros(pad)])
        if k < self.min_rows:
            rows = torch.cat([rows, rows.new_zeros(self.min_rows - k)])
        cache = StepCache(compressor, pages)
        out = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=rows,
            kvlab_step=cache,
            **{self.keyword: cache},
        )
        return out.logits[0, :k]
