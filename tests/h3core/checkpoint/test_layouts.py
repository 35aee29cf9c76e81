"""One tiny model in every layout: what an engine makes of it is the same, bit for bit, and how it was read is told."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.config import ComponentSource, EngineConfig
from comfyui_h3.h3core.engine import Engine
from comfyui_h3.h3core.errors import CheckpointError, RequestError
from comfyui_h3.h3core.registry import get_engine
from comfyui_h3.h3core.tiny import write_comfyui
from comfyui_h3.h3core.tiny.write import text_encoder_weights
from comfyui_h3.h3core.tiny.write_diffusers import write_diffusers
from comfyui_h3.h3core.types import Request

SIZE = {"width": 96, "height": 64, "num_frames": 5}
PREFIXED = "prefixed"
INTERLEAVED = "interleaved"


@pytest.fixture(scope="module")
def diffusers_h3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts") / "diffusers-h3"
    write_diffusers(folder)
    return folder


@pytest.fixture(scope="module")
def single_files(tmp_path_factory):
    """Component -> file; beside the transformer also forms of it that are seen less often."""
    out = tmp_path_factory.mktemp("layouts") / "comfyui"
    write_comfyui.write_comfyui(out)
    files = {
        "transformer": out / "diffusion_models/tiny_h3_fl2va_bf16.safetensors",
        "transformer_ref": out / "diffusion_models/tiny_h3_ref2va_bf16.safetensors",
        "text_encoder": out / "text_encoders/tiny_h3_text_encoder_bf16.safetensors",
        "video_vae": out / "vae/tiny_h3_video_vae_fp32.safetensors",
        "audio_vae": out / "vae/tiny_h3_audio_vae_fp32.safetensors",
        PREFIXED: out / "prefixed.safetensors",
        INTERLEAVED: out / "interleaved.safetensors",
    }
    write_comfyui.save(
        write_comfyui.transformer_file(0, "fl2va", prefix=write_comfyui.PREFIX, interleaved=False), files[PREFIXED]
    )
    write_comfyui.save(write_comfyui.transformer_file(0, "fl2va", interleaved=True), files[INTERLEAVED])
    return files


def engine_of(folder, *components):
    return Engine(EngineConfig(checkpoint=folder, device="cpu", precision="float32", components=components))


def output(engine):
    """Every component's part in a result: text states, latents, frames before rounding, samples."""
    conditioning = engine.encode(Request(prompt="a red ball rolls", **SIZE))
    latents = engine.sample(conditioning, seed=3, sigma_points=3)
    frames = torch.cat(list(engine.video_parts(latents)), dim=1)
    return [conditioning.text, latents.video, latents.audio, frames, engine.decode_audio(latents).samples]


def is_equal(one, other):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def expected(tiny_engine):
    """Of the release's layout, which the tests against diffusers hold to the oracle."""
    return output(tiny_engine)


def encoders_of(folder, *components):
    checkpoint = Checkpoint.open(folder, "fl2va", components)
    states = checkpoint.load_video_encoder(torch.device("cpu")).state_dict()
    return states | checkpoint.load_audio_encoder(torch.device("cpu")).state_dict()


def test_a_folder_of_diffusers_gives_the_same_result(diffusers_h3, expected):
    engine = engine_of(diffusers_h3)
    assert list(engine.checkpoints.opened) == ["fl2va", "ref2va"]
    assert is_equal(output(engine), expected)
    assert "transformer_ref: diffusers layout" in engine.describe()


def test_both_transformers_of_diffusers_are_those_of_the_release(diffusers_h3, tiny_h3):
    for partition in ("fl2va", "ref2va"):
        states = [
            Checkpoint.open(folder, partition).load_dit(torch.device("cpu"), torch.bfloat16).state_dict()
            for folder in (diffusers_h3, tiny_h3)
        ]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_encoders_of_a_folder_of_diffusers_are_those_of_the_release(diffusers_h3, tiny_h3):
    ours, theirs = encoders_of(tiny_h3), encoders_of(diffusers_h3)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("form", ["transformer", PREFIXED, INTERLEAVED])
def test_a_transformer_from_a_single_file_gives_the_same_result(tiny_h3, single_files, expected, form):
    engine = engine_of(tiny_h3, ComponentSource(component="transformer", path=single_files[form]))
    assert is_equal(output(engine), expected)
    order = "interleaved" if form == INTERLEAVED else "stacked"
    assert f"{single_files[form]}: " in engine.describe()
    assert f"qkv rows {order}: of the differences between heads" in engine.describe()


