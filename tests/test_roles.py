"""Roles: every name of the convention has an intent and a layer."""

from __future__ import annotations

import pytest
from gguf.constants import TENSOR_NAMES

from ggufstream.options import Intent
from ggufstream.roles import Role, roles

LINEAR, BINDABLE, LOOKUP = Intent.LINEAR, Intent.BINDABLE, Intent.LOOKUP


def role(name: str, *others: str) -> Role:
    return roles([name, *others])[name]


@pytest.mark.parametrize("bid", [0, 7, 123])
def test_every_name_of_the_convention_is_known(bid: int) -> None:
    bases = [base.format(bid=bid, xid=1) for base in TENSOR_NAMES.values()]
    for suffix in ("", ".weight", ".bias", ".scale", ".input_scale"):
        found = roles(base + suffix for base in bases)
        assert [name for name, role in found.items() if not role.known] == []
        if suffix != ".weight":
            assert {role.intent for role in found.values()} == {BINDABLE}


def test_norms_biases_and_tables_are_never_matrices() -> None:
    for base in TENSOR_NAMES.values():
        name = base.format(bid=1, xid=1) + ".weight"
        if base.endswith(("norm", "norm_2", "_scale", "sinks", "_ln")):
            assert role(name).intent == BINDABLE, name
        if any(word in base for word in ("_exps", "attn_q.", "attn_qkv", "ffn_down.")) and "norm" not in base:
            assert role(name).intent == LINEAR, name


@pytest.mark.parametrize(
    ("name", "intent"),
    [
        ("output.weight", LINEAR),
        ("output.bias", BINDABLE),
        ("output_norm.weight", BINDABLE),
        ("output_norm.bias", BINDABLE),
        ("per_layer_token_embd.weight", LOOKUP),
        ("per_layer_model_proj.weight", LINEAR),
        ("per_layer_proj_norm.weight", BINDABLE),
        ("position_embd.weight", LOOKUP),
        ("token_types.weight", LOOKUP),
        ("token_embd_norm.weight", BINDABLE),
        ("rope_freqs.weight", BINDABLE),
        ("rope_factors_long.weight", BINDABLE),
        ("rope_factors_short.weight", BINDABLE),
        ("cls.weight", LINEAR),
        ("cls.output.weight", LINEAR),
        ("conv1d.weight", BINDABLE),
        ("conv1d.bias", BINDABLE),
        ("blk.0.attn_norm.weight", BINDABLE),
        ("blk.0.attn_q.weight", LINEAR),
        ("blk.0.attn_q.bias", BINDABLE),
        ("blk.0.attn_qkv.weight", LINEAR),
        ("blk.0.attn_q_norm.weight", BINDABLE),
        ("blk.0.attn_output.weight", LINEAR),
        ("blk.0.attn_output_norm.weight", BINDABLE),
        ("blk.0.attn_sinks.weight", BINDABLE),
        ("blk.0.attn_rot_embd.weight", BINDABLE),
        ("blk.0.attn_kv_a_mqa.weight", LINEAR),
        ("blk.0.attn_kv_a_norm.weight", BINDABLE),
        ("blk.0.ffn_gate.weight", LINEAR),
        ("blk.0.ffn_gate_inp.weight", LINEAR),
        ("blk.0.ffn_gate_exps.weight", LINEAR),
        ("blk.0.ffn_up_exps.weight", LINEAR),
        ("blk.0.ffn_down_exps.weight", LINEAR),
        ("blk.0.ffn_down_exps.bias", BINDABLE),
        ("blk.0.ffn_down_shexp.weight", LINEAR),
        ("blk.0.exp_probs_b.bias", BINDABLE),
        ("blk.0.layer_output_scale.weight", BINDABLE),
        ("blk.0.altup_router.weight", LINEAR),
        ("blk.0.ssm_a", BINDABLE),
        ("blk.0.ssm_d", BINDABLE),
        ("blk.0.ssm_dt.bias", BINDABLE),
        ("blk.0.ssm_dt.weight", LINEAR),
        ("blk.0.ssm_conv1d.weight", BINDABLE),
        ("blk.0.ssm_in.weight", LINEAR),
        ("blk.0.ssm_norm.weight", BINDABLE),
        ("blk.0.shortconv.conv.weight", BINDABLE),
        ("blk.0.shortconv.in_proj.weight", LINEAR),
        ("blk.0.time_mix_decay_w1.weight", LINEAR),
        ("blk.0.time_mix_w1.weight", LINEAR),
        ("blk.0.time_mix_w0.weight", BINDABLE),
        ("blk.0.time_mix_ln.weight", BINDABLE),
        ("blk.0.nextn.embed_tokens.weight", LOOKUP),
        ("blk.0.nextn.eh_proj.weight", LINEAR),
        ("blk.0.nextn.enorm.weight", BINDABLE),
        ("enc.blk.0.attn_rel_b.weight", BINDABLE),
        ("dec.blk.0.cross_attn_q.weight", LINEAR),
        ("v.patch_embd.weight", BINDABLE),
        ("v.blk.3.attn_q.weight", LINEAR),
        ("v.blk.3.ln1.weight", BINDABLE),
        ("mm.0.weight", LINEAR),
        ("mm.2.bias", BINDABLE),
    ],
)
def test_intent(name: str, intent: Intent) -> None:
    found = role(name)
    assert found.known
    assert found.intent == intent


