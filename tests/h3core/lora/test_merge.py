"""Merged weights against the formula W + strength * alpha / rank * B A, for files of every family."""

import pytest
import torch

from comfyui_h3.tests.h3core.lora.lora_files import (
    FAMILIES,
    MODULES,
    RANK,
    Lora,
    comfyui,
    diffusers,
    kohya,
    make_factors,
    native,
)

TOLERANCE = 1e-6  # float32 sums of four products and a weight, relative to the largest value; measured 1e-7


def assert_changed_by(merged, base, *deltas_and_strengths):
    """Every parameter equals the formula; those without a change bit for bit."""
    changed = {name for deltas, _ in deltas_and_strengths for name in deltas}
    assert changed <= base.keys()
    for name, weight in base.items():
        if name not in changed:
            assert torch.equal(merged[name], weight), name
            continue
        wanted = weight.double() + sum(strength * deltas.get(name, 0) for deltas, strength in deltas_and_strengths)
        assert (merged[name] - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strength", [1.0, 0.7, -1.0])
def test_every_family_merges_as_the_formula(merge, base, tmp_path, family, strength):
    lora = FAMILIES[family](make_factors(0))
    merged, (report,) = merge((lora.save(tmp_path / "a.safetensors"), strength))
    assert_changed_by(merged, base, (lora.deltas, strength))
    assert (len(report.applied), report.ignored, report.failed) == (len(lora.tensors), (), ())


def test_the_change_is_large_enough_to_be_seen(base):
    """So that the test above fails for rows in another order."""
    for name, delta in native(make_factors(0)).deltas.items():
        assert delta.abs().max() > 100 * TOLERANCE * base[name].abs().max()


@pytest.mark.parametrize(
    ("family", "name"),
    [("official", "official"), ("comfyui", "ComfyUI"), ("kohya", "kohya"), ("diffusers", "diffusers")],
)
def test_report_names_the_family(merge, tmp_path, family, name):
    _, (report,) = merge((FAMILIES[family](make_factors(0)).save(tmp_path / "a.safetensors"), 1.0))
    assert report.families == (name,)


def test_rows_per_head_are_said(merge, tmp_path):
    _, (report,) = merge((FAMILIES["diffsynth"](make_factors(0)).save(tmp_path / "a.safetensors"), 1.0))
    assert "per head" in report.describe()


def test_diffusers_q_k_and_v_have_factors_of_their_own(merge, base, tmp_path):
    g = torch.Generator().manual_seed(5)
    lora, parts = Lora(), []
    for letter in "qkv":
        up, down = torch.randn(1792, RANK, generator=g), torch.randn(RANK, 64, generator=g)
        name = f"transformer.transformer_blocks.3.attn.to_{letter}"
        lora.tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        parts.append(up.double() @ down.double())
    merged, _ = merge((lora.save(tmp_path / "a.safetensors"), 0.5))
    assert_changed_by(merged, base, ({"blocks.3.attn.qkv_proj.weight": torch.cat(parts)}, 0.5))


def test_one_of_q_k_and_v_changes_its_rows_alone(merge, base, tmp_path):
    lora = diffusers(make_factors(0, {"blocks.0.attn.qkv_proj": MODULES["blocks.0.attn.qkv_proj"]}))
    lora.tensors = {key: tensor for key, tensor in lora.tensors.items() if ".to_k." in key}
    (delta,) = lora.deltas.values()
    delta[:1792] = delta[3584:] = 0
    merged, _ = merge((lora.save(tmp_path / "a.safetensors"), 1.0))
    assert_changed_by(merged, base, (lora.deltas, 1.0))


def test_stacked_files_add_up(merge, base, tmp_path):
    first, second = kohya(make_factors(1)), diffusers(make_factors(2), alpha=3)
    paths = first.save(tmp_path / "a.safetensors"), second.save(tmp_path / "b.safetensors")
    merged, reports = merge((paths[0], 0.8), (paths[1], -1.5))
    assert_changed_by(merged, base, (first.deltas, 0.8), (second.deltas, -1.5))
    assert [(report.path, report.strength) for report in reports] == [(paths[0], 0.8), (paths[1], -1.5)]


def test_strength_0_leaves_every_bit(merge, base, tmp_path):
    merged, (report,) = merge((comfyui(make_factors(0)).save(tmp_path / "a.safetensors"), 0.0))
    assert_changed_by(merged, base)
    assert len(report.applied) == 3 * len(MODULES)


def test_weights_without_the_lora_are_the_base_bit_for_bit(merge, base, tmp_path):
    merge((comfyui(make_factors(0)).save(tmp_path / "a.safetensors"), 1.0))
    merged, reports = merge()
    assert_changed_by(merged, base)
    assert reports == ()


def test_bfloat16_is_rounded_once(merge, base, tmp_path):
    """The sum in float32, then one rounding: of a stack too. A rounding between would move many."""
    loras = [native(make_factors(seed)) for seed in (1, 2)]
    paths = [lora.save(tmp_path / f"{i}.safetensors") for i, lora in enumerate(loras)]
    merged, _ = merge(*((path, 1.0) for path in paths), dtype=torch.bfloat16)
    for name in loras[0].deltas:
        exact = base[name].double() + sum(lora.deltas[name] for lora in loras)
        if merged[name].dtype == torch.bfloat16:
            # Within half a step of the exact value, and the error of the float32 sum.
            step = torch.ldexp(torch.ones_like(exact), torch.frexp(exact.abs())[1] - 8)
            assert ((merged[name].double() - exact).abs() <= step / 2 + TOLERANCE * exact.abs().max()).all(), name
        else:
            assert (merged[name] - exact).abs().max() <= TOLERANCE * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factors_may_be_stored_in_16_bits(merge, base, tmp_path, dtype):
    factors = {module: (up.to(dtype), down.to(dtype)) for module, (up, down) in make_factors(0).items()}
    lora = native(factors)
    merged, _ = merge((lora.save(tmp_path / "a.safetensors"), 1.0))
    assert_changed_by(merged, base, (lora.deltas, 1.0))


def test_differences_and_assignments(merge, base, tmp_path):
    g = torch.Generator().manual_seed(3)
    norm, bias, value, new = (torch.randn(*shape, generator=g) for shape in ((64,), (1152,), (64, 128), (192, 64)))
    lora = Lora(
        tensors={
            "diffusion_model.blocks.0.norm1.diff": norm,
            "diffusion_model.blocks.1.adaln_proj.linear.diff_b": bias,
            "diffusion_model.condition_proj.set_weight": value,
            "transformer.transformer_blocks.0.ff.net.0.proj.diff": new,
        }
    )
    gate_first = torch.cat([new[96:], new[:96]])
    deltas = {
        "blocks.0.norm1.weight": norm.double(),
        "blocks.1.adaln_proj.linear.bias": bias.double(),
        "condition_proj.weight": value.double() - base["condition_proj.weight"].double(),
        "blocks.0.mlp.fc1.weight": gate_first.double(),
    }
    path = lora.save(tmp_path / "a.safetensors")
    for strength in (1.0, 0.5, -1.0):
        merged, (report,) = merge((path, strength))
        assert_changed_by(merged, base, (deltas, strength))
        assert report.failed == ()
    assert torch.equal(merge((path, 1.0))[0]["condition_proj.weight"], value)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ('{"transformer.lora_alpha": 6, "transformer.r": 4}', 1.5),
        ('{"lora_alpha": 6, "use_rslora": true}', 3.0),
        ('{"lora_alpha": 6, "alpha_pattern": {"^transformer_blocks.1.attn.to_out.0": 1}}', 0.25),
        ('{"lora_alpha": 6, "alpha_pattern": {"out.0": 1}}', 1.5),  # a part of a name is another name
    ],
)
def test_alpha_of_pefts_config(merge, base, tmp_path, config, scale):
    lora = diffusers(make_factors(0, {"blocks.1.attn.out_proj": MODULES["blocks.1.attn.out_proj"]}))
    lora.metadata = {"lora_adapter_metadata": config}
    merged, _ = merge((lora.save(tmp_path / "a.safetensors"), 1.0))
    assert_changed_by(merged, base, (lora.deltas, scale))


def test_alpha_of_the_config_beside_the_file(merge, base, tmp_path):
    lora = diffusers(make_factors(0), "base_model.model.")
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 12}')
    merged, _ = merge((lora.save(tmp_path / "adapter_model.safetensors"), 1.0))
    assert_changed_by(merged, base, (lora.deltas, 12 / RANK))


def test_alpha_of_turbo_files_that_do_not_tell_it(merge, base, tmp_path):
    lora = diffusers(make_factors(0), "", ".default")
    merged, (report,) = merge((lora.save(tmp_path / "minimax_h3_fl2v_turbo_4step_v1.0_768p_bf16.safetensors"), 1.0))
    assert_changed_by(merged, base, (lora.deltas, 8 / RANK))
    assert "alpha taken as 8" in report.describe()


def test_keys_of_the_other_weights_are_ignored(merge, base, tmp_path):
    ours, theirs = diffusers(make_factors(0)), diffusers(make_factors(1), "transformer_ref.")
    lora = Lora(tensors=ours.tensors | theirs.tensors)
    merged, (report,) = merge((lora.save(tmp_path / "a.safetensors"), 1.0))
    assert_changed_by(merged, base, (ours.deltas, 1.0))
    assert set(report.ignored) == set(theirs.tensors)
