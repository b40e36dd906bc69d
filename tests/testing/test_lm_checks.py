"""``testing.check_lm``: right models pass, wrong ones fail in the check that names the mistake."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from mutants import targets

from specjax import testing
from specjax.errors import UserError
from specjax.models import lm

TABLE = testing.random_table(0, 5)


@functools.cache
def decoder(windows=(5, None)):
    config = dataclasses.replace(testing.tiny_config(vocab_size=32), windows=windows)
    params = lm.init_params(config, jax.random.key(0))
    return lm.from_config(config), jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)


def check(model, params, **keys):
    return testing.check_lm(model, params, progress=False, **keys)


def failed(model, params, **keys):
    """The checks that failed."""
    return [f.check for f in check(model, params, **keys).findings if f.passed is False]


def test_a_table_passes():
    report = check(testing.keyed(5), TABLE)
    assert report.passed and report.proves == "target" and len(report.findings) == 12


def test_parameters_as_constants_fail():
    model = testing.keyed(5)
    wrong = targets.params_are_constants(TABLE)(model)
    assert failed(wrong, TABLE) == ["new parameters, no new trace"]


@pytest.mark.parametrize("windows", [(), (5, None)])
def test_a_decoder_passes(windows):
    report = check(*decoder(windows))
    assert report.passed, str(report)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_wrong_decoder_fails(name):
    change, expected = targets.TARGETS[name]
    model, params = decoder()
    assert expected in failed(change(model), params)


def test_a_mistake_of_form_is_one_line():
    model = testing.keyed(5)

    def change(logits):
        return lambda *args: (lambda out, block: (out._replace(logits=logits(out.logits)), block))(
            *model.apply(*args)
        )

    for wrong, message in (
        (model._replace(apply=lambda *args: model.apply(*args)[0]), "returned Output; it must be"),
        (model._replace(apply=change(lambda x: x[:, -1])), "float32[3, 5]; they must be float32[3"),
        (
            model._replace(apply=change(lambda x: x.astype(jnp.bfloat16))),
            "returned logits bfloat16",
        ),
        (
            model._replace(apply=lambda *args: (model.apply(*args)[0], jnp.zeros(3))),
            "a block with an array [3]; it must be [B,T,...]",
        ),
        (
            model._replace(commit=lambda cache, *args: cache.replace(k=())),
            "commit of keyed changed the structure, a shape or a dtype of the cache",
        ),
        (
            model._replace(init_cache=lambda *sizes: jnp.zeros(sizes), commit=lambda c, *_: c),
            "length",
        ),
    ):
        findings = check(wrong, TABLE).findings
        assert len(findings) == 1 and findings[0].passed is False
        assert message in findings[0].detail
    with jax.enable_x64(True):
        wide, wrong = jnp.asarray(TABLE, jnp.float64), change(lambda x: x.astype(jnp.float32))
        findings = check(model._replace(apply=wrong), wide).findings
    assert "returned logits float32[3, 7, 5]; they must be float64" in findings[0].detail


def test_what_cannot_be_checked():
    with pytest.raises(UserError, match="reads a source with an encoder"):
        check(*testing.tiny_t5())
    with pytest.raises(UserError, match="has 16 positions; the checks need 20"):
        check(testing.keyed(5)._replace(max_positions=16), TABLE)


def test_logits_that_do_not_depend_on_the_text_prove_nothing():
    report = check(testing.keyed(5), TABLE * 0 + jnp.arange(5.0), first_failure=True)
    assert not report.passed and "give parameters with larger matrices" in str(report)
