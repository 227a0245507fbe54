"""BlockPool: who owns a block. Golden order, failing calls, caching, pins, and a random walk against plain lists."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cache.pool import CACHED, FREE, NULL, OPEN, SEALED, BlockPool
from kvlab.errors import InvariantError, NoBlocks


def snapshot(pool: BlockPool) -> tuple:
    return (
        list(pool.ref), list(pool.pin), list(pool.state), dict(pool.key), pool.walk("free"), pool.walk("lru"),
        pool.n_free, pool.n_lru,
    )  # fmt: skip


def cached(pool: BlockPool, names: str) -> list[int]:
    """One cached block per letter, least recently used first."""
    blocks = pool.alloc(len(names))
    for b, name in zip(blocks, names):
        pool.seal(b)
        pool.set_key(b, name.encode())
        pool.decref(b)
    return blocks


def test_blocks_come_back_in_the_golden_order_of_the_specification():
    """runtime.md 2, the order of vllm's test_prefill: fails when a table is freed head first (a chain's head would be
    evicted before its tail), when the free list is a queue, or when a keyed block is freed instead of cached."""
    pool = BlockPool(11)
    first = pool.alloc(4)  # 48 shared tokens and 7 own ones, blocks of 16
    assert first == [1, 2, 3, 4]
    for b in first[:3]:
        pool.seal(b)
        pool.set_key(b, bytes([b]))
    for b in first[:3]:
        pool.incref(b)
    second = first[:3] + pool.alloc(1)
    assert second == [1, 2, 3, 5]
    assert [pool.ref[b] for b in (1, 2, 3, 4, 5)] == [2, 2, 2, 1, 1]
    pool.check([*first, *second])
    pool.free_table(first)
    pool.check(second)
    pool.free_table(second)
    pool.check([])
    assert (pool.n_free, pool.n_lru, pool.available, pool.used) == (7, 3, 10, 0)
    assert [pool.alloc(1)[0] for _ in range(10)] == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    with pytest.raises(NoBlocks):
        pool.alloc(1)


def test_an_allocation_that_fails_changes_nothing():
    """Fails when blocks are popped one by one until the pool is empty."""
    pool = BlockPool(8)
    cached(pool, "ab")
    held = pool.alloc(3)
    before = snapshot(pool)
    with pytest.raises(NoBlocks, match="need 5 blocks, 4 of 7"):
        pool.alloc(5)
    assert snapshot(pool) == before
    assert len(pool.alloc(4)) == 4
    pool.check([*held, *set(range(1, 8)) - set(held)])


def test_an_eviction_hook_that_raises_changes_nothing():
    """I13. Fails when counters move before the hook runs, or when earlier blocks of the same call stay taken."""

    def hook(block):
        if calls.append(block) or len(calls) == 2:
            raise OSError("the tier is gone")

    calls: list[int] = []
    pool = BlockPool(6, on_evict=hook)
    cached(pool, "abcde")
    before = snapshot(pool)
    with pytest.raises(OSError, match="tier"):
        pool.alloc(3)
    assert snapshot(pool) == before
    pool.check([])


def test_an_allocation_of_nothing_is_allowed_even_when_the_pool_is_empty():
    pool = BlockPool(3)
    held = pool.alloc(2)
    assert pool.alloc(0) == []
    pool.check(held)


def test_the_least_recently_used_block_is_evicted_and_the_hook_still_sees_its_key():
    """Fails when the hook runs after the key is gone (a tier could not file the block), or when the newest goes
    first."""
    seen = []
    pool = BlockPool(4, on_evict=lambda b: seen.append((b, pool.key[b])))
    a, b, c = cached(pool, "abc")
    pool.incref(a)  # used again: now the newest
    pool.decref(a)
    assert pool.walk("lru") == [b, c, a]
    assert pool.alloc(2) == [b, c]
    assert seen == [(b, b"b"), (c, b"c")]
    assert set(pool.key) == {a}
    assert (pool.state[b], pool.ref[b]) == (OPEN, 1)
    pool.check([b, c])


def test_a_cached_block_that_is_claimed_is_no_longer_reclaimable():
    """Claim first, count afterwards: fails when `available` still counts a claimed block."""
    pool = BlockPool(3)
    a, b = cached(pool, "ab")
    pool.incref(a)
    assert (pool.available, pool.used, pool.state[a]) == (1, 1, SEALED)
    with pytest.raises(NoBlocks):
        pool.alloc(2)
    assert pool.alloc(1) == [b]
    pool.check([a, b])


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_a_pinned_block_is_not_reused_until_the_last_unpin(keyed):
    """Fails when the release looks at the owners alone: a transfer in flight would read another sequence's bytes."""
    pool = BlockPool(2)
    (a,) = pool.alloc(1)
    if keyed:
        pool.seal(a)
        pool.set_key(a, b"a")
    pool.pin_block(a)
    pool.pin_block(a)
    pool.decref(a)
    for _ in range(2):  # deferred: in no list, still used
        assert (pool.available, pool.used) == (0, 1)
        assert a not in pool.walk("free") + pool.walk("lru")
        pool.check([])
        with pytest.raises(NoBlocks):
            pool.alloc(1)
        pool.unpin(a)
    assert pool.state[a] == (CACHED if keyed else FREE)
    assert pool.walk("lru" if keyed else "free") == [a]
    pool.check([])


