"""A chat model decoded by specjax and by other programs, which run in environments of their own."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.real_model import measuring, methods
from experiments.real_model.run import questions
from specjax.errors import UserError
from specjax.files import write_json
from specjax.models import hf

PEERS = {"transformers": "transformers", "llama": "llama.cpp", "vllm": "vLLM"}
PACKAGES = {"transformers": "transformers", "llama": "llama-cpp-python", "vllm": "vllm"}
PLAIN, LOOKUP = "plain", "prompt_lookup"
FULL = "float32"
MAX_NGRAM = 2  # the default of transformers and of llama-cpp-python
COPIED = 1 << 29  # bytes
PROGRAM = Path(__file__).with_name("peer.py")


class Side(NamedTuple):
    """What is compared: a line of the table."""

    side: str
    method: str
    precision: str = FULL


Decode = Callable[[int], list[dict[str, Any]]]  # so many prompts -> their answers (see peer.py)


class Peer:
    """A program of another environment, which decodes when it is asked."""

    def __init__(self, python: str, name: str, folder: Path, settings: dict[str, Any]):
        self.name, self.folder, self.asked, self.version = name, folder, 0, ""
        folder.mkdir()
        write_json(folder / "settings.json", settings)
        command = [python, "-P", str(PROGRAM), name, str(folder / "settings.json")]
        self.messages = folder / "messages"
        with self.messages.open("w") as log:
            try:
                self.process = subprocess.Popen(command, stdin=-1, stdout=log, stderr=log)
            except OSError as error:
                raise UserError(
                    f"--{name}={python} cannot be started ({error.strerror}); give the Python of "
                    f"an environment with {PACKAGES[name]}"
                ) from None

    def __call__(self, number: int) -> list[dict[str, Any]]:
        """Decodes so many prompts. Raises UserError if the program ends."""
        self.asked += 1
        path = self.folder / f"{self.asked}.json"
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.write(f"{number} {path}\n".encode())
            self.process.stdin.flush()
        while not path.exists():
            if (status := self.process.poll()) is not None:
                last = self.messages.read_text(errors="replace").strip().rsplit("\n", 1)[-1]
                raise UserError(f"the program of --{self.name} ended with status {status}: {last}")
            time.sleep(0.005)
        result = json.loads(path.read_text())
        self.version = result["version"]
        return result["answers"]

    def close(self) -> None:
        """Ends the program, whose CPU time then counts as that of the study."""
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        self.process.wait()


def ours(target: hf.Loaded, args: argparse.Namespace, prompts: list[list[int]]) -> dict:
    """Side -> decoder of specjax; every prompt is read once, and only the loop is timed."""
    keys: dict[str, dict[str, Any]] = {
        LOOKUP: {"rule": "transformers", "max_ngram": MAX_NGRAM, "gamma": args.gamma},
        "sam": {"gamma": args.gamma},
    }
    if args.draft:
        keys["draft_model"] = {"model": args.draft, "gamma": args.gamma}
    made = [methods.make(target, name, {"name": name} | own, [0.0]) for name, own in keys.items()]
    slots = measuring.slots_of(made, max(map(measuring.width_of, prompts)), args.new)
    eos = target.config.eos_token_id
    setting = measuring.Setting(target.lm, target.params, eos, 1, args.new, slots, 0)
    firsts = {measuring.width_of(prompt): [prompt] for prompt in prompts}
    measuring.compile_all(setting, made, list(firsts.values()))
    read = [measuring.read(setting, [prompt]) for prompt in prompts]

    def decoder(method: Any) -> Decode:
        def decode(number: int) -> list[dict[str, Any]]:
            answers = []
            for row, prompt in enumerate(read[:number]):
                run = measuring.decode_batch(setting, method, prompt, [row], 0.0)
                [tokens], count = run.outputs, len(run.outputs[0])
                passes = run.counts[0].rounds if run.counts else count
                own = {"tokens": tokens, "timed": count, "passes": passes}
                answers.append(own | {"seconds": run.seconds})
            return answers

        return decode

    decoders = {method.name: decoder(method) for method in made}
    return {Side("specjax", name): d for name, d in {PLAIN: decoder(None), **decoders}.items()}


def theirs(
    target: hf.Loaded,
    args: argparse.Namespace,
    prompts: list[list[int]],
    folder: Path,
    stack: contextlib.ExitStack,
) -> dict[Side, Peer]:
    """Side -> program, for the peers with an environment; ``stack`` ends it. Raises UserError."""
    settings = {
        "prompts": prompts,
        "new": args.new,
        "eos": list(target.config.eos_token_id),
        "threads": os.cpu_count() or 1,
        "slots": max(map(len, prompts)) + args.new + args.gamma + 1,
        "gamma": args.gamma,
        "max_ngram": MAX_NGRAM,
    }
    models = {name: {FULL: args.chat} for name in PEERS}
    if args.llama:
        models["llama"] = {
            name: str(write_gguf(target, folder / f"{kind}.gguf", kind))
            for name, kind in ((FULL, "F32"), ("Q8_0", "Q8_0"))
        }
    found = {}
    for name in PEERS:
        if python := getattr(args, name):
            for precision, model in models[name].items():
                for method in (PLAIN, LOOKUP):
                    own = settings | {"model": model, "lookup": method == LOOKUP}
                    side = Side(PEERS[name], method, precision)
                    found[side] = Peer(python, name, folder / "-".join(side), own)
                    stack.callback(found[side].close)
                    found[side](1)  # loads and compiles, before the next one starts
    return found


def write_gguf(target: hf.Loaded, path: Path, kind: str) -> Path:
    """The weights of a Llama as a .gguf file without a vocabulary. Raises UserError."""
    import gguf
    from safetensors.numpy import load_file

    config, type_ = target.config, gguf.GGMLQuantizationType[kind]
    file = Path(target.directory) / "model.safetensors"
    if config.family != "llama" or config.rope_scaling is not None or not file.exists():
        raise UserError(
            f"--llama needs a directory of a Llama without rope scaling and with {file.name}; "
            f"{target.directory} is none"
        )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    for name, tensor in load_file(file).items():
        own = names.get_name(name, try_suffixes=(".weight",)) or name
        for part, heads in ((".q_proj.", config.num_heads), (".k_proj.", config.num_kv_heads)):
            if part in name:  # llama.cpp rotates neighbours, not halves
                halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
                tensor = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
        tensor = tensor.astype(np.float32)
        if tensor.ndim == 1:
            writer.add_tensor(own, tensor)
        else:
            writer.add_tensor(own, gguf.quants.quantize(tensor, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def copied_bytes_per_second() -> float:
    """Bytes that all cores read and write per second when they copy an array."""
    cores = os.cpu_count() or 1
    source = np.ones(COPIED // 8)
    parts = [np.array_split(each, cores) for each in (np.empty_like(source), source)]
    seconds = []
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        for _ in range(5):
            began = time.perf_counter()
            list(pool.map(np.copyto, *parts))
            seconds.append(time.perf_counter() - began)
    return 2 * COPIED / min(seconds)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The part "chat" of the results. Raises UserError."""
    target = hf.load(args.chat, dtype=np.dtype(FULL))
    chosen = questions(args.prompts, target, args.questions, 1)
    if not (prompts := [each.ids for own in chosen.values() for each in own]):
        most = measuring.WIDTHS[-1]
        raise UserError(f"{args.prompts} has no question of at most {most} tokens")
    weights = {FULL: sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        peers = theirs(target, args, prompts, Path(name), stack)
        sides: dict[Side, Decode] = ours(target, args, prompts) | peers
        weights |= {path.stem: path.stat().st_size for path in Path(name).glob("Q*.gguf")}
        copied = copied_bytes_per_second()
        answers: dict[Side, list[list[dict]]] = {side: [] for side in sides}
        for turn in range(args.passes):
            order = list(sides)
            first = turn % len(order)  # another one begins each pass
            for side in order[first:] + order[:first]:
                answers[side].append(sides[side](len(prompts)))
        versions = {PACKAGES[peer.name]: peer.version for peer in peers.values()}
    return {
        "model": Path(args.chat).name,
        "prompts": [len(prompt) for prompt in prompts],
        "new_tokens": args.new,
        "gamma": args.gamma,
        "passes": args.passes,
        "threads": os.cpu_count(),
        "weight_bytes": weights,
        "copied_bytes_per_second": copied,
        "peer_versions": versions,
        "rows": rows(answers, weights, copied),
    }


def rows(
    answers: dict[Side, list[list[dict]]], weights: dict[str, int], copied: float
) -> list[dict[str, Any]]:
    """One row per side, from its answers of each pass; the first side is specjax's plain one."""
    plain = next(iter(answers))
    rates = {side: [rate(one) for one in every] for side, every in answers.items()}
    texts = [each["tokens"] for each in answers[plain][0]]
    result = []
    for side, every in answers.items():
        counts = [sum(each[key] for each in every[0]) for key in ("timed", "passes")]
        tau, median = counts[0] / counts[1], statistics.median(rates[side])
        ratios = [own / other for own, other in zip(rates[side], rates[plain], strict=True)]
        same = [all(one[n]["tokens"] == text for one in every) for n, text in enumerate(texts)]
        result.append(
            side._asdict()
            | {
                "tokens_per_second": median,
                "spread": [min(rates[side]), max(rates[side])],
                "ratio": statistics.median(ratios),
                "block_efficiency": tau,
                "identical": f"{sum(same)}/{len(same)}",
                "share_of_bandwidth": weights[side.precision] * median / tau / copied,
            }
        )
    return result


def rate(answers: Sequence[dict[str, Any]]) -> float:
    """Tokens per second of one pass over the prompts."""
    return sum(each["timed"] for each in answers) / sum(each["seconds"] for each in answers)
