"""Every family compared with transformers: the logits of all kinds of passes, and saved models.

The reference of a token is transformers on its whole text alone, without a cache; for a node of a
tree that is the committed text and the path to the node.
"""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import HF_FAMILIES, VOCAB, reference_model

from specjax import prompt, tree
from specjax.models import hf
from specjax.models.families import FAMILIES

TOLERANCE = 1e-4
LENGTHS = (19, 9, 14)
SLOTS = 48
# 0 - 1 - 3, 0 - 1 - 4 - 6, 0 - 2 - 5: the first node follows the committed text.
PARENTS = (-1, 0, 0, 1, 1, 2, 4)
PATHS = ((0, 1, 4, 6), (0, 2, 5, 0), (0, 1, 3, 0))


class Rows:
    """The committed texts of three rows, the cache with them, and the comparison of logits."""

    def __init__(self, loaded, reference):
        self.loaded, self.reference = loaded, reference
        self.rng = np.random.default_rng(1)
        self.texts = [list(self.rng.integers(3, VOCAB, size)) for size in LENGTHS]
        self.apply = jax.jit(loaded.lm.apply)
        self.commit = jax.jit(loaded.lm.commit)
        self.cache = loaded.lm.init_cache(len(LENGTHS), SLOTS)

    def prefill(self):
        tokens, lengths = prompt.pack_prompts(self.texts)
        # Chunks that are longer than the ring of a layer with a window.
        feed = jax.jit(functools.partial(prompt.feed, self.loaded.lm, chunk=8))
        out, self.cache = feed(self.loaded.params, tokens, lengths, self.cache)
        logits = self.loaded.lm.unembed(self.loaded.params, out.hidden)
        for row, text in enumerate(self.texts):
            self.compare(logits[row, : len(text)], self.reference(text))

    def feed(self, size, counts, calls=1, parents=None):
        """Feeds a block in several calls, compares all logits, and commits counts[b] tokens."""
        tokens = self.rng.integers(3, VOCAB, (len(self.texts), size))
        block, logits = None, []
        for part in np.array_split(np.arange(size), calls):
            layout = None
            if parents is not None:
                layout = tree.layout(jnp.asarray([parents[: part[-1] + 1]] * 3), len(part))
            piece = jnp.asarray(tokens[:, part], jnp.int32)
            out, own = self.apply(self.loaded.params, piece, self.cache, layout, block)
            block = own if block is None else tree.join(block, own)
            logits.append(np.asarray(out.logits))
        logits = np.concatenate(logits, 1)
        chain = list(range(-1, size - 1)) if parents is None else parents
        for row, text in enumerate(self.texts):
            for node in range(size):
                path = path_to(chain, node)
                expected = self.reference(text + [tokens[row, i] for i in path])
                self.compare(logits[row, node], expected[-1])
        paths = [list(range(size))] * 3 if parents is None else PATHS
        for row, count in enumerate(counts):
            self.texts[row] = self.texts[row] + [tokens[row, i] for i in paths[row][:count]]
        path = None if parents is None else jnp.asarray(paths, jnp.int32)
        self.cache = self.commit(self.cache, block, jnp.asarray(counts, jnp.int32), path)
        assert list(self.cache.length) == [len(text) for text in self.texts]

    def compare(self, got, expected):
        np.testing.assert_allclose(np.asarray(got), expected, rtol=0, atol=TOLERANCE)


def path_to(parents, node):
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def logits_of(torch, model):
    """Text -> the logits after each of its tokens, f32[T,V]."""

    @functools.cache
    def of(text):
        with torch.no_grad():
            return model(torch.tensor([text])).logits[0].numpy()

    return lambda text: of(tuple(int(token) for token in text))


@pytest.mark.slow
@pytest.mark.parametrize("name", HF_FAMILIES)
def test_parity_of_all_passes(name, torch, transformers, tmp_path):
    model = reference_model(torch, transformers, name)
    model.save_pretrained(tmp_path / "theirs")
    loaded = hf.load(tmp_path / "theirs", dtype=jnp.float32)
    reference = logits_of(torch, model)
    assert np.std(reference([5, 9, 7])) > 0.3  # otherwise the comparison would prove little
    rows = Rows(loaded, reference)
    rows.prefill()
    rows.feed(1, (1, 1, 0))
    rows.feed(1, (1, 1, 1))
    rows.feed(8, (2, 8, 1))
    rows.feed(5, (5, 0, 3), calls=2)
    rows.feed(7, (4, 2, 1), parents=PARENTS)
    rows.feed(7, (0, 3, 3), calls=3, parents=PARENTS)
    rows.feed(1, (0, 0, 0))

    # transformers must read the same model back from what we save.
    hf.save(tmp_path / "ours", loaded.config, loaded.params, max_shard_bytes=20_000)
    again = hf.load(tmp_path / "ours", dtype=jnp.float32)
    assert again.config == loaded.config and again.lm is loaded.lm
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values())
    np.testing.assert_array_equal(logits_of(torch, model)(rows.texts[0]), reference(rows.texts[0]))


def test_every_family_is_compared(transformers):
    kinds = {getattr(transformers, kind).model_type for kind, _ in HF_FAMILIES.values()}
    assert kinds == set(FAMILIES)


def test_the_text_model_of_a_gemma_3_with_images(torch, transformers, tmp_path):
    """The vision tower is not read, and the names of both layouts are known."""
    from safetensors.numpy import load_file, save_file

    reference = reference_model(torch, transformers, "gemma3_text")
    reference.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"text_config": raw}))
    tensors = load_file(tmp_path / "model.safetensors")
    expected = logits_of(torch, reference)([3, 9, 20, 7])
    for prefix in ("model.language_model.", "language_model.model."):
        named = {name.replace("model.", prefix, 1): x for name, x in tensors.items()}
        for tower in ("vision_tower.", "model.multi_modal_projector."):
            named[f"{tower}weight"] = np.ones((2, 2), np.float32)
        save_file(named, tmp_path / "model.safetensors")
        loaded = hf.load(tmp_path, dtype=jnp.float32)
        cache = loaded.lm.init_cache(1, 0)
        out, _ = loaded.lm.apply(loaded.params, jnp.asarray([[3, 9, 20, 7]]), cache)
        np.testing.assert_allclose(np.asarray(out.logits[0]), expected, rtol=0, atol=TOLERANCE)
