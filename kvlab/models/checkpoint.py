"""What a model folder holds: which weight files count, and the hashes of weights, tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from kvlab.errors import ConfigError, CorruptFile
from kvlab.models.files import file_sha256

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
VOCABULARY = re.compile(r"vocab.*|merges\.txt|.*\.model|tokenizer_config\.json")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers will read from `folder`, sorted by name.

    Raises ConfigError when there are none (with the reason, for pickle weights), CorruptFile when a part is missing.
    """
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"model.path={folder} {what}. It must be a folder with config.json and *.safetensors")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path={folder} holds no config.json, so the architecture is unknown. "
            f"model.save_pretrained(DIR) writes it beside the weights"
        )
    if (single := folder / "model.safetensors").is_file():
        return [single]
    if (index := folder / "model.safetensors.index.json").is_file():
        return _parts(index)
    if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        raise ConfigError(
            f"model.path={folder} holds pickle weights only ({', '.join(pickles[:3])}). Reading a pickle can run any "
            f"code that its author put into it, so it is refused. Ways out: a safetensors version of the same "
            f"model; or, if you trust the author, convert it to safetensors once: "
            f"AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR), and copy the tokenizer files."
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    hint = f"; it holds {', '.join(others[:3])}: rename a single file to model.safetensors" if others else ""
    raise ConfigError(
        f"model.path={folder} holds no weights: neither model.safetensors nor model.safetensors.index.json{hint}"
    )


def _parts(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{index}: not an index of safetensors files ({error!r}); copy the folder again") from error
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise CorruptFile(
            f"{index.parent}: {len(missing)} of {len(names)} weight files are missing, the first is {missing[0]}; "
            f"copy the folder again"
        )
    return [index.parent / name for name in names]


def files_sha256(files: list[Path]) -> str:
    """SHA-256 of the file; of several, of the lines `name digest`, sorted by name. Stamped (`files.file_sha256`)."""
    if len(files) == 1:
        return file_sha256(files[0])
    lines = sorted(f"{path.name} {file_sha256(path)}\n" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tokenizer_sha256(folder: Path) -> str:
    """Of tokenizer.json; in a folder without one, of all vocabulary files."""
    whole = folder / "tokenizer.json"
    return files_sha256([whole] if whole.is_file() else [p for p in folder.iterdir() if VOCABULARY.fullmatch(p.name)])


def template_sha256(template: str | dict[str, str] | None) -> str | None:
    """Of the template's text (several: as sorted JSON), as `chat_template_sha` in lm-eval; None when there is none."""
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