@pytest.mark.parametrize("component", ["text_encoder", "video_vae", "audio_vae"])
def test_a_component_from_a_single_file_gives_the_same_result(tiny_h3, single_files, expected, component):
    engine = engine_of(tiny_h3, ComponentSource(component=component, path=single_files[component]))
    assert is_equal(output(engine), expected)
    assert f"{component} from {single_files[component]}: comfyui layout" in engine.describe()


def test_encoders_from_single_files_are_those_of_the_release(tiny_h3, single_files):
    given = [ComponentSource(component=name, path=single_files[name]) for name in ("video_vae", "audio_vae")]
    ours, theirs = encoders_of(tiny_h3), encoders_of(tiny_h3, *given)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_component_from_a_single_file_beside_a_folder_of_diffusers(diffusers_h3, single_files, expected):
    names = ("transformer", "transformer_ref", "text_encoder", "video_vae", "audio_vae")
    engine = engine_of(diffusers_h3, *(ComponentSource(component=name, path=single_files[name]) for name in names))
    assert is_equal(output(engine), expected)


def test_a_component_from_another_layout_s_folder(tiny_h3, diffusers_h3, expected):
    given = (
        ComponentSource(component="transformer", path=diffusers_h3 / "transformer"),
        ComponentSource(component="video_vae", path=diffusers_h3 / "vae"),
        ComponentSource(component="audio_vae", path=diffusers_h3 / "audio_vae"),
    )
    assert is_equal(output(engine_of(tiny_h3, *given)), expected)


def test_a_transformer_s_file_makes_the_other_partition_of_a_folder(tiny_h3, single_files):
    """All but the transformers is the same: who has FL2VA needs one file for references."""
    source = ComponentSource(component="transformer_ref", path=single_files["transformer_ref"])
    engine = engine_of(tiny_h3 / "FL2VA", source)
    assert list(engine.checkpoints.opened) == ["fl2va", "ref2va"]
    assert engine.checkpoints.of("ref2va").folder == tiny_h3 / "FL2VA"
    given, release = (
        checkpoint.load_dit(torch.device("cpu"), torch.bfloat16).state_dict()
        for checkpoint in (engine.checkpoints.of("ref2va"), Checkpoint.open(tiny_h3, "ref2va"))
    )
    assert all(torch.equal(given[name], release[name]) for name in release)


def test_a_layout_without_a_file_of_weights_that_are_not_there_is_refused(tiny_h3):
    with pytest.raises(RequestError, match=r"a layout for transformer_ref, and .* has no ref2va weights"):
        engine_of(tiny_h3 / "FL2VA", ComponentSource(component="transformer_ref", layout="official"))


def test_the_modulator_of_a_single_file_is_that_of_the_release(tiny_h3, single_files):
    groups = [torch.tensor([0.25, 0.5])]
    source = ComponentSource(component="transformer", path=single_files[PREFIXED])
    tables = [
        Checkpoint.open(tiny_h3, "fl2va", given).read_modulation(groups, torch.device("cpu"), torch.float32)
        for given in ((), (source,))
    ]
    assert torch.equal(tables[0].blocks[0][0], tables[1].blocks[0][0])


def test_weights_in_8_bits_are_made_of_parts_too(tiny_h3, diffusers_h3):
    dits = [
        Checkpoint.open(folder, "fl2va").load_dit(torch.device("cpu"), torch.float8_e4m3fn)
        for folder in (tiny_h3, diffusers_h3)
    ]
    ours, theirs = (dit.state_dict() for dit in dits)
    name = "blocks.1.attn.qkv_proj.weight"
    assert ours[name].dtype == torch.float8_e4m3fn
    assert torch.equal(ours[name].float(), theirs[name].float())


def flat_rows(file):
    """The file's tensors with q, k and v rows of one size: nothing tells their order."""
    tensors = write_comfyui.transformer_file(0, "fl2va")
    for name, tensor in tensors.items():
        if name.endswith("attn.qkv_proj.weight"):
            tensors[name] = tensor / tensor.float().square().mean(1, keepdim=True).sqrt().bfloat16()
    write_comfyui.save(tensors, file)
    return file


