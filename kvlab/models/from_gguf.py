"""A llama GGUF file becomes a folder that every loader reads: safetensors, config, tokenizer.

Weights  de-quantised once, stored as float32. That is the smallest common format that keeps them exactly: a Q4_1 weight
         is `d * q + m` with fp16 d and m, a Q8_0 weight `d * q` with 8-bit q: both need more than the 11 bits that fp16
         keeps and the 8 of bf16. 538 MB for SmolLM2-135M, 98 MB as GGUF.
Rows     llama.cpp rotates neighbouring pairs of channels, transformers rotates channel i with i + D/2; the rows of the
         q and k projections are put back in the order of transformers.
Limits   architecture `llama` without rope scaling, tokenizer `gpt2` (byte-level BPE). Anything else is refused: a file
         that is read almost right gives numbers that are almost right.

transformers reads GGUF too, with `gguf_file=`. Tensors, config and tokenizer are equal (tests hold it), but it takes
tens of seconds at every start, and marks the model as quantised, so that it refuses to save it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import ConfigError, CorruptFile

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor
    from transformers import LlamaConfig, PreTrainedTokenizerFast

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WAY_OUT = "use model=local with a folder of safetensors"
CONTROL, USER_DEFINED = 3, 4  # llama.cpp token types: special tokens, and words that are never split


def convert(gguf: Path, folder: Path) -> None:
    """Write model.safetensors, config.json, generation_config.json and the tokenizer files into the existing `folder`.

    Raises CorruptFile when the file is not a whole GGUF file, ConfigError when its model is outside the limits above.
    """
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    try:
        from gguf import GGUFReader

        reader = GGUFReader(gguf)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        config = llama_config(fields, tied=all(t.name != "output.weight" for t in reader.tensors))
        state = llama_state(reader, config)
        tokenizer = bpe_tokenizer(fields)
    except ConfigError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, UnicodeDecodeError, MemoryError) as error:
        raise CorruptFile(
            f"{gguf}: not a whole GGUF file ({type(error).__name__}: {error}). It was cut short, or changed after it "
            f"was written; get the file again."
        ) from error
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def llama_config(fields: dict[str, Any], tied: bool) -> LlamaConfig:
    """GGUF metadata -> the transformers config. tied: the output layer is the embedding."""
    from transformers import LlamaConfig

    if (arch := fields["general.architecture"]) != "llama":
        raise ConfigError(f"GGUF architecture {arch!r} is not supported, only 'llama'; {WAY_OUT}")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise ConfigError(f"GGUF with rope scaling is not supported; {WAY_OUT}")
    heads = fields["llama.attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields.get("llama.attention.head_count_kv", heads),
        head_dim=fields.get("llama.attention.key_length", fields["llama.embedding_length"] // heads),
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields.get("llama.rope.freq_base", 10000.0)},
        tie_word_embeddings=tied,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def llama_state(reader: GGUFReader, config: LlamaConfig) -> dict[str, Tensor]:
    """-> name: float32 tensor, by the names of LlamaForCausalLM; no `lm_head` when tied.

    Raises ValueError when tensors are missing, ConfigError when there are some that a llama does not have.
    """
    import torch
    from gguf import dequantize

    state = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        rows = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            pairs = rows.reshape(heads, -1, 2, rows.shape[-1])  # [H, D/2, (even, odd), in]
            rows = pairs.swapaxes(1, 2).reshape(rows.shape)  # even channels first, then odd
        state[name] = torch.tensor(rows, dtype=torch.float32)
    tops = {"model.embed_tokens", "model.norm"} | (set() if config.tie_word_embeddings else {"lm_head"})
    layers = {f"model.layers.{i}.{part}" for i in range(config.num_hidden_layers) for part in LAYER.values()}
    if missing := sorted({f"{name}.weight" for name in tops | layers} - set(state)):
        raise ValueError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    return state


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        if kind == "weight" and part in LAYER:
            return f"model.layers.{int(layer)}.{LAYER[part]}.weight"
    elif kind == "weight" and stem in TOP:
        return f"{TOP[stem]}.weight"
    raise ConfigError(f"GGUF tensor {name!r} has no place in LlamaForCausalLM; {WAY_OUT}")


def bpe_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """GGUF metadata -> byte-level BPE. No token is added in front: the file says so for SmolLM2, and it is checked."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if (kind := fields["tokenizer.ggml.model"]) != "gpt2" or fields.get("tokenizer.ggml.add_bos_token"):
        raise ConfigError(f"GGUF tokenizer {kind!r} is not supported, only 'gpt2' without a leading BOS; {WAY_OUT}")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    space = bool(fields.get("tokenizer.ggml.add_space_prefix"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types) if k == CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types) if k == USER_DEFINED])
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {f"{hf}_token": fields.get(f"tokenizer.ggml.{gguf}_token_id") for hf, gguf in named.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None}
    template = fields.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)
