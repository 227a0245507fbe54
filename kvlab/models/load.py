"""Model by name -> weights in memory, tokenizer, and the hashes that a result row needs.

smollm2     the default: from an installed package (`smollm2`), no network
local       `path` is a folder with config.json, safetensors weights and a tokenizer, no network
hf          `path` is ORG/NAME on a hub, at `revision` (`hub`); then as local
tiny_*      random weights and a byte tokenizer (`tiny`), no network

Code from a model folder is never run: no `trust_remote_code`, and no pickle weights, which can run code when read.
Weights that a checkpoint lacks are an error; transformers would fill them with random numbers and a warning.
Float32 weights on the CPU stay mapped from the file (copy on write): the kernel counts them as file pages (RssFile),
reads them at the first forward pass, and shares them between processes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import ConfigError, CorruptFile
from kvlab.models import checkpoint, smollm2, tiny

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAMES = ("smollm2", "local", "hf", *tiny.NAMES, *tiny.ALIASES)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # the short names are accepted too


@dataclass(frozen=True, kw_only=True)
class ModelCfg:
    """What to load. Raises ConfigError when a field is unknown, or when two contradict each other."""

    name: str = "smollm2"
    path: str | None = None  # local: folder; hf: ORG/NAME
    revision: str | None = None  # hf: branch, tag or commit
    dtype: str = "float32"  # float32 | bfloat16 | float16
    device: str = "cpu"
    device_map: Any = None  # as in transformers, for a model spread over devices; replaces `device`

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"model={self.name!r} is unknown; there are {', '.join(NAMES)}")
        if self.dtype not in (*DTYPES, *DTYPES.values()):
            raise ConfigError(f"model.dtype={self.dtype!r} is unknown; there are {', '.join(DTYPES.values())}")
        if self.name in ("local", "hf"):
            if not self.path:
                what = "ORG/NAME" if self.name == "hf" else "DIR (a folder with config.json and *.safetensors)"
                raise ConfigError(f"model={self.name} needs model.path={what}")
        elif self.path:
            raise ConfigError(f"model={self.name} takes no model.path, got {self.path!r}; for a folder use model=local")
        if self.revision and self.name != "hf":
            raise ConfigError(f"model={self.name} takes no model.revision, got {self.revision!r}; only model=hf does")

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch writes it."""
        import torch

        return getattr(torch, DTYPES.get(self.dtype, self.dtype))