def test_rows_that_do_not_tell_their_order_are_refused_until_it_is_said(tiny_h3, tmp_path):
    file = flat_rows(tmp_path / "flat.safetensors")
    with pytest.raises(CheckpointError, match=r"flat.safetensors does not say .* layout comfyui .* or official"):
        Checkpoint.open(tiny_h3, "fl2va", [ComponentSource(component="transformer", path=file)])
    for layout in ("comfyui", "official"):
        source = ComponentSource(component="transformer", path=file, layout=layout)
        checkpoint = Checkpoint.open(tiny_h3, "fl2va", [source])
        assert any(f"{layout} layout (qkv rows as asked for)" in line for line in checkpoint.describe_layouts())


def test_a_layout_that_was_asked_for_decides_the_row_order(tiny_h3, single_files):
    states = {}
    for layout in ("official", "comfyui"):
        source = ComponentSource(component="transformer", path=single_files["transformer"], layout=layout)
        dit = Checkpoint.open(tiny_h3, "fl2va", [source]).load_dit(torch.device("cpu"), torch.bfloat16)
        states[layout] = dit.state_dict()["blocks.0.attn.qkv_proj.weight"]
    release = Checkpoint.open(tiny_h3, "fl2va").load_dit(torch.device("cpu"), torch.bfloat16).state_dict()
    assert torch.equal(states["comfyui"], release["blocks.0.attn.qkv_proj.weight"])
    assert not torch.equal(states["official"], states["comfyui"])


def test_a_layout_the_names_contradict_is_refused(diffusers_h3, tiny_h3, single_files):
    source = ComponentSource(component="transformer", layout="comfyui")
    with pytest.raises(CheckpointError, match="layout=comfyui was asked for"):
        Checkpoint.open(diffusers_h3, "fl2va", [source])
    source = ComponentSource(component="audio_vae", path=single_files["audio_vae"], layout="official")
    with pytest.raises(CheckpointError, match=r"layout=official was asked for.*weight norm folded"):
        Checkpoint.open(tiny_h3, "fl2va", [source])


def test_a_video_vae_in_float16_is_read(tiny_h3, tmp_path):
    file = tmp_path / "video_vae_fp16.safetensors"
    tensors = write_comfyui.video_vae_file(0, torch.float16)
    write_comfyui.save(tensors, file)
    source = ComponentSource(component="video_vae", path=file)
    decoder = Checkpoint.open(tiny_h3, "fl2va", [source]).load_video_decoder(torch.device("cpu"), torch.float32)
    name = "decoder.transformer_blocks.0.ff.w1.weight"
    assert torch.equal(decoder.state_dict()[name], tensors[name].float())


def test_a_transformer_in_float16_stays_refused(tiny_h3, tmp_path):
    file = tmp_path / "half.safetensors"
    tensors = write_comfyui.transformer_file(0, "fl2va")
    write_comfyui.save({name: tensor.half() for name, tensor in tensors.items()}, file)
    with pytest.raises(CheckpointError, match="float16"):
        Checkpoint.open(tiny_h3, "fl2va", [ComponentSource(component="transformer", path=file)])


