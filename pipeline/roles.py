"""Tensor name → why the tensor is wanted. The only place that reads names.

GGUF names are ``<base>.weight``, ``<base>.bias`` or a bare ``<base>``; the bases are those of the ``gguf`` package's
``TENSOR_NAMES``, with the layer number in place of ``{bid}``. Only a ``.weight`` can be a matrix or a table; everything
else is bound as it is. Which ``.weight`` is what follows from how llama.cpp's graphs use it: a product, a row look-up,
or an element-wise or convolution operand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

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

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")
_MAX_DIGITS = 9
"""Of a layer's number: so many stay below ``_LAYER_LAST``, and keep hostile names out of ``int()``."""
_BLOCK = re.compile(rf"blk\.([0-9]{{1,{_MAX_DIGITS}}})\.")
_FIRST = frozenset(
    {"token_embd", "token_embd_norm", "per_layer_token_embd", "token_types", "position_embd", "rope_freqs"}
)

_SUFFIXES = frozenset({"weight", "bias", "scale", "input_scale"})

_LAYER_FIRST = -1
_LAYER_LAST = 1 << 30


class Role(NamedTuple):
    """What a name says. ``layer`` orders the forward pass: -1 before the first block, then its number, then the rest."""

    intent: Intent
    layer: int
    known: bool = True
    """False where the naming convention does not have the name."""


@cache
def _weights() -> Mapping[str, Intent]:
    """Every base of the naming convention, and why its ``.weight`` is wanted."""
    from gguf.constants import TENSOR_NAMES  # 0.1 s to import, and only planning needs it

    return {base: _intent(base) for base in TENSOR_NAMES.values()}


def _intent(base: str) -> Intent:
    if base in _LOOKUP:
        return Intent.LOOKUP
    word = next(part for part in reversed(base.split(".")) if part != "{bid}")
    return Intent.BINDABLE if _BINDABLE_WORD.fullmatch(word) else Intent.LINEAR


def _role(name: str) -> Role:
    base, dot, suffix = name.rpartition(".")
    if not dot or suffix not in _SUFFIXES:
        base, suffix = name, ""
    layer = _LAYER_LAST
    if number := _NUMBER.search(base):
        first, last = number.span()
        if base[:first] == "blk." and last - first <= _MAX_DIGITS and last < len(name):
            layer = int(number[0])
        base = f"{base[:first]}{{bid}}{base[last:]}"
    elif base in _FIRST:
        layer = _LAYER_FIRST
    intent = _weights().get(base)
    if intent is None:
        return Role(Intent.BINDABLE, layer, known=False)
    return Role(intent if suffix == "weight" else Intent.BINDABLE, layer)


class _Alike(dict[int, Role]):
    """Roles that differ in the layer alone, by layer: fewer objects than tensors."""

    def __init__(self, intent: Intent, known: bool) -> None:
        self._intent, self._known = intent, known

    def __missing__(self, layer: int) -> Role:
        role = self[layer] = Role(self._intent, layer, self._known)
        return role


def roles(names: Iterable[str]) -> dict[str, Role]:
    """The role of every tensor of one model, by name.

    All names are needed at once: ``token_embd`` is also the output matrix where the file has no ``output.weight``.
    """
    result: dict[str, Role] = {}
    kinds: dict[str, _Alike] = {}
    """By what follows the number of a block."""
    alike: dict[tuple[Intent, bool], _Alike] = {}
    block, layer = "", 0
    for name in names:
        rest = name.removeprefix(block)
        if rest == name:
            found = _BLOCK.match(name)
            if found is None:
                result[name] = _role(name)
                continue
            block, layer = found[0], int(found[1])
            rest = name[len(block) :]
        kind = kinds.get(rest)
        if kind is None:
            intent, _, known = _role(name)
            kind = kinds[rest] = alike.setdefault((intent, known), _Alike(intent, known))
        result[name] = kind[layer]
    if "token_embd.weight" in result and "output.weight" not in result:
        tied = result["token_embd.weight"]
        result["token_embd.weight"] = tied._replace(intent=tied.intent | Intent.LINEAR)
    return result
