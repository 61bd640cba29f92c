"""A small transformer in numpy on the weights of a loaded model: what ``examples/logits.py`` runs.

Everything large stays where ggufstream has put it: products are computed there (``await model.linear(name, x)``), rows
of tables are looked up there (``await model.rows(name, ids)``). Only the small tensors that are bound as they are
(norms, rotary factors, convolutions) are read into numpy, once, and what lies between two products is numpy.

Four families, by the file's ``general.architecture``; each class says which published description it follows. Tensors
and metadata have the names that llama.cpp's converters give them. Variants with experts, biases or stretched rotary
positions are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import ggufstream

__all__ = ["FAMILIES", "Past", "Transformer", "transformer"]

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(slots=True)
class Past:
    """What a sequence has computed that its next tokens need. A new sequence begins with an empty one."""

    tokens: int = 0
    rows: dict[str, Floats] = field(default_factory=dict)
    """One row a token: keys, values, and inputs of convolutions."""
    states: dict[str, Floats] = field(default_factory=dict)
    """Of layers that sum the past up."""

    def extend(self, name: str, new: Floats) -> Floats:
        """Append rows, and return all."""
        self.rows[name] = np.concatenate([self.rows[name], new]) if name in self.rows else new
        return self.rows[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """How a layer attends."""

    heads: int
    kv_heads: int
    head_size: int
    scale: float
    rotary_base: float
    rotary_size: int
    """Elements of a head that are rotated, the first ones."""
    rotary_factors: Floats | None = None
    """Divide the frequencies."""
    window: int | None = None
    """The last tokens that are seen, the own one included."""


class Transformer:
    """What the families share: the residual stream from embedding to logits. ``transformer`` makes one."""

    rotates_neighbours = False
    """Whether the file keeps the two elements of a rotated pair side by side, else half a head apart."""
    embedding_scale = 1.0

    def __init__(self, model: ggufstream.Model, vectors: Mapping[str, Floats]) -> None:
        self.model = model
        self.vectors = vectors
        self.layers: int = self.value("block_count") - self.value("nextn_predict_layers", 0)  # those only draft
        self.width: int = self.value("embedding_length")
        self.epsilon: float = self.value("attention.layer_norm_rms_epsilon")
        self.output = "output.weight" if "output.weight" in model else "token_embd.weight"

    def value(self, key: str, default: Any = None, *, layer: int = 0) -> Any:
        """A hyperparameter of the file; some are arrays with one value a layer."""
        name = f"{self.model.metadata['general.architecture']}.{key}"
        found = self.model.metadata.get(name, default)
        if found is None:
            raise ValueError(f"{self.model.index.path} has no {name}")
        return found[layer] if isinstance(found, Sequence) and not isinstance(found, str) else found

    async def logits(self, ids: Sequence[int], past: Past) -> Floats:
        """Run further tokens of a sequence; the logits of the token that follows them, shape ``(vocabulary,)``."""
        x = await self.model.rows("token_embd.weight", ids) * np.float32(self.embedding_scale)
        context = await self.context(ids, x)
        for n in range(self.layers):
            x = await self.layer(n, x, past, context)
        past.tokens += len(ids)
        logits = await self.linear(self.output, self.norm("output_norm", x[-1]))
        cap = self.value("final_logit_softcapping", 0.0)
        return cap * np.tanh(logits / np.float32(cap)) if cap else logits

    async def context(self, ids: Sequence[int], x: Floats) -> Floats | None:
        """What every layer gets besides the stream."""
        return None

    async def layer(self, n: int, x: Floats, past: Past, context: Floats | None) -> Floats:
        raise NotImplementedError

    def attention_of(self, n: int) -> Attention:
        """How layer ``n`` attends; here as in Llama."""
        heads = self.value("attention.head_count", layer=n)
        size = self.value("attention.key_length", self.width // heads)
        return Attention(
            heads=heads,
            kv_heads=self.value("attention.head_count_kv", heads, layer=n),
            head_size=size,
            scale=size**-0.5,
            rotary_base=self.value("rope.freq_base", 10_000.0),
            rotary_size=self.value("rope.dimension_count", size),
            rotary_factors=self.vectors.get("rope_freqs.weight"),
        )

    async def attend(self, n: int, x: Floats, past: Past) -> Floats:
        """Attention with rotated queries and keys, those normalized by head first where the file has norms for them."""
        how, name = self.attention_of(n), f"blk.{n}.attn"
        q = self.rotate(how, self.head_norm(f"{name}_q_norm", await self.heads(f"{name}_q", x, how)), past)
        k = self.rotate(how, self.head_norm(f"{name}_k_norm", await self.heads(f"{name}_k", x, how)), past)
        v = await self.heads(f"{name}_v", x, how)
        mixed = mix(how, q, past.extend(f"{name}_k", k), past.extend(f"{name}_v", v))
        return await self.linear(f"{name}_output.weight", mixed)

    async def heads(self, name: str, x: Floats, how: Attention) -> Floats:
        """A product, cut into heads: shape ``(tokens, heads, head_size)``."""
        return (await self.linear(f"{name}.weight", x)).reshape(len(x), -1, how.head_size)

    async def linear(self, name: str, x: Floats) -> Floats:
        return await self.model.linear(name, x)

    def norm(self, name: str, x: Floats) -> Floats:
        """Divide by the root of the mean square, over the last axis, and multiply with a weight."""
        return rms_norm(x, self.epsilon) * self.vectors[f"{name}.weight"]

    def head_norm(self, name: str, x: Floats) -> Floats:
        return self.norm(name, x) if f"{name}.weight" in self.vectors else x

    def rotate(self, how: Attention, x: Floats, past: Past) -> Floats:
        """Rotary positions (Su et al. 2021) for heads of new tokens, shape ``(tokens, heads, head_size)``."""
        half = how.rotary_size // 2
        frequencies = how.rotary_base ** (-np.arange(half) / half)
        if how.rotary_factors is not None:
            frequencies = frequencies / how.rotary_factors
        angles = np.outer(past.tokens + np.arange(len(x)), frequencies)[:, None]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = slice(0, half), slice(half, 2 * half)
        if self.rotates_neighbours:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        rotated = x.copy()
        rotated[..., first] = x[..., first] * cos - x[..., second] * sin
        rotated[..., second] = x[..., first] * sin + x[..., second] * cos
        return rotated

    async def feed_forward(self, n: int, x: Floats) -> Floats:
        gate = await self.linear(f"blk.{n}.ffn_gate.weight", x)
        up = await self.linear(f"blk.{n}.ffn_up.weight", x)
        return await self.linear(f"blk.{n}.ffn_down.weight", self.activation(gate) * up)

    def activation(self, x: Floats) -> Floats:
        return silu(x)


class Llama(Transformer):
    """Llama, as in llama.cpp's ``src/models/llama.cpp`` and Hugging Face's ``models/llama/modeling_llama.py``.

    The file differs from Hugging Face's weights in the order of the rows of q and k.
    """

    rotates_neighbours = True

    async def layer(self, n: int, x: Floats, past: Past, context: Floats | None) -> Floats:
        x = x + await self.attend(n, self.norm(f"blk.{n}.attn_norm", x), past)
        return x + await self.feed_forward(n, self.norm(f"blk.{n}.ffn_norm", x))


class Gemma3(Transformer):
    """Gemma 3 (270M, 1B), as in llama.cpp's ``src/models/gemma3.cpp`` and Hugging Face's
    ``models/gemma3/modeling_gemma3.py``.

    Attention and feed-forward are normalized before and after. Five layers of six see a sliding window, with a rotary
    base of their own. The file's norm weights have the one added that Hugging Face's code adds.
    """

    def __init__(self, model: ggufstream.Model, vectors: Mapping[str, Floats]) -> None:
        super().__init__(model, vectors)
        self.embedding_scale = self.width**0.5

    async def layer(self, n: int, x: Floats, past: Past, context: Floats | None) -> Floats:
        attended = await self.attend(n, self.norm(f"blk.{n}.attn_norm", x), past)
        x = x + self.norm(f"blk.{n}.post_attention_norm", attended)
        fed = await self.feed_forward(n, self.norm(f"blk.{n}.ffn_norm", x))
        return x + self.norm(f"blk.{n}.post_ffw_norm", fed)

    def has_window(self, n: int) -> bool:
        pattern = self.value("attention.sliding_window_pattern", 6, layer=n)
        return pattern if isinstance(pattern, bool) else (n + 1) % pattern != 0

    def attention_of(self, n: int) -> Attention:
        full = super().attention_of(n)
        if not self.has_window(n):
            return full
        return replace(
            full,
            rotary_base=self.value("rope.freq_base_swa", 10_000.0),
            window=self.value("attention.sliding_window"),
        )

    def activation(self, x: Floats) -> Floats:
        return gelu(x)


class Gemma4(Gemma3):
    """Gemma 4 without experts (E2B, E4B), as in llama.cpp's ``src/models/gemma4.cpp`` and Hugging Face's
    ``models/gemma4/modeling_gemma4.py``.

    As Gemma 3, and: every layer gets an embedding of its own for each token (from the table ``per_layer_token_embd``,
    the one that is worth leaving in the file, and from a projection of the token's first embedding); layers with a
    window have another head size; values are normalized; the last layers use the keys and values of an earlier one.
    """

    async def context(self, ids: Sequence[int], x: Floats) -> Floats | None:
        """The embeddings by layer, shape ``(tokens, layers, size)``."""
        size = self.value("embedding_length_per_layer_input")
        looked_up = await self.model.rows("per_layer_token_embd.weight", ids) * np.float32(size**0.5)
        projected = await self.linear("per_layer_model_proj.weight", x) * np.float32(self.width**-0.5)
        normalized = self.norm("per_layer_proj_norm", projected.reshape(len(ids), self.layers, size))
        return (normalized + looked_up.reshape(normalized.shape)) * np.float32(0.5**0.5)

    async def layer(self, n: int, x: Floats, past: Past, context: Floats | None) -> Floats:
        assert context is not None
        x = await super().layer(n, x, past, context)
        gated = gelu(await self.linear(f"blk.{n}.inp_gate.weight", x)) * context[:, n]
        x = x + self.norm(f"blk.{n}.post_norm", await self.linear(f"blk.{n}.proj.weight", gated))
        return x * self.vectors.get(f"blk.{n}.layer_output_scale.weight", np.float32(1))

    def attention_of(self, n: int) -> Attention:
        how = replace(super().attention_of(n), scale=1.0)
        if not self.has_window(n):
            return how
        size = self.value("attention.key_length_swa", how.head_size)
        return replace(
            how,
            head_size=size,
            rotary_size=self.value("rope.dimension_count_swa", size),
            rotary_factors=None,
        )

    async def attend(self, n: int, x: Floats, past: Past) -> Floats:
        how, name = self.attention_of(n), f"blk.{n}.attn"
        q = self.rotate(how, self.norm(f"{name}_q_norm", await self.heads(f"{name}_q", x, how)), past)
        own = self.layers - self.value("attention.shared_kv_layers", 0)
        if n < own:
            k = self.norm(f"{name}_k_norm", await self.heads(f"{name}_k", x, how))
            v = rms_norm(await self.heads(f"{name}_v", x, how), self.epsilon)
            past.extend(f"{name}_k", self.rotate(how, k, past))
            past.extend(f"{name}_v", v)
            source = n
        else:
            source = own - (2 if self.has_window(n) else 1)  # the last of its kind that has its own
        mixed = mix(how, q, past.rows[f"blk.{source}.attn_k"], past.rows[f"blk.{source}.attn_v"])
        return await self.linear(f"{name}_output.weight", mixed)


class Qwen35(Transformer):
    """Qwen 3.5, dense, text only, as in llama.cpp's ``src/models/qwen35.cpp`` and Hugging Face's
    ``models/qwen3_5/modeling_qwen3_5.py``.

    Three layers of four are gated delta nets (Yang et al. 2024): each head keeps a matrix that maps keys to values, lets
    it fade, and corrects it with every token. The fourth is attention with an output gate. The file's value heads are
    in the order that llama.cpp wants: head ``i`` goes with key head ``i`` modulo their number.
    """

    async def layer(self, n: int, x: Floats, past: Past, context: Floats | None) -> Floats:
        is_attention = (n + 1) % self.value("full_attention_interval", 4) == 0
        mixer = self.attend if is_attention else self.delta_net
        x = x + await mixer(n, self.norm(f"blk.{n}.attn_norm", x), past)
        return x + await self.feed_forward(n, self.norm(f"blk.{n}.post_attention_norm", x))

    async def attend(self, n: int, x: Floats, past: Past) -> Floats:
        """As usual, but each head of q is followed by as many elements that gate what it finds."""
        how, name = self.attention_of(n), f"blk.{n}.attn"
        both = (await self.heads(f"{name}_q", x, how)).reshape(len(x), how.heads, 2, how.head_size)
        q = self.rotate(how, self.norm(f"{name}_q_norm", both[:, :, 0]), past)
        k = self.rotate(how, self.norm(f"{name}_k_norm", await self.heads(f"{name}_k", x, how)), past)
        v = await self.heads(f"{name}_v", x, how)
        mixed = mix(how, q, past.extend(f"{name}_k", k), past.extend(f"{name}_v", v))
        return await self.linear(f"{name}_output.weight", mixed * sigmoid(both[:, :, 1].reshape(len(x), -1)))

    async def delta_net(self, n: int, x: Floats, past: Past) -> Floats:
        name = f"blk.{n}"
        size, key_heads = self.value("ssm.state_size"), self.value("ssm.group_count")
        value_heads = self.value("ssm.time_step_rank")

        channels = self.convolve(name, await self.linear(f"{name}.attn_qkv.weight", x), past)
        q, k, v = np.split(channels.reshape(len(x), -1, size), [key_heads, 2 * key_heads], axis=1)
        q, k = (np.tile(unit_length(part, self.epsilon), (1, value_heads // key_heads, 1)) for part in (q, k))

        strength = sigmoid(await self.linear(f"{name}.ssm_beta.weight", x))
        step = softplus(await self.linear(f"{name}.ssm_alpha.weight", x) + self.vectors[f"{name}.ssm_dt.bias"])
        kept = np.exp(step * self.vectors[f"{name}.ssm_a"])
        state = past.states.get(name, np.zeros((value_heads, size, size), np.float32))
        found, past.states[name] = delta_rule(q * np.float32(size**-0.5), k, v, kept, strength, state)

        gate = silu(await self.linear(f"{name}.attn_gate.weight", x))
        gated = self.norm(f"{name}.ssm_norm", found).reshape(len(x), -1) * gate
        return await self.linear(f"{name}.ssm_out.weight", gated)

    def convolve(self, name: str, x: Floats, past: Past) -> Floats:
        """Each channel over the last few tokens; zeros before the first."""
        weight = self.vectors[f"{name}.ssm_conv1d.weight"]  # (channels, taps)
        taps = weight.shape[1]
        before = past.rows.get(name, np.zeros((taps - 1, x.shape[1]), np.float32))
        inputs = np.concatenate([before, x])
        past.rows[name] = inputs[len(x) :]
        return silu(sum(inputs[i : i + len(x)] * weight[:, i] for i in range(taps)))


def mix(how: Attention, q: Floats, k: Floats, v: Floats) -> Floats:
    """Attention of the last ``len(q)`` tokens to all ``len(k)``; a group of query heads shares a key head.

    Shapes: ``(tokens, heads, head_size)``, with ``kv_heads`` for ``k`` and ``v``; the result is ``(tokens, heads ×
    head_size)``.
    """
    grouped = q.reshape(len(q), how.kv_heads, -1, how.head_size).transpose(1, 2, 0, 3)
    scores = grouped @ k.transpose(1, 2, 0)[:, None] * np.float32(how.scale)  # (kv_heads, group, new tokens, tokens)
    distance = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))
    hidden = (distance < 0) | (distance >= (how.window or len(k)))
    weights = softmax(np.where(hidden, np.float32(-np.inf), scores))
    return (weights @ v.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(len(q), -1)


def delta_rule(q: Floats, k: Floats, v: Floats, kept: Floats, strength: Floats, state: Floats) -> tuple[Floats, Floats]:
    """What the heads find, token by token, shape ``(tokens, heads, size)``, and the state after the last.

    The state, ``(heads, size, size)``, maps a key to a value. Each token lets it fade to the share ``kept``, and then
    moves what it gives for ``k`` towards ``v``, all the way for a ``strength`` of one (both ``(tokens, heads)``).
    """
    found = np.empty_like(v)
    for t in range(len(q)):
        state = state * kept[t][:, None, None]
        missing = v[t] - (k[t][:, None] @ state)[:, 0]
        state = state + k[t][:, :, None] * (strength[t][:, None] * missing)[:, None]
        found[t] = (q[t][:, None] @ state)[:, 0]
    return found, state


def rms_norm(x: Floats, epsilon: float) -> Floats:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon))


def unit_length(x: Floats, epsilon: float) -> Floats:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(epsilon))


def softmax(x: Floats) -> Floats:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def sigmoid(x: Floats) -> Floats:
    return np.float32(0.5) * (np.float32(1) + np.tanh(np.float32(0.5) * x))  # as 1 / (1 + exp(-x)), without overflow


def silu(x: Floats) -> Floats:
    return x * sigmoid(x)


def gelu(x: Floats) -> Floats:
    """By the approximation with tanh, as Gemma was trained."""
    inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))


def softplus(x: Floats) -> Floats:
    return np.logaddexp(np.float32(0), x)


FAMILIES: Mapping[str, type[Transformer]] = {"llama": Llama, "gemma3": Gemma3, "gemma4": Gemma4, "qwen35": Qwen35}
"""By ``general.architecture``."""


async def transformer(model: ggufstream.Model) -> Transformer:
    """The transformer that a loaded file is the weights of.

    Raises:
        ValueError: It is of another family, or of a variant that is not written here.
    """
    architecture = str(model.metadata.get("general.architecture"))
    if architecture not in FAMILIES:
        raise ValueError(f"{model.index.path} is of the family {architecture}; here are {', '.join(FAMILIES)}")
    if model.metadata.get(f"{architecture}.expert_count"):
        raise ValueError(f"{model.index.path} has experts, which are not written here")
    if model.metadata.get(f"{architecture}.rope.scaling.type", "none") != "none":
        raise ValueError(f"{model.index.path} stretches rotary positions, which is not written here")
    vectors = {}
    for name, weight in model.items():
        if weight.intent == ggufstream.Intent.BINDABLE:
            if name.endswith(".bias") and not name.endswith(".ssm_dt.bias"):
                raise ValueError(f"{model.index.path} has biases, such as {name}, which are not written here")
            if weight.type.name != "F32":
                raise ValueError(f"{name} is {weight.type.name}; only F32 is bound here")
            vectors[name] = np.frombuffer(await weight.read(), "<f4").reshape(weight.shape)
    return FAMILIES[architecture](model, vectors)
