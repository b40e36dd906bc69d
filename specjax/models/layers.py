"""Linear maps, norms and logits: the parts of the layers of decoders and draft networks.

The shape in which a product with weights is computed is chosen here for each backend. The blocks of
decoding have few rows: one to a few tokens of each text. XLA:CPU is fastest with such a block as it
is. XLA:TPU makes a loop of multiplications and sums of a product with one row, and transposes some
weights for products with few rows in three axes; both are slower than one matrix product over a
whole tile of 8 rows (``experiments/programs``). XLA:GPU multiplies one row with a weight
elementwise, writes the products to memory and adds them in another kernel; with two rows it is one
matrix product, which reads the weight once (``experiments/accelerator``).

Sources of the norms: RMSNorm (1910.07467), LayerNorm (1607.06450), Gemma (2403.08295).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from specjax.models.transformer_config import TransformerConfig
from specjax.types import Params

# Blocks of at most this many tokens per text are short.
TOKENS = 16
# By platform: fewest rows of a product with a short block. 8 is a tile of a TPU's vector memory.
ROWS = {"tpu": 8, "cuda": 2}
_ahead: set[str] = set()


def compile_ahead_for(platform: str) -> None:
    """From now on programs are traced for "tpu" or "cuda" too, also without such a device.

    For compiling ahead of time; call it before anything is traced. Products of short blocks are
    then traced twice, which takes twice as long.
    """
    _ahead.add(platform)


def compiled_for(platform: str) -> bool:
    """Whether programs may be compiled for "tpu" or "cuda"."""
    return platform in _ahead or jax.default_backend() == platform.replace("cuda", "gpu")


def product(compute: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``compute(x)`` for x [...,T,E], a linear map of the last axis: [...,T,F].

    Where the program is compiled for a TPU, a short block is computed as [1,R,E] with R >= 8, and
    for an NVIDIA GPU, one row as [1,2,E]: rows of zeros are added and their results dropped. Other
    platforms' programs do not change.
    """
    if x.ndim < 2 or x.shape[-2] > TOKENS:
        return compute(x)
    forms = {
        platform: functools.partial(_with_rows, compute, platform)
        for platform in ("tpu", "cuda")
        if compiled_for(platform)
        # On TPUs blocks with enough rows change too: they become one block.
        and (platform == "tpu" or math.prod(x.shape[:-1]) < ROWS[platform])
    }
    return jax.lax.platform_dependent(x, default=compute, **forms) if forms else compute(x)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x @ kernel`` for x [...,T,E] or [E] and a kernel [E,F], as ``product``."""
    return product(lambda x: x @ kernel, x)


def affine(params: Params, x: jax.Array) -> jax.Array:
    """``x @ kernel + bias``."""
    return matmul(x, params["kernel"]) + params["bias"]


def _with_rows(compute: Callable[[jax.Array], jax.Array], platform: str, x: jax.Array) -> jax.Array:
    *batch, size, width = x.shape
    more = max(0, -(-ROWS[platform] // max(1, math.prod(batch))) - size)
    padded = jnp.pad(x, [(0, 0)] * len(batch) + [(0, more), (0, 0)])
    # Without the barriers the compiler may remove the rows of zeros. XLA:GPU does not need the
    # second one, and fuses what follows with the product.
    flat = jax.lax.optimization_barrier(padded.reshape(1, -1, width))
    out = compute(flat)
    out = jax.lax.optimization_barrier(out) if platform == "tpu" else out
    return out.reshape(*batch, size + more, -1)[..., :size, :]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
    """A kernel as integers with a scale for each output channel: ``values * scale``."""

    values: Any  # i8[E,F]
    scale: Any  # f32[F]

    @classmethod
    def of(cls, kernel: np.ndarray) -> Int8:
        """The nearest one to a kernel f32[E,F]; the largest number of a channel becomes 127."""
        largest = np.abs(kernel).max(0)
        scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        return cls(np.rint(kernel / scale).clip(-127, 127).astype(np.int8), scale)

    def product(self, x: jax.Array) -> jax.Array:
        """``x`` [...,E] times the kernel: [...,F], summed in float32 at least and rounded once."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        axes = (((x.ndim - 1,), (0,)), ((), ()))
        values = jax.lax.platform_dependent(x, self.values, cpu=_after, default=lambda _, own: own)
        out = jax.lax.dot_general(x, values.astype(x.dtype), axes, preferred_element_type=wide)
        return (out * self.scale).astype(x.dtype)


