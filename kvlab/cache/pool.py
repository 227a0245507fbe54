"""Who owns a block. Bookkeeping only: no bytes, no tensors, O(1) per block.

A block is in exactly one place: the free stack, the lru list of cached blocks, referenced (ref > 0), or deferred
(ref 0 but pinned by something in flight). Block 0 is the null block: never allocated, never freed, all zero bytes; it
pads block tables. Invariants I1-I5, I9, I11 of the runtime hold after every call (`check`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from kvlab.errors import InvariantError, NoBlocks

NULL, FREE, OPEN, SEALED, CACHED = range(5)
STATES = ("NULL", "FREE", "OPEN", "SEALED", "CACHED")


class BlockPool:
    """`n_blocks` blocks, block 0 reserved. `on_evict(block)` is called before a cached block loses its key."""

    def __init__(self, n_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        if n_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got n_blocks={n_blocks}")
        self.n_blocks = n_blocks
        self.ref = array("i", [0]) * n_blocks
        self.pin = array("i", [0]) * n_blocks
        self.shared = 0  # blocks with ref > 1
        self.state = array("b", [FREE]) * n_blocks
        self.state[0] = NULL
        self.key: dict[int, bytes] = {}  # only blocks that have one
        self.on_evict = on_evict
        # Two circular intrusive lists; their sentinels are the two slots after the last block.
        self._free, self._lru = n_blocks, n_blocks + 1
        self._next = array("i", range(n_blocks + 2))
        self._prev = array("i", range(n_blocks + 2))
        self.n_free = self.n_lru = 0
        for block in range(n_blocks - 1, 0, -1):
            self._push_free(block)

    # -- lists ---------------------------------------------------------------------------------------------------
    def _insert(self, block: int, before: int) -> None:
        prev = self._prev[before]
        self._next[prev] = self._prev[before] = block
        self._prev[block], self._next[block] = prev, before

    def _unlink(self, block: int) -> None:
        prev, after = self._prev[block], self._next[block]
        self._next[prev], self._prev[after] = after, prev
        self._prev[block] = self._next[block] = block

    def _push_free(self, block: int) -> None:
        self.state[block] = FREE
        self._insert(block, self._next[self._free])
        self.n_free += 1

    # -- life of a block -----------------------------------------------------------------------------------------
    @property
    def available(self) -> int:
        """Blocks that `alloc` could hand out now."""
        return self.n_free + self.n_lru

    @property
    def used(self) -> int:
        """Blocks that some table references, or that a transfer still pins."""
        return self.n_blocks - 1 - self.n_free - self.n_lru

    def alloc(self, k: int) -> list[int]:
        """k blocks with ref 1, OPEN. Raises NoBlocks and changes nothing when there are fewer."""
        if k > self.available:
            raise NoBlocks(f"need {k} blocks, {self.available} of {self.n_blocks - 1} are free or cached")
        if self.on_evict and k > self.n_free:  # before anything changes: a hook that raises leaves the pool as it was
            block = self._next[self._lru]
            for _ in range(k - self.n_free):
                self.on_evict(block)
                block = self._next[block]
        return [self._pop() for _ in range(k)]

    def _pop(self) -> int:
        if self.n_free:
            block = self._next[self._free]
            self.n_free -= 1
        else:
            block = self._next[self._lru]
            self.n_lru -= 1
            del self.key[block]
        self._unlink(block)
        self.ref[block], self.state[block] = 1, OPEN
        return block

    def incref(self, block: int) -> None:
        """One more table holds the block; a cached block leaves the lru list."""
        if self.state[block] == CACHED:
            self._unlink(block)
            self.n_lru -= 1
            self.state[block] = SEALED
        elif self.ref[block] <= 0:
            raise InvariantError(f"incref of {self.describe(block)}")
        self.ref[block] += 1
        self.shared += self.ref[block] == 2

    def decref(self, block: int) -> None:
        """One table less. At 0: keyed blocks are cached, others freed; pinned ones wait for the last unpin."""
        if self.ref[block] <= 0 or block == 0:
            raise InvariantError(f"decref of {self.describe(block)}")
        self.ref[block] -= 1
        self.shared -= self.ref[block] == 1
        if self.ref[block] == 0 and self.pin[block] == 0:
            self._release(block)

    def _release(self, block: int) -> None:
        if block in self.key:
            self.state[block] = CACHED
            self._insert(block, self._lru)
            self.n_lru += 1
        else:
            self._push_free(block)

    def pin_block(self, block: int) -> None:
        """Something in flight reads or writes the block: it must not be reused."""
        if self.ref[block] <= 0:
            raise InvariantError(f"pin of {self.describe(block)}")
        self.pin[block] += 1

    def unpin(self, block: int) -> None:
        if self.pin[block] <= 0:
            raise InvariantError(f"unpin of {self.describe(block)}")
        self.pin[block] -= 1
        if self.pin[block] == 0 and self.ref[block] == 0:
            self._release(block)

    def seal(self, block: int) -> None:
        """The block is full and never written again."""
        if self.state[block] not in (OPEN, SEALED) or self.ref[block] <= 0:
            raise InvariantError(f"seal of {self.describe(block)}")
        self.state[block] = SEALED

    def set_key(self, block: int, key: bytes) -> None:
        """Name a sealed block, so that it is cached instead of freed when its last owner leaves."""
        if self.state[block] != SEALED or block in self.key:
            raise InvariantError(f"set_key of {self.describe(block)}")
        self.key[block] = key

    def free_table(self, blocks: Sequence[int]) -> None:
        """decref in REVERSE logical order, so that a chain's tail is evicted before its head."""
        for block in reversed(blocks):
            self.decref(block)

    # -- inspection ----------------------------------------------------------------------------------------------
    def describe(self, block: int) -> str:
        return f"block {block}: {STATES[self.state[block]]}, ref {self.ref[block]}, pin {self.pin[block]}"

    def walk(self, which: str) -> list[int]:
        """Block ids of list "free" or "lru", front to back."""
        head = self._free if which == "free" else self._lru
        out, before, block = [], head, self._next[head]
        while self._prev[block] == before:
            if block == head:
                return out
            out.append(block)
            before, block = block, self._next[block]
        raise InvariantError(f"{which} list is not symmetric between {before} and {block} (its head is {head})")

    def check(self, owners: Iterable[int]) -> None:
        """Raise InvariantError unless the books balance; `owners` = every block of every table, with repetition."""
        count = [0] * self.n_blocks
        for block in owners:
            count[block] += 1
        free, lru = self.walk("free"), self.walk("lru")
        if (len(free), len(lru)) != (self.n_free, self.n_lru):
            raise InvariantError(f"lists hold {len(free)}/{len(lru)} blocks, counters say {self.n_free}/{self.n_lru}")
        if self.shared != sum(r > 1 for r in self.ref):
            raise InvariantError(f"{self.shared} blocks count as shared, {sum(r > 1 for r in self.ref)} are")
        in_free = set(free)
        listed = in_free | set(lru)
        if len(listed) != len(free) + len(lru) or 0 in listed:
            raise InvariantError("a block is in two lists, or the null block is in one")
        for block in range(1, self.n_blocks):
            ref, state = self.ref[block], self.state[block]
            wrong = (
                ref != count[block]
                or (block in listed) != (ref == 0 and self.pin[block] == 0)
                or (state == FREE) != (ref == 0 and self.pin[block] == 0 and block in in_free)
                or (state == CACHED) != (ref == 0 and self.pin[block] == 0 and block in self.key)
                or (block in self.key and state not in (SEALED, CACHED))
            )
            if wrong:
                raise InvariantError(f"{self.describe(block)}, owners {count[block]}, key {block in self.key}")