def test_an_unpinned_block_that_still_has_an_owner_stays_with_it():
    pool = BlockPool(3)
    (a,) = pool.alloc(1)
    pool.pin_block(a)
    pool.unpin(a)
    assert (pool.ref[a], pool.state[a], pool.used) == (1, OPEN, 1)
    pool.check([a])


def test_the_null_block_is_never_handed_out_and_never_freed():
    pool = BlockPool(5)
    assert 0 not in pool.alloc(4)
    assert pool.state[0] == NULL
    for call in (pool.decref, pool.incref, pool.pin_block, pool.seal, pool.unpin):
        with pytest.raises(InvariantError):
            call(0)
    with pytest.raises(InvariantError):
        pool.set_key(0, b"x")
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, b: (p.decref(b), p.decref(b)),  # double free
        lambda p, b: (p.decref(b), p.incref(b)),  # use after free
        lambda p, b: (p.decref(b), p.pin_block(b)),
        lambda p, b: (p.decref(b), p.seal(b)),
        lambda p, b: p.unpin(b),
        lambda p, b: p.set_key(b, b"open"),
        lambda p, b: (p.seal(b), p.set_key(b, b"1"), p.set_key(b, b"2")),
    ],
    ids=["double free", "use after free", "pin of free", "seal of free", "unpin", "key of open", "second key"],
)  # fmt: skip
def test_a_wrong_call_raises_and_names_the_block(wrong):
    """Repairing a negative count in silence is forbidden."""
    pool = BlockPool(4)
    (b,) = pool.alloc(1)
    with pytest.raises(InvariantError, match=rf"block {b}: "):
        wrong(pool, b)


@pytest.mark.parametrize(
    "fault",
    [
        lambda p, a, c: p.ref.__setitem__(a, 2),
        lambda p, a, c: p.state.__setitem__(a, FREE),
        lambda p, a, c: p.state.__setitem__(c, SEALED),
        lambda p, a, c: p.key.__setitem__(a, b"open block with a key"),
        lambda p, a, c: p.key.pop(c),
        lambda p, a, c: setattr(p, "n_free", p.n_free - 1),
        lambda p, a, c: setattr(p, "n_lru", p.n_lru + 1),
        lambda p, a, c: p._unlink(c),
        lambda p, a, c: p._prev.__setitem__(p._next[p._free], a),
        lambda p, a, c: p.pin.__setitem__(c, 1),
        lambda p, a, c: (p._unlink(p._next[p._free]), p._insert(a, p._free)),
        lambda p, a, c: p.state.__setitem__(p._next[p._free], OPEN),
    ],
)
def test_the_check_finds_every_planted_fault(fault):
    """The walks below are worth what this check is worth."""
    pool = BlockPool(8)
    (c,) = cached(pool, "c")
    (a,) = pool.alloc(1)
    pool.check([a])
    fault(pool, a, c)
    with pytest.raises(InvariantError):
        pool.check([a])