def test_a_tied_table_is_also_the_output_matrix() -> None:
    assert role("token_embd.weight").intent == LOOKUP | LINEAR
    assert role("token_embd.weight", "output.bias", "output_norm.weight").intent == LOOKUP | LINEAR
    assert role("token_embd.weight", "output.weight").intent == LOOKUP
    # Only this table is ever an output matrix.
    assert role("per_layer_token_embd.weight", "token_embd.weight").intent == LOOKUP


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "weight", ".weight", "blk", "blk.", "blk..attn_q.weight", "blk.x.attn_q.weight", "blk.-1.attn_q.weight",
        "blk.0.attn_q.weight.weight", "blk.0.something_else.weight", "my_tensor", "BLK.0.ATTN_Q.WEIGHT",
        "token_embd.weight.1", "v.patch_embd.weight.1", "blk.0.ffn_gate.3.weight",
        "blk.٣.attn_q.weight", "token_embd.weight\0", "é.weight", "xtoken_embd.weight",
    ],
)  # fmt: skip
def test_other_names_are_unknown_and_bound_as_they_are(name: str) -> None:
    found = role(name)
    assert not found.known
    assert found.intent == BINDABLE


def test_no_name_makes_it_fail() -> None:
    long = "9" * 5000  # int() refuses so many digits
    for name in (f"blk.{long}.attn_q.weight", f"blk.{long}", f"mm.{long}.weight", "a." * 5000 + "weight"):
        assert role(name).layer >= 0


def test_layers_are_in_the_order_of_a_forward_pass() -> None:
    names = [
        "output.weight", "blk.10.attn_q.weight", "blk.2.ffn_up.weight", "token_embd.weight", "blk.2.attn_q.weight",
        "output_norm.weight", "blk.0.attn_norm.weight", "rope_freqs.weight", "per_layer_token_embd.weight", "odd",
    ]  # fmt: skip
    found = roles(names)
    layers = {name: found[name].layer for name in names}
    first = {"token_embd.weight", "rope_freqs.weight", "per_layer_token_embd.weight"}
    last = {"output.weight", "output_norm.weight", "odd"}
    assert {layers[name] for name in first} == {-1}
    assert [layers[name] for name in names if name.startswith("blk.")] == [10, 2, 2, 0]
    assert min(layers[name] for name in last) > 1_000_000


def test_the_layer_of_an_unknown_name_in_a_block_is_that_block() -> None:
    assert role("blk.4.new_thing.weight") == Role(intent=BINDABLE, layer=4, known=False)


def test_a_role_does_not_depend_on_the_names_before_it() -> None:
    """Names of one block, or alike in all but its number, are looked up once."""
    rests = ("attn_q.weight", "attn_norm.weight", "attn_q.bias", "odd", "2.odd", "")
    names = [f"{prefix}blk.{n}.{rest}" for rest in rests for n in (1, 10, 1, 0) for prefix in ("", "v.")]
    names = [*dict.fromkeys(names), "blk.1", "blk.1x.attn_q.weight", "blk.10.attn_k.weight"]
    for order in (names, names[::-1], sorted(names)):
        assert roles(order) == {name: role(name) for name in order}
