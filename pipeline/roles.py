"""Tensor name → why the tensor is wanted. The only place that reads names.

GGUF names are ``<base>.weight``, ``<base>.bias`` or a bare ``<base>``; the bases are those of the ``gguf`` package's
``TENSOR_NAMES``, with the layer number in place of ``{bid}``. Only a ``.weight`` can be a matrix or a table; everything
else is bound as it is. Which ``.weight`` is what follows from how llama.cpp's graphs use it: a product, a row look-up,
or an element-wise or convolution operand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from ggufstream.options import Intent

__all__ = ["Role", "roles"]

_LOOKUP = frozenset(
    {
        "token_embd",
        "per_layer_token_embd",
        "token_types",
        "position_embd",
        "blk.{bid}.nextn.embed_tokens",
        "mm.embedding",
        "mm.a.embedding",
    }
)

# Applied to the part after the last dot that is not a number.
_BINDABLE_WORD = re.compile(
    r"""
      (?:.*_)? (?:norm|norm_[0-9a-z]+|sub_norm|enorm|hnorm|ln|scale|sinks|rot_embd|gamma|bn) (?:_[0-9])?
    | norm[0-9] | ln[0-9] | ln_(?:kv|post|q) | ls[0-9] | norm_(?:embd|mid|pre|conv|exps)
    | rope_freqs | rope_factors_(?:long|short)
    | ssm_(?:a|d|conv1d(?:_[kqv])?)
    | time_mix_(?:a0|v0|w0|decay|first|k_a|k_k|r_k|lerp_[a-z]+|ln) | channel_mix_lerp_[kr]
    | conv | conv[0-9](?:d)? | conv_dw | dw | peg | patch_embd | neck | net_[0-9]
    | position_embd | pos_embd(?:_k)? | pos_[hw] | class_embd | attn_rel_b | cross_attn_rel_b | attn_rel_pos_emb
    | pos_bias_[uv] | per_dim(?:_k)?_scale | query | proj_query | std_bias
    | boi | eoi | image_begin | image_end | image_newline | img_break | view_seperator | exp_probs_b
    """,
    re.VERBOSE,
)

_LAYER = re.compile(r"blk\.([0-9]{1,9})\.")  # nine digits stay below _LAYER_LAST, and hostile names out of int()
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")
_FIRST = frozenset(
    {"token_embd", "token_embd_norm", "per_layer_token_embd", "token_types", "position_embd", "rope_freqs"}
)

_LAYER_FIRST = -1
_LAYER_LAST = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a name says. ``layer`` orders the forward pass: -1 before the first block, then its number, then the rest."""

    intent: Intent
    layer: int
    known: bool = True
    """False where the naming convention does not have the name."""


@cache
def _known_bases() -> frozenset[str]:
    from gguf.constants import TENSOR_NAMES  # 0.1 s to import, and only planning needs it

    return frozenset(TENSOR_NAMES.values())


def _split(name: str) -> tuple[str, str]:
    """Base with ``{bid}`` for the layer number, and suffix: ``blk.3.attn_q.weight`` → ``blk.{bid}.attn_q``, ``weight``."""
    base, dot, suffix = name.rpartition(".")
    if not dot or suffix not in {"weight", "bias", "scale", "input_scale"}:
        base, suffix = name, ""
    return _NUMBER.sub("{bid}", base, count=1), suffix


def _layer(name: str, base: str) -> int:
    match = _LAYER.match(name)
    if match is not None:
        return int(match[1])
    return _LAYER_FIRST if base in _FIRST else _LAYER_LAST


def _intent(base: str, suffix: str) -> Intent:
    if suffix != "weight":
        return Intent.BINDABLE
    if base in _LOOKUP:
        return Intent.LOOKUP
    word = next(part for part in reversed(base.split(".")) if part != "{bid}")
    return Intent.BINDABLE if _BINDABLE_WORD.fullmatch(word) else Intent.LINEAR


def roles(names: Iterable[str]) -> dict[str, Role]:
    """The role of every tensor of one model, by name.

    All names are needed at once: ``token_embd`` is also the output matrix where the file has no ``output.weight``.
    """
    result = {}
    for name in names:
        base, suffix = _split(name)
        known = base in _known_bases()
        intent = _intent(base, suffix) if known else Intent.BINDABLE
        result[name] = Role(intent=intent, layer=_layer(name, base), known=known)
    if "token_embd.weight" in result and "output.weight" not in result:
        tied = result["token_embd.weight"]
        result["token_embd.weight"] = replace(tied, intent=tied.intent | Intent.LINEAR)
    return result
