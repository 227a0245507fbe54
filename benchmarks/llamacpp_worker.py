"""llama.cpp in a process and a virtual environment of its own (`make llamacpp`): one JSON command a line, one answer.

Run by the Python of .cache/llamacpp; imports nothing of kvlab. Commands are the methods of Worker; an answer is
{"ok": value} or {"error": text}. A decode turn is like that of clocks.py: a step untimed, then `steps` of one token per
sequence, without a sampler. Batches are sequences of one prompt with separate caches (kv_unified off, seq_cp copies).
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time

import llama_cpp as L

CACHE = {"f16": 1, "q8_0": 8, "q4_0": 2}  # ggml types
FILE = {"Q4_0": 2, "Q8_0": 7}  # llama ftypes
CHUNK = 512


class Context:
    def __init__(self, model, cache: str, flash: bool, batch: int, length: int) -> None:
        p = L.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = -(-length // 256) * 256 * batch, 2048, CHUNK, batch
        p.type_k = p.type_v = CACHE[cache]
        p.flash_attn_type, p.kv_unified, p.no_perf = int(flash), False, True
        self.batch, self.at, self.ctx = batch, 0, L.llama_init_from_model(model, p)
        if not self.ctx:
            raise RuntimeError(f"no context with a {cache} cache, flash attention {flash}, {length} tokens")
        self.memory = L.llama_get_memory(self.ctx)
        self.tokens = L.llama_batch_init(max(CHUNK, batch), 0, 1)

    def threads(self, n: int) -> None:
        L.llama_set_n_threads(self.ctx, n, n)

    def decode(self, tokens: list[int], positions: list[int], sequences: list[int], logits: bool) -> None:
        b = self.tokens
        b.n_tokens = len(tokens)
        for i, (t, p, s) in enumerate(zip(tokens, positions, sequences)):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = t, p, 1, logits
            b.seq_id[i][0] = s
        if code := L.llama_decode(self.ctx, b):
            raise RuntimeError(f"llama_decode: {code}")
        L.llama_synchronize(self.ctx)

    def prompt(self, n: int) -> None:
        """n tokens of sequence 0, from an empty cache."""
        L.llama_memory_clear(self.memory, False)
        ids = random.Random(0).choices(range(100, 49_000), k=n)
        for i in range(0, n, CHUNK):
            chunk = ids[i : i + CHUNK]
            self.decode(chunk, list(range(i, i + len(chunk))), [0] * len(chunk), False)
        self.at = n

    def spread(self) -> None:
        """Sequence 0 to all others, each with cells of its own."""
        for s in range(1, self.batch):
            L.llama_memory_seq_cp(self.memory, 0, s, -1, -1)

    def state(self) -> bytes:
        size = L.llama_state_seq_get_size(self.ctx, 0)
        buffer = (ctypes.c_uint8 * size)()
        return bytes(buffer[: L.llama_state_seq_get_data(self.ctx, buffer, size, 0)])

    def restore(self, state: bytes, n: int) -> None:
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if not L.llama_state_seq_set_data(self.ctx, buffer, len(state), 0):
            raise RuntimeError("the state of another context does not fit")
        self.at = n

    def step(self) -> None:
        self.decode([100] * self.batch, [self.at] * self.batch, list(range(self.batch)), True)
        self.at += 1

    def close(self) -> None:
        L.llama_batch_free(self.tokens)
        L.llama_free(self.ctx)


class Worker:
    def __init__(self) -> None:
        self.models: dict = {}
        self.contexts: dict[str, Context] = {}
        self.states: dict[tuple, bytes] = {}  # caches do not depend on how weights are stored

    def info(self) -> dict:
        return {"version": L.__version__, "system": L.llama_print_system_info().decode().strip()}

    def quantize(self, source: str, target: str, kind: str) -> None:
        """For speed, not for accuracy: the source is quantized already."""
        p = L.llama_model_quantize_default_params()
        p.ftype, p.allow_requantize, p.nthread = FILE[kind], True, 1
        if L.llama_model_quantize(source.encode(), (target + ".part").encode(), ctypes.byref(p)):
            raise RuntimeError(f"cannot make {target}")
        os.replace(target + ".part", target)

    def load(self, name: str, path: str) -> None:
        p = L.llama_model_default_params()
        p.n_gpu_layers = 0
        self.models[name] = L.llama_model_load_from_file(path.encode(), p)
        if not self.models[name]:
            raise RuntimeError(f"cannot load {path}")

    def open(self, id: str, weights: str, cache: str, flash: bool, batch: int, context: int, room: int, threads: int):
        """A context filled with `context` tokens a sequence: by a prompt, or by a copy of a cache of the same kind."""
        self.contexts[id] = c = Context(self.models[weights], cache, flash, batch, context + room)
        c.threads(threads)
        key = (cache, flash, context, batch)  # a cache for one sequence does not fit one for eight
        if key in self.states:
            c.restore(self.states[key], context)
        else:
            c.prompt(context)
            self.states[key] = c.state()
        c.spread()

    def turn(self, id: str, threads: int, steps: int) -> tuple[float, float]:
        c = self.contexts[id]
        c.threads(threads)
        c.step()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            c.step()
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps

    def prompt(self, id: str, tokens: int, threads: int) -> tuple[float, float]:
        """Wall and CPU seconds of a prompt into an empty cache."""
        c = self.contexts[id]
        c.threads(threads)
        wall, cpu = time.perf_counter(), time.process_time()
        c.prompt(tokens)
        return time.perf_counter() - wall, time.process_time() - cpu

    def close(self) -> None:
        """Every context; models and kept caches stay."""
        for c in self.contexts.values():
            c.close()
        self.contexts.clear()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not stand between answers
    quiet = L.llama_log_callback(lambda level, text, data: None)
    L.llama_log_set(quiet, None)
    L.llama_backend_init()
    worker = Worker()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(worker, command.pop("do"))(**command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
