"""The side of a peer in experiments/peers/chat.py: a program of the peer's own environment.

    PYTHON -P peer.py transformers|llama|vllm SETTINGS.json

Settings: "model", "prompts" (token ids), "new" (tokens), "eos" (ids), "threads", "slots" (of the
cache), "gamma" and "max_ngram" (of prompt lookup), "lookup" (whether it is used), and "options" of
vLLM's engine if there are more. For each line
"NUMBER PATH" of its input it decodes so many prompts, greedily, and writes {"version", "answers"}
to the path. It imports nothing of specjax.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


class Answer:
    """The tokens of a text, one group per pass, and the time at which each group was there."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.times: list[float] = []

    def add(self, tokens: Iterable[int]) -> None:
        """The tokens of the next pass."""
        self.groups.append(list(tokens))
        self.times.append(time.perf_counter())

    def put(self, tokens: Any) -> None:
        """What transformers calls with the prompt, and with the tokens of each pass."""
        self.add(tokens.flatten().tolist())

    def end(self) -> None:
        """What transformers calls after the last token."""

    def record(self) -> dict[str, Any]:
        """Timed is what follows the first group, which the pass over the prompt gives."""
        return {
            "tokens": list(itertools.chain(*self.groups)),
            "timed": sum(map(len, self.groups[1:])),
            "passes": len(self.groups) - 1,
            "seconds": self.times[-1] - self.times[0],
        }


Decode = Callable[[list[int]], Answer]


def transformers(settings: dict[str, Any]) -> tuple[str, Decode]:
    """``generate`` of transformers, plain or with prompt lookup."""
    import torch
    import transformers

    torch.set_num_threads(settings["threads"])
    kind = transformers.AutoModelForCausalLM
    model: Any = kind.from_pretrained(settings["model"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = settings["eos"]
    options = {"max_new_tokens": settings["new"], "do_sample": False, "pad_token_id": 0}
    if settings["lookup"]:
        options["prompt_lookup_num_tokens"] = settings["gamma"]
        options["max_matching_ngram_size"] = settings["max_ngram"]

    def decode(prompt: list[int]) -> Answer:
        answer, ids = Answer(), torch.tensor([prompt])
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), streamer=answer, **options)
        del answer.groups[0], answer.times[0]  # the prompt
        return answer

    return f"{transformers.__version__} (torch {torch.__version__})", decode


def llama(settings: dict[str, Any]) -> tuple[str, Decode]:
    """llama.cpp by llama-cpp-python, plain or with its ``LlamaPromptLookupDecoding``."""
    import llama_cpp  # pyright: ignore[reportMissingImports]
    from llama_cpp import llama_speculative  # pyright: ignore[reportMissingImports]

    draft, lookup = None, settings["lookup"]
    if lookup:
        kind = llama_speculative.LlamaPromptLookupDecoding
        draft = kind(settings["max_ngram"], settings["gamma"])
    model: Any = llama_cpp.Llama(
        settings["model"],
        n_ctx=settings["slots"],
        n_threads=settings["threads"],
        n_threads_batch=settings["threads"],
        type_k=0,  # a cache in float32, as that of the others
        type_v=0,
        draft_model=draft,
        logits_all=lookup,
        verbose=False,
    )
    passes, evaluate = [0], model.eval

    def counted(tokens: list[int]) -> None:
        passes[0] += 1
        evaluate(tokens)

    model.eval = counted

    def decode(prompt: list[int]) -> Answer:
        answer, last, count = Answer(), -1, 0
        for token in model.generate(prompt, temp=0.0):
            if passes[0] == last:
                answer.groups[-1].append(token)
            else:
                answer.add([token])
            last, count = passes[0], count + 1
            if token in settings["eos"] or count == settings["new"]:
                break
        return answer

    return llama_cpp.__version__, decode


def vllm(settings: dict[str, Any]) -> tuple[str, Decode]:
    """The engine of vLLM in this process, plain or with its n-gram drafts."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["OMP_NUM_THREADS"] = str(settings["threads"])
    preload()
    import torch
    import vllm  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"speculative_config": None} | settings.get("options", {})
    if settings["lookup"]:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": settings["gamma"],
            "prompt_lookup_max": settings["max_ngram"],
            "prompt_lookup_min": 1,
        }
    engine = vllm.LLM(
        model=settings["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=settings["slots"],
        max_num_seqs=1,
        kv_cache_memory_bytes=1 << 30,
        **options,
    ).llm_engine
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=settings["new"],
        stop_token_ids=settings["eos"],
        detokenize=False,
    )
    numbers = itertools.count()

    def decode(prompt: list[int]) -> Answer:
        answer, seen = Answer(), 0
        engine.add_request(str(next(numbers)), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                if tokens[seen:]:
                    answer.add(tokens[seen:])
                seen = len(tokens)
        return answer

    return f"{vllm.__version__} (torch {torch.__version__})", decode


def preload() -> None:
    """Starts this program again with the libraries that vLLM asks for, if they are there."""
    places = ((sys.prefix, "lib/libiomp5.so"), ("/usr/lib", "*/libtcmalloc_minimal.so.4"))
    found = [str(path) for folder, name in places for path in Path(folder).glob(name)]
    if found and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = ":".join(found)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main(name: str, file: str) -> None:
    """Entry point."""
    settings = json.loads(Path(file).read_text())
    version, decode = {"transformers": transformers, "llama": llama, "vllm": vllm}[name](settings)
    for line in sys.stdin:
        number, path = line.strip().split(" ", 1)
        answers = [decode(prompt).record() for prompt in settings["prompts"][: int(number)]]
        fresh = Path(f"{path}.part")
        fresh.write_text(json.dumps({"version": version, "answers": answers}))
        fresh.replace(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