def _after(x: jax.Array, values: jax.Array) -> jax.Array:
    """``values``, which depend on x: XLA:CPU would convert all kernels before the first product."""
    return values + jnp.minimum(jnp.isnan(x.reshape(-1)[:1]).astype(jnp.int8), 0)


def in_int8(path: Sequence[Any]) -> bool:
    """Whether the parameter at a path may be ``Int8``: the kernels of linear maps inside layers.

    LM heads, routers, gates of shared experts and convolutions are not, nor are experts, which have
    no kernel.
    """
    return path[-1] == "kernel" and "layers" in str(path[0]) and not _FINE.search(str(path[-2]))


_FINE = re.compile(r"router$|shared_gate$|_conv$")


class Linear(nnx.Linear):
    """A linear map of the last axis; long blocks are flattened to [B*T,E].

    For the gradient of a product with [B,T,E], XLA:CPU copies the weights into another layout. The
    short blocks of decoding are faster without the reshape there (``product``). The kernel may be
    ``Int8``.
    """

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        compute = functools.partial(super().__call__, out_sharding=out_sharding)
        if isinstance(kernel := self.kernel.get_value(), Int8):
            compute = functools.partial(self._in_int8, kernel)
        if inputs.shape[-2] <= TOKENS:
            return product(compute, inputs)
        return compute(inputs.reshape(-1, inputs.shape[-1])).reshape(*inputs.shape[:-1], -1)

    def _in_int8(self, kernel: Int8, x: jax.Array) -> jax.Array:
        out = kernel.product(x.astype(self.dtype))
        return out if self.bias is None else out + self.bias[...]


def tied_head(embed: nnx.Embed, hidden: jax.Array) -> jax.Array:
    """``hidden`` [...,T,E] times the embeddings [V,E]: [...,T,V].

    The product contracts the last axes of both. ``nnx.Embed.attend`` transposes the embeddings;
    XLA:CPU of jax 0.12 fuses the transpose, the product and the norm before them into one slow
    loop over the vocabulary.
    """

    def compute(x: jax.Array) -> jax.Array:
        x, table = embed.promote_dtype((x, embed.embedding[...]), dtype=embed.dtype)
        return jax.lax.dot_general(x, table, (((x.ndim - 1,), (1,)), ((), ())))

    return product(compute, hidden)


def linear_options(bias: bool, dtype, rngs: nnx.Rngs) -> dict:
    common = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
    return common | {"use_bias": bias, "kernel_init": init()}