@pytest.mark.parametrize(
    ("key", "form"),
    [
        ("adaln_t_table", "a pruned AdaLN curve"),
        ("blocks.0.adaln_proj.folded_bias", "a pruned AdaLN curve"),
        ("adaln_basis.weight", "a low-rank AdaLN"),
        ("blocks.0.mlp.fc1.comfy_quant", "a quantised ComfyUI file"),
        ("blocks.0.mlp.fc1.weight_scale", "a file scaled to 8 bits"),
        ("blocks.0.mlp.fc1.qweight", "an SVDQuant file"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_forms_that_are_not_read_are_refused_by_name(tiny_h3, tmp_path, key, form, prefix):
    file = tmp_path / "other.safetensors"
    tensors = write_comfyui.transformer_file(0, "fl2va", prefix=prefix)
    write_comfyui.save(tensors | {prefix + key: torch.zeros(4)}, file)
    with pytest.raises(CheckpointError, match=form) as info:
        Checkpoint.open(tiny_h3, "fl2va", [ComponentSource(component="transformer", path=file)])
    assert key in str(info.value)


@pytest.mark.parametrize(("name", "form"), [("h3-Q4_K_M.gguf", "a GGUF file"), ("h3.pt", "a pickle")])
def test_files_of_other_kinds_are_refused_by_name(tiny_h3, tmp_path, name, form):
    (tmp_path / name).write_bytes(b"GGUF" * 8)
    with pytest.raises(CheckpointError, match=form):
        Checkpoint.open(tiny_h3, "fl2va", [ComponentSource(component="transformer", path=tmp_path / name)])


def test_a_part_that_is_missing_is_named(diffusers_h3, tiny_h3, tmp_path):
    tensors = {}
    for file in sorted((diffusers_h3 / "transformer").glob("*.safetensors")):
        tensors |= load_file(file)
    del tensors["transformer_blocks.2.attn.to_v.weight"]
    write_comfyui.save(tensors, tmp_path / "dit.safetensors")
    with pytest.raises(CheckpointError, match=r"for blocks.2.attn.qkv_proj.weight, which this layout stores in 3"):
        Checkpoint.open(tiny_h3, "fl2va", [ComponentSource(component="transformer", path=tmp_path / "dit.safetensors")])


@pytest.mark.parametrize("component", ["video_vae", "audio_vae"])
def test_a_vae_of_other_latents_is_refused(tiny_h3, single_files, tmp_path, component):
    tensors = load_file(single_files[component])
    tensors["latents_std"] = tensors["latents_std"] * 1.01
    write_comfyui.save(tensors, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="latents_std is not that of the checkpoint's config"):
        Checkpoint.open(tiny_h3, "fl2va", [ComponentSource(component=component, path=tmp_path / "other.safetensors")])


def test_a_text_encoder_with_bare_names_is_that_of_the_release(tiny_h3, tmp_path):
    """As transformers saves the model without its head."""
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in text_encoder_weights(0).items()
        if name != "lm_head.weight"
    }
    write_comfyui.save(tensors, tmp_path / "bare.safetensors")
    source = ComponentSource(component="text_encoder", path=tmp_path / "bare.safetensors")
    bare, release = (
        Checkpoint.open(tiny_h3, "fl2va", given).load_text_encoder(torch.device("cpu"), torch.bfloat16).state_dict()
        for given in ([source], [])
    )
    assert bare.keys() == release.keys()
    assert all(torch.equal(bare[name], release[name]) for name in bare)


def test_an_engine_of_a_file_that_was_replaced_is_not_given_out_again(tiny_h3, single_files, tmp_path):
    file = tmp_path / "dit.safetensors"
    file.write_bytes(single_files["transformer"].read_bytes())
    config = EngineConfig(
        checkpoint=tiny_h3, device="cpu", components=(ComponentSource(component="transformer", path=file),)
    )
    first = get_engine(config)
    assert get_engine(config) is first
    write_comfyui.save(write_comfyui.transformer_file(1, "fl2va", prefix=write_comfyui.PREFIX), file)
    assert get_engine(config) is not first


def test_the_other_partition_s_file_is_refused_by_its_name(tiny_h3, single_files):
    source = ComponentSource(component="transformer", path=single_files["transformer_ref"])
    with pytest.raises(CheckpointError, match="is the ref2va transformer by its name"):
        Checkpoint.open(tiny_h3, "fl2va", [source])


def test_a_file_of_another_component_is_refused(tiny_h3, single_files):
    source = ComponentSource(component="transformer", path=single_files["video_vae"])
    with pytest.raises(CheckpointError, match="is not the transformer of H3"):
        Checkpoint.open(tiny_h3, "fl2va", [source])


def test_component_names_and_layouts_are_checked(tiny_h3):
    with pytest.raises(RequestError, match="component='vae' does not exist"):
        ComponentSource(component="vae")
    with pytest.raises(RequestError, match="layout='gguf' does not exist"):
        ComponentSource(component="transformer", layout="gguf")
    twice = (ComponentSource(component="transformer"),) * 2
    with pytest.raises(RequestError, match="transformer twice"):
        EngineConfig(checkpoint=tiny_h3, components=twice)
    with pytest.raises(RequestError, match="partition=ref2va does not use; use partition=fl2va"):
        EngineConfig(checkpoint=tiny_h3, partition="ref2va", components=twice[:1])


def test_configurations_with_other_files_are_other_engines(tiny_h3, single_files):
    config = EngineConfig(checkpoint=tiny_h3, device="cpu")
    source = ComponentSource(component="transformer", path=str(single_files[PREFIXED]))
    other = dataclasses.replace(config, components=(source,))
    assert hash(other) != hash(config)
    assert other == dataclasses.replace(config, components=(dataclasses.replace(source),))