def test_the_check_counts_owners():
    pool = BlockPool(4)
    a, b = pool.alloc(2)
    for owners in ([a], [a, a, b], [a, b, 3], []):
        with pytest.raises(InvariantError):
            pool.check(owners)
    pool.check([b, a])


class Plain:
    """The pool again, as lists and dicts."""

    def __init__(self, n: int) -> None:
        self.free, self.lru = list(range(1, n)), []  # front first
        self.ref, self.pin, self.key, self.sealed = {}, {}, {}, set()

    def take(self) -> int:
        if self.free:
            b = self.free.pop(0)
        else:
            b = self.lru.pop(0)
            del self.key[b]
        self.ref[b], self.pin[b] = 1, 0
        self.sealed.discard(b)
        return b

    def settle(self, b: int) -> None:
        if self.ref[b] or self.pin[b]:
            return
        if b in self.key:
            self.lru.append(b)
        else:
            self.free.insert(0, b)
        del self.ref[b], self.pin[b]


@settings(max_examples=60)
@given(st.data())
def test_a_random_walk_agrees_with_plain_lists_after_every_call(data):
    n = data.draw(st.integers(2, 9))
    evicted: list[int] = []
    pool, plain = BlockPool(n, on_evict=evicted.append), Plain(n)
    for i in range(data.draw(st.integers(1, 60))):
        op = data.draw(st.sampled_from(["alloc", "alloc", "incref", "decref", "decref", "pin", "unpin", "seal", "key"]))
        held = sorted(b for b, r in plain.ref.items() if r)
        if op == "alloc":
            k = data.draw(st.integers(0, 4))
            if k > len(plain.free) + len(plain.lru):
                before = snapshot(pool)
                with pytest.raises(NoBlocks):
                    pool.alloc(k)
                assert snapshot(pool) == before
            else:
                gone = plain.lru[: max(k - len(plain.free), 0)]
                evicted.clear()
                assert pool.alloc(k) == [plain.take() for _ in range(k)]
                assert evicted == gone
        elif op == "incref" and held + plain.lru:
            b = data.draw(st.sampled_from(held + plain.lru))
            if b in plain.lru:
                plain.lru.remove(b)
                plain.ref[b], plain.pin[b] = 0, 0
            plain.ref[b] += 1
            pool.incref(b)
        elif op == "decref" and held:
            b = data.draw(st.sampled_from(held))
            plain.ref[b] -= 1
            plain.settle(b)
            pool.decref(b)
        elif op == "pin" and held:
            b = data.draw(st.sampled_from(held))
            plain.pin[b] += 1
            pool.pin_block(b)
        elif op == "unpin" and any(plain.pin.values()):
            b = data.draw(st.sampled_from(sorted(b for b, p in plain.pin.items() if p)))
            plain.pin[b] -= 1
            plain.settle(b)
            pool.unpin(b)
        elif op == "seal" and held:
            b = data.draw(st.sampled_from(held))
            plain.sealed.add(b)
            pool.seal(b)
        elif op == "key":
            free_of_key = [b for b in held if b in plain.sealed and b not in plain.key]
            if free_of_key:
                b = data.draw(st.sampled_from(free_of_key))
                plain.key[b] = b"%d" % i
                pool.set_key(b, plain.key[b])
        assert pool.walk("free") == plain.free
        assert pool.walk("lru") == plain.lru
        assert pool.key == plain.key
        pool.check([b for b, r in plain.ref.items() for _ in range(r)])
    for b, r in list(plain.ref.items()):
        for _ in range(plain.pin[b]):
            pool.unpin(b)
        for _ in range(r):
            pool.decref(b)
    pool.check([])
    assert pool.available == n - 1