def init():
    return nnx.initializers.normal(0.02)


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm with a bias, of the last axis; computed in float32.

    ``size`` is the length of that axis; None: the hidden size. (n, length): n norms, of the n
    vectors in the last two axes.
    """

    def __init__(self, config: TransformerConfig, dtype, size: int | tuple[int, int] | None = None):
        self.eps = config.norm_eps
        self.centred = config.norm == "layer"
        # Gemma's RMSNorm: the factor is 1 + the parameter, and is not rounded.
        self.around_one, self.once = config.norm == "rms1p", config.norm == "rms_once"
        size = config.hidden_size if size is None else size
        self.scale = nnx.Param((jnp.zeros if self.around_one else jnp.ones)(size, dtype))
        if self.centred:
            self.bias = nnx.Param(jnp.zeros(size, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.centred:
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        if self.around_one:
            return (y * (1 + self.scale[...].astype(y.dtype))).astype(x.dtype)
        if self.once:
            return (y * self.scale[...].astype(y.dtype)).astype(x.dtype)
        if self.centred:
            # Rounded once, after scale and bias, as in PyTorch; RMSNorm before its scale too.
            scale, bias = (own[...].astype(y.dtype) for own in (self.scale, self.bias))
            return (y * scale + bias).astype(x.dtype)
        return y.astype(x.dtype) * self.scale[...]


# Columns of a tile of a TPU's vector memory.
LANES = 128


def in_float32(logits: jax.Array) -> jax.Array:
    """Logits [...,V] in float32 at least; each device has all logits of its rows.

    In a program for a mesh that XLA divides (``jax.set_mesh``, ``jax.sharding.use_abstract_mesh``),
    the vocabulary is gathered once, here. Otherwise each sort, sum and maximum of sampling and
    acceptance is an exchange of its own. On TPUs it is not gathered if a part of the vocabulary is
    not a whole number of tiles: XLA:TPU joins such parts slowly, by its own estimate of cycles.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    parts = math.prod(size for kind, size in axes if kind == AxisType.Auto)
    if parts > 1 and not (compiled_for("tpu") and logits.shape[-1] % (parts * LANES)):
        free = [PartitionSpec.UNCONSTRAINED] * (logits.ndim - 1)
        logits = jax.lax.with_sharding_constraint(logits, PartitionSpec(*free, None))
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """c tanh(x / c) for a soft cap c; x itself for None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class Module(NamedTuple):
    """A constructor of modules, and functions for their parameters; a shape is a static value."""

    make: Callable[[Any, Any, nnx.Rngs], Any]  # (shape, dtype, rngs) -> nnx.Module

    def leaves(self, shape: Any, dtype: Any = jnp.float32) -> Params:
        """The shapes of the parameters, a plain dict of ``jax.ShapeDtypeStruct``."""
        return nnx.to_pure_dict(_abstract(self.make, shape, jnp.dtype(dtype))[1])

    def new(self, shape: Any, key: jax.Array, dtype: Any = jnp.float32) -> Params:
        """Random parameters (normal, standard deviation 0.02)."""
        return nnx.to_pure_dict(nnx.state(self.make(shape, dtype, nnx.Rngs(key))))

    def merge(self, shape: Any, params: Params, dtype: Any = None) -> Any:
        """The module with these parameters (inside a traced function, free at run time).

        Subtrees of ``params`` that it does not have are left out. ``dtype`` is that of activations
        (``at_least``); None: that of the parameters.
        """
        graph, state = _abstract(self.make, shape, at_least(dtype, params))
        # A copy: tracers must not be written into the cached state.
        state = jax.tree.map(lambda x: x, state)
        own = {name: value for name, value in params.items() if name in state}
        nnx.replace_by_pure_dict(state, own)
        return nnx.merge(graph, state)


@functools.cache
def _abstract(make: Callable[..., Any], shape: Any, dtype: Any) -> tuple[Any, Any]:
    """(graph, state) of the module, without arrays."""
    return nnx.split(nnx.eval_shape(lambda: make(shape, dtype, nnx.Rngs(0))))


def at_least(dtype: Any, params: Params) -> Any:
    """The dtype of activations: float64 for parameters of float64, else ``dtype``; None: theirs."""
    leaves = jax.tree.leaves(params)  # none in parameters that must not be read
    stored = leaves[0].dtype if leaves else jnp.dtype(jnp.float32)
    return jnp.dtype(stored if dtype is None or stored == jnp.float64 else dtype)


def dtype_of(params: Params) -> Any:
    """The dtype of a network with these parameters; float32 for None, a new one."""
    return jnp.dtype(jnp.float32 if params is None else jax.tree.leaves(params)[0].dtype)
