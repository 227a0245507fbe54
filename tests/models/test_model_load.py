"""load(cfg): what each source gives, what it refuses and why, and that only `hf` may use the network."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kvlab.errors import ConfigError, CorruptFile, OfflineError
from kvlab.models import tiny
from kvlab.models.checkpoint import files_sha256
from kvlab.models.files import hash_file
from kvlab.models.from_gguf import convert
from kvlab.models.load import ModelCache, ModelCfg, load

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def saved(tiny_gguf, tmp_path_factory):
    """A complete folder: llama of 2 layers, tokenizer, template."""
    folder = tmp_path_factory.mktemp("saved") / "my-model"
    folder.mkdir()
    convert(tiny_gguf, folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def local(folder, **fields):
    return load(ModelCfg(name="local", path=str(folder), **fields))


# --- what comes back


def test_a_folder_gives_model_tokenizer_and_hashes(saved, network):
    loaded = local(saved)
    assert (loaded.id, loaded.source) == ("my-model", str(saved))
    assert (loaded.max_length, loaded.eos_ids, loaded.dtype) == (512, (2,), torch.float32)
    assert loaded.weights_sha256 == hash_file(saved / "model.safetensors")
    assert loaded.tokenizer_sha256 == hash_file(saved / "tokenizer.json")
    assert len(loaded.chat_template_sha256) == 64
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the end")) == "the end"
    assert network == []


@pytest.mark.parametrize(
    "name, dtype", [("fp32", torch.float32), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)]
)
@pytest.mark.parametrize("source", ["local", "tiny_gemma"])
def test_weights_come_in_the_dtype_asked_for_and_rotary_frequencies_do_not(saved, source, name, dtype):
    """Fails for `model.to(bfloat16)`, which rounds the frequencies too: far positions turn by wrong angles."""
    loaded = local(saved, dtype=name) if source == "local" else load(ModelCfg(name=source, dtype=name))
    assert {weight.dtype for weight in loaded.model.parameters()} == {dtype} == {loaded.dtype}
    frequencies = [b for n, b in loaded.model.named_buffers() if "inv_freq" in n]
    assert frequencies
    assert {b.dtype for b in frequencies} == {torch.float32}
    assert loaded.model(IDS).logits.isfinite().all()


def test_several_weight_files_load_like_one_and_have_one_hash(saved, tmp_path):
    from transformers import AutoModelForCausalLM

    parts = shutil.copytree(saved, tmp_path / "parts")
    (parts / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(saved).save_pretrained(parts, max_shard_size="100KB")
    weights = sorted(parts.glob("*.safetensors"))
    assert len(weights) > 1
    ours, one = local(parts), local(saved)
    assert torch.equal(ours.model(IDS).logits, one.model(IDS).logits)
    assert ours.weights_sha256 == files_sha256(weights[::-1]) != one.weights_sha256
    weights[0].unlink()
    with pytest.raises(CorruptFile, match=f"weight files are missing, the first is {weights[0].name}"):
        local(parts)


def test_several_ends_of_text_are_all_known(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert local(copy).eos_ids == (2, 0)


def test_a_tokenizer_without_template_has_no_template_hash(copy):
    (copy / "chat_template.jinja").unlink()
    assert local(copy).chat_template_sha256 is None


@pytest.mark.parametrize("name", [*tiny.NAMES, *tiny.ALIASES])
def test_tiny_models_load_without_network(name, network):
    loaded = load(ModelCfg(name=name))
    assert loaded.weights_sha256 == load(ModelCfg(name=name)).weights_sha256
    assert loaded.weights_sha256 == load(ModelCfg(name=name, dtype="bf16")).weights_sha256
    assert (loaded.id, loaded.max_length, loaded.eos_ids) == (name, 4096, (256,))
    assert network == []


def test_the_default_model_needs_no_network_and_knows_a_capital(smollm2_gguf, network):
    loaded = load(ModelCfg())
    assert network == []
    assert (loaded.id, loaded.max_length, loaded.eos_ids) == ("SmolLM2-135M-Instruct.Q4_1", 8192, (2,))
    tied = loaded.model.lm_head.weight, loaded.model.model.embed_tokens.weight
    assert tied[0].data_ptr() == tied[1].data_ptr()
    ids = loaded.tokenizer.encode("The capital of France is", return_tensors="pt")
    best = int(loaded.model(ids).logits[0, -1].argmax())
    assert loaded.tokenizer.decode([best]) == " Paris"


# --- what is refused


def test_pickle_weights_are_refused_with_the_reason(copy):
    """Fails for a loader that falls back to torch.load: the marker would exist."""
    marker = copy / "code-was-run"
    (copy / "model.safetensors").unlink()
    program = f"cos\nsystem\n(S'touch {marker}'\ntR."
    (copy / "pytorch_model.bin").write_bytes(program.encode())
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*can run any code.*safetensors"):
        local(copy)
    assert not marker.exists()


def test_pickle_beside_safetensors_is_not_read(copy):
    (copy / "pytorch_model.bin").write_bytes(b"no pickle at all")
    assert local(copy).weights_sha256 == hash_file(copy / "model.safetensors")


@pytest.mark.parametrize("size", [0, 7, 2000, -4])
def test_truncated_weights_are_refused(copy, size):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptFile, match="damaged weights"):
        local(copy)


def test_tensors_that_are_missing_are_not_made_up(copy):
    """transformers fills them with random numbers and prints a warning."""
    from safetensors.torch import load_file, save_file

    state = load_file(copy / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptFile, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
        local(copy)


def test_a_config_of_other_shapes_is_refused(copy):
    config = json.loads((copy / "config.json").read_text()) | {"intermediate_size": 128}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="cannot load it"):
        local(copy)


def test_code_in_a_model_folder_is_never_run(copy):
    marker = copy / "code-was-run"
    (copy / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: pass\n")
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="cannot load it"):
        local(copy)
    assert not marker.exists()


def test_folders_that_hold_no_model_say_what_is_missing(tmp_path, saved):
    with pytest.raises(ConfigError, match="does not exist"):
        local(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        local(saved / "config.json")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        local(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no weights"):
        local(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"rename a single file to model\.safetensors"):
        local(tmp_path)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"name": "gpt5"}, "there are smollm2, local, hf, tiny_llama"),
        ({"dtype": "int8"}, "there are float32, bfloat16, float16"),
        ({"name": "local"}, "needs model.path=DIR"),
        ({"name": "hf"}, "needs model.path=ORG/NAME"),
        ({"path": "/somewhere"}, "use model=local"),
        ({"name": "local", "path": "d", "revision": "main"}, "only model=hf does"),
    ],
)
def test_contradictions_are_refused_before_anything_is_loaded(fields, message):
    with pytest.raises(ConfigError, match=message):
        ModelCfg(**fields)


@pytest.mark.parametrize("device", ["gpu0", "cuda"])
def test_a_device_that_is_not_there_is_refused(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=device):
        load(ModelCfg(name="tiny_llama", device=device))


# --- the hub: in another process, because the client reads its environment when it is imported


def test_the_watch_on_the_network_sees_the_hub_client(network):
    """Otherwise every `network == []` above could not fail."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        pytest.skip("HF_HUB_OFFLINE is set, so the client does not try")
    with pytest.raises(OfflineError):
        load(ModelCfg(name="hf", path="kvlab-tests/there-is-no-such-model"))
    assert network


