"""Tokens to text while they come: pieces that are whole characters, cut at the first stop string."""

from __future__ import annotations


class TextStream:
    """Holds one sample's tokens. Stop strings are searched in the decoded text, since they may span tokens."""

    def __init__(self, tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.tokens: list[int] = []
        self._given = 0  # characters handed out
        self._cut: int | None = None

    def push(self, token: int) -> bool:
        """True when a stop string is now complete."""
        self.tokens.append(token)
        if not self.stop:
            return False
        text = self._decode()
        hits = [at for at in (text.find(s) for s in self.stop) if at >= 0]
        if hits:
            self._cut = min(hits)
        return bool(hits)

    def _decode(self) -> str:
        return self.tokenizer.decode(self.tokens, skip_special_tokens=True) if self.tokens else ""

    def full(self) -> str:
        """The whole text, cut at the first stop string."""
        text = self._decode()
        return text if self._cut is None else text[: self._cut]

    def take(self) -> str:
        """What is new and certain: no unfinished character, nothing that could still become a stop string."""
        text = self.full()
        end = len(text)
        while end > 0 and text[end - 1] == "�":
            end -= 1
        hold = max((len(s) - 1 for s in self.stop), default=0) if self._cut is None else 0
        return self._advance(text, end - hold)  # whole characters are held back: an unfinished one may become any

    def flush(self) -> str:
        """The rest, at the end."""
        text = self.full()
        return self._advance(text, len(text))

    def _advance(self, text: str, end: int) -> str:
        piece = text[self._given : end] if end > self._given else ""
        self._given = max(self._given, end)
        return piece