@dataclass(frozen=True)
class Loaded:
    """A model ready to run: eval mode, no gradients. The hashes are SHA-256, hex."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | tiny.ByteTokenizer
    id: str  # short name for tables: SmolLM2-135M-Instruct.Q4_1, the folder's name, ORG/NAME@commit[:8], tiny_llama
    source: str  # where the weights came from, enough to get them again
    dtype: torch.dtype
    weights_sha256: str  # of the weight file (smollm2: the GGUF; tiny: names and fp32 bytes); of several: `checkpoint`
    tokenizer_sha256: str  # of tokenizer.json
    chat_template_sha256: str | None  # of the template's text; None: the tokenizer has none
    max_length: int  # positions that the model was made for
    eos_ids: tuple[int, ...]  # each of them ends a generation
    lean: dict = field(default_factory=dict, init=False, repr=False, compare=False)  # the lean step made of it, if any


def load(cfg: ModelCfg) -> Loaded:
    """Load what `cfg` names.

    Raises ConfigError (nothing there that can be loaded), CorruptFile (damaged weights), OfflineError (needs a hub).
    """
    _check_device(cfg)
    if cfg.name == "smollm2":
        folder, source = smollm2.prepare(), f"{smollm2.PACKAGE} {smollm2.FILE}"
        return _load_folder(cfg, folder, smollm2.FILE.removesuffix(".gguf"), source, smollm2.SHA256)
    if cfg.name == "local":
        folder = Path(str(cfg.path)).expanduser().resolve()
        return _load_folder(cfg, folder, folder.name, str(folder))
    if cfg.name == "hf":
        from kvlab.models.hub import download

        folder = download(str(cfg.path), cfg.revision)
        return _load_folder(cfg, folder, f"{cfg.path}@{folder.name[:8]}", f"hf:{cfg.path}@{folder.name}")
    return _load_tiny(cfg)


class ModelCache:
    """Loads each model once; the owner (a sweep, a test session) decides how long it lives.

    The model is shared: who changes weights (not: who registers an attention function) must `load` one of their own.
    """

    def __init__(self, max_models: int = 1):
        self.max_models = max_models
        self._models: OrderedDict[str, Loaded] = OrderedDict()

    def get(self, cfg: ModelCfg) -> Loaded:
        """`load(cfg)`, or what an equal cfg gave before. Before it loads, it drops the least recently used models."""
        key = repr(cfg)
        if key not in self._models:
            while self._models and len(self._models) >= self.max_models:
                self._models.popitem(last=False)
            self._models[key] = load(cfg)
        self._models.move_to_end(key)
        return self._models[key]

    def clear(self) -> None:
        """Forget all models; their memory is free once nobody else holds them."""
        self._models.clear()


def _load_folder(cfg: ModelCfg, folder: Path, id: str, source: str, weights_sha256: str | None = None) -> Loaded:
    files = checkpoint.weight_files(folder)
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    offline: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    options: dict[str, Any] = {"dtype": cfg.torch_dtype, "use_safetensors": True, "output_loading_info": True}
    if cfg.device_map is not None:
        options["device_map"] = cfg.device_map
    try:
        with _no_progress_bar():
            model, info = AutoModelForCausalLM.from_pretrained(folder, **options, **offline)
        tokenizer = AutoTokenizer.from_pretrained(folder, **offline)
    except SafetensorError as error:
        raise CorruptFile(f"{folder}: damaged weights ({error}); get {_names(files)} again") from error
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ConfigError(f"{folder}: transformers cannot load it: {type(error).__name__}: {error}") from error
    if lost := sorted(info["missing_keys"]):
        raise CorruptFile(
            f"{folder}: {_names(files)} lacks {len(lost)} tensors of this model, the first is {lost[0]}; they would be "
            f"random numbers. Get the weights again, or the config.json that belongs to them"
        )
    if cfg.device_map is None:
        model.to(cfg.device)
    return Loaded(
        model=model.eval().requires_grad_(False),
        tokenizer=tokenizer,
        id=id,
        source=source,
        dtype=cfg.torch_dtype,
        weights_sha256=weights_sha256 or checkpoint.files_sha256(files),
        tokenizer_sha256=checkpoint.tokenizer_sha256(folder),
        chat_template_sha256=checkpoint.template_sha256(tokenizer.chat_template),
        max_length=int(model.config.get_text_config().max_position_embeddings),
        eos_ids=_eos_ids(model, tokenizer),
    )


def _load_tiny(cfg: ModelCfg) -> Loaded:
    model, tokenizer = tiny.tiny_model(cfg.name), tiny.ByteTokenizer()
    weights = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        weights.update(name.encode() + weight.numpy().tobytes())
    if model.dtype != cfg.torch_dtype:
        model = tiny.tiny_model(cfg.name, dtype=cfg.torch_dtype)
    return Loaded(
        model=model.to(cfg.device),
        tokenizer=tokenizer,
        id=cfg.name,
        source="random weights, seed 0",
        dtype=cfg.torch_dtype,
        weights_sha256=weights.hexdigest(),
        tokenizer_sha256=hashlib.sha256(b"kvlab.models.tiny.ByteTokenizer").hexdigest(),
        chat_template_sha256=None,
        max_length=model.config.max_position_embeddings,
        eos_ids=(tokenizer.eos_token_id,),
    )


def _check_device(cfg: ModelCfg) -> None:
    import torch

    try:
        kind = torch.device(cfg.device).type
    except RuntimeError as error:
        raise ConfigError(f"model.device={cfg.device!r} is no torch device; use cpu, cuda or cuda:N") from error
    if kind == "cuda" and cfg.device_map is None and not torch.cuda.is_available():
        raise ConfigError(f"model.device={cfg.device}: torch {torch.__version__} sees no CUDA device; use cpu")


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """From the generation config, else the model config, else the tokenizer: the first that names any."""
    generation = model.generation_config.eos_token_id if model.generation_config is not None else None
    for ids in (generation, model.config.get_text_config().eos_token_id, tokenizer.eos_token_id):
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def _names(files: list[Path]) -> str:
    return files[0].name if len(files) == 1 else f"{files[0].name} .. {files[-1].name}"


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws a bar for every load, also for one of 0.2 s."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