def hub(home, code: str, env: dict[str, str]) -> str:
    program = (
        f"from kvlab.models.load import *\nfrom kvlab.errors import *\ncfg = ModelCfg(name='hf', path='org/m')\n{code}"
    )
    env = {**env, "HF_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_hub_names_the_ways_out_and_what_is_cached_still_loads(saved, tmp_path, python_env):
    """A refused connection stands for a machine without network; port 9 answers nobody."""
    repo, commit = tmp_path / "hub" / "models--org--m", "0123456789abcdef0123456789abcdef01234567"
    fail = "try: load(cfg)\nexcept OfflineError as error: print(error.exit_code, error)\n"
    out = hub(tmp_path, fail, {**python_env, "HF_ENDPOINT": "http://127.0.0.1:9"})
    for part in ("5 model=hf model.path=org/m", "model=smollm2", "model=local model.path=DIR", "HF_ENDPOINT"):
        assert part in out

    shutil.copytree(saved, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    show = "loaded = load(cfg)\nprint(loaded.id, loaded.source, loaded.weights_sha256)\n"
    out = hub(tmp_path, show, {**python_env, "HF_HUB_OFFLINE": "1"})
    weights = hash_file(saved / "model.safetensors")
    assert out.split() == ["org/m@01234567", f"hf:org/m@{commit}", weights]


# --- loading once


def test_a_cache_loads_each_model_once_and_keeps_the_latest():
    cache = ModelCache(max_models=2)
    llama, gemma, mqa = (ModelCfg(name=f"tiny_{n}") for n in ("llama", "gemma", "mqa"))
    first = cache.get(llama)
    assert cache.get(ModelCfg(name="tiny_llama")) is first
    assert cache.get(replace(llama, dtype="bfloat16")) is not first
    assert cache.get(llama) is first
    cache.get(gemma)  # drops the bfloat16 one, not the one used last
    assert cache.get(llama) is first
    cache.get(gemma)
    cache.get(mqa)
    assert cache.get(llama) is not first
    cache.clear()
    assert cache.get(mqa) is not None


def test_the_configuration_can_be_read_without_torch(python_env):
    """The command line builds and prints the plan of a run before it pays seconds for torch and transformers."""
    code = """
import sys
from kvlab.models.load import ModelCfg
ModelCfg()
print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], env=python_env, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
