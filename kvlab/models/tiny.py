"""Models of a few hundred kB with random weights, and a tokenizer of bytes: for tests, offline, built in milliseconds.

They say nothing, but they have every shape that the cache must survive:

name          layers  H / Hk / D   what is special
tiny_llama         3   4 / 2 / 16   GQA
tiny_mqa           3   4 / 1 / 16   one kv head
tiny_qwen2         3   4 / 2 / 16   biases on q, k, v, far from zero: keys are not centred
tiny_qwen3         3   4 / 2 / 16   norms on q and k
tiny_mistral       3   4 / 2 / 16   a sliding window of 24 in every layer
tiny_gemma         4   4 / 2 / 32   D is not hidden/H (64/4); windows of 24 in layers 0 and 2, full layers 1 and 3;
                                    two rope bases; norms on q and k

Weights are drawn by `torch.Generator(seed)`, in the order of their names, at a scale (1/sqrt(fan-in)) that keeps
activations near 1, so that attention is not uniform and logits differ between positions. The global random state is
left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvlab.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

VOCAB = 257  # the bytes, and the end of text
EOS = 256
WINDOW = 24
NAMES = ("tiny_llama", "tiny_mqa", "tiny_qwen2", "tiny_qwen3", "tiny_mistral", "tiny_gemma")
ALIASES = {"tiny_qwen": "tiny_qwen2"}


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    """The transformers config of a tiny model. changes: fields to override. Raises ConfigError for an unknown name."""
    import transformers as tf

    common = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": EOS,
    }  # fmt: skip
    two_bases = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                 "full_attention": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip
    kind, special = {
        "tiny_llama": ("LlamaConfig", {}),
        "tiny_mqa": ("LlamaConfig", {"num_key_value_heads": 1}),
        "tiny_qwen2": ("Qwen2Config", {}),
        "tiny_qwen3": ("Qwen3Config", {}),
        "tiny_mistral": ("MistralConfig", {"sliding_window": WINDOW}),
        "tiny_gemma": ("Gemma3TextConfig", {
            "num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": two_bases,
        }),
    }.get(ALIASES.get(name, name), (None, {}))  # fmt: skip
    if kind is None:
        raise ConfigError(f"no tiny model is called {name!r}; there are {', '.join((*NAMES, *ALIASES))}")
    return getattr(tf, kind)(**(common | special | changes))


def tiny_model(name: str, seed: int = 0, dtype: torch.dtype | None = None, **changes: Any) -> PreTrainedModel:
    """A tiny causal language model on the CPU, in eval mode, without gradients; equal arguments give equal weights.

    dtype: of the weights, float32 when None; the same numbers, rounded (rotary frequencies stay float32).
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(name, **changes)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for path, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 2:
            noise *= weight.shape[1] ** -0.5
        elif path.endswith("bias"):
            noise *= 0.5
        else:  # a norm: near what its family starts from (1, or 0 where the layer adds 1)
            noise = weight.data.float().mean() + 0.1 * noise
        weight.data.copy_(noise)
    return model.eval().requires_grad_(False)


class ByteTokenizer:
    """Token = byte of the UTF-8 text; 256 ends the text. encode and decode as in transformers, nothing else.

    The end of text is no byte, so no text can contain it.
    """

    vocab_size = VOCAB
    eos_token_id = EOS
    pad_token_id = EOS
    bos_token_id = None
    chat_template = None
    name_or_path = "bytes"

    def __len__(self) -> int:
        return VOCAB

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """text -> bytes as ints; there are no special tokens to add."""
        return list(text.encode("utf-8"))

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """ids (list, or a tensor of one axis) -> text; a broken UTF-8 sequence becomes U+FFFD, 256 becomes `<eos>`."""
        ids = [int(ids)] if isinstance(ids, int) else [int(i) for i in ids]
        if bad := [i for i in ids if not 0 <= i < VOCAB]:
            raise ValueError(f"ByteTokenizer: token {bad[0]} is outside 0..{VOCAB - 1}")
        end = b"" if skip_special_tokens else b"<eos>"
        return b"".join(end if i == self.eos_token_id else bytes([i]) for i in ids).decode("utf-8", errors="replace")
