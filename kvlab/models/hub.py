"""A model from a hub, as a folder of the hub client's own cache. The only file here that may use the network."""

from __future__ import annotations

from pathlib import Path

from kvlab.errors import ConfigError, OfflineError

# what transformers reads; `model*` leaves out second copies of the weights (consolidated.safetensors, onnx/, pickle)
WANTED = ["config.json", "generation_config.json", "model*.safetensors*", "tokenizer*", "*.model", "vocab*"]
WANTED += ["merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"]


def download(name: str, revision: str | None = None) -> Path:
    """The snapshot folder of ORG/NAME at a branch, tag or commit; its last part is the commit. Fetches what is missing.

    Without a network, a snapshot that is already in the cache is used. Raises OfflineError when there is none,
    ConfigError when the hub answers that there is no such model or revision, or that it needs a login.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    asked = f"model=hf model.path={name}" + (f" model.revision={revision}" if revision else "")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED))
    except HFValidationError as error:
        raise ConfigError(f"{asked}: not a hub name ({error}). For a folder use model=local model.path=DIR") from error
    except (OSError, HTTPError) as error:  # no connection, offline mode, nothing cached, a proxy, or an HTTP status
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403, 404):
            why = "the model or the revision does not exist, or needs a login"
            raise ConfigError(f"{asked}: the hub answers {status}: {why} ({error})") from error
        raise OfflineError(
            f"{asked}: no hub answers, and its cache does not hold the model ({error}). Ways out: model=smollm2 "
            f"(packaged, no network), model=local model.path=DIR (a folder copied from elsewhere), "
            f"or a mirror of the hub by HF_ENDPOINT=URL."
        ) from error
