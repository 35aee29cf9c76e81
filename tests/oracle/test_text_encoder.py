"""Presentation, positions, pixels and hidden states against transformers and diffusers."""

from types import SimpleNamespace

import pytest
import torch

from comfyui_h3.h3core.checkpoint.official import Checkpoint
from comfyui_h3.h3core.models.text_encoder.template import AudioItem, ImageItem, VideoItem
from comfyui_h3.h3core.models.text_encoder.vision import PixelLimits, image_patches, position_ids, video_patches
from comfyui_h3.h3core.tiny import configs

pytestmark = pytest.mark.oracle

TINY = PixelLimits(image_min=4096, video_min=4096)
PROMPT = "overall_soundscape: Rain, e\u0301 and <d>[Chinese] 你好</d> 🌧 <scenetrans>"


def pixels(*shape, seed=0):
    return torch.randint(0, 256, (*shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def video(num_frames, height, width, has_soundtrack, seed=0):
    blocks = (num_frames + 1) // 2
    times = [s / 2 for s in range(num_frames)] + [(num_frames - 1) / 2] * (num_frames % 2)
    return VideoItem(
        patches=video_patches(pixels(num_frames, height, width, seed=seed), TINY),
        timestamps_s=tuple((times[2 * b] + times[2 * b + 1]) / 2 for b in range(blocks)),
        has_soundtrack=has_soundtrack,
    )


CASES = {
    "text": (),
    "image": (ImageItem(patches=image_patches(pixels(64, 96), TINY)),),
    "two images": (
        ImageItem(patches=image_patches(pixels(64, 64), TINY)),
        ImageItem(patches=image_patches(pixels(160, 96, seed=1), TINY)),
    ),
    "video": (video(3, 64, 64, has_soundtrack=True),),
    "mixed": (
        AudioItem(),
        video(4, 96, 64, has_soundtrack=True),
        ImageItem(patches=image_patches(pixels(32, 64), TINY)),
        video(5, 64, 64, has_soundtrack=False, seed=2),
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tiny_h3):
    return Checkpoint.open(tiny_h3, "fl2va")


@pytest.fixture(scope="module")
def presenter(checkpoint):
    return checkpoint.load_presenter()


@pytest.fixture(scope="module")
def full_models(tiny_h3):
    """All six layers and the final norm, by dtype. Loaded in it: a cast afterwards would round ``inv_freq`` too."""
    from transformers import Qwen3VLForConditionalGeneration

    folder = tiny_h3 / "FL2VA/text_encoder"
    return {
        dtype: Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    }


def token_types(presentation, presenter):
    image, clip = (presenter.tokenize(token)[0] for token in ("<|image_pad|>", "<|video_pad|>"))
    return (presentation.ids == image).int() + 2 * (presentation.ids == clip).int()


def grids(items):
    return torch.tensor([item.grid for item in items]) if items else None


@pytest.mark.parametrize("name", CASES)
def test_presentation_is_that_of_diffusers(presenter, name):
    from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3Ref2VATextEncoderStep

    items = CASES[name]
    kinds = {ImageItem: "image", VideoItem: "video", AudioItem: "audio"}
    references = [
        SimpleNamespace(
            kind=kinds[type(item)], has_audio=isinstance(item, AudioItem) or getattr(item, "has_soundtrack", False)
        )
        for item in items
    ]
    videos = [item for item in items if isinstance(item, VideoItem)]
    ids, tags = MiniMaxH3Ref2VATextEncoderStep._build_presentation(
        presenter._tokenizer,
        PROMPT,
        references,
        [item.patches.num_tokens_per_block() for item in items if isinstance(item, ImageItem)],
        [item.patches.num_tokens_per_block() for item in videos],
        [list(item.timestamps_s) for item in videos],
    )
    ours = presenter.present(PROMPT, items)
    assert ours.ids.tolist() == ids
    assert ours.modality.tolist() == tags


@pytest.mark.parametrize("name", CASES)
def test_positions_are_those_of_transformers(presenter, full_models, name):
    presentation = presenter.present(PROMPT, CASES[name])
    types = token_types(presentation, presenter)
    theirs, _ = full_models[torch.float32].model.get_rope_index(
        input_ids=presentation.ids[None],
        mm_token_type_ids=types[None],
        image_grid_thw=grids(presentation.images),
        video_grid_thw=grids(presentation.videos),
        attention_mask=torch.ones_like(presentation.ids)[None],
    )
    assert torch.equal(position_ids(list(presentation.blocks), types > 0), theirs[:, 0])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_at_the_tap_of_the_full_model(checkpoint, presenter, full_models, name, dtype):
    presentation = presenter.present(PROMPT, CASES[name])
    media = {}
    if presentation.images:
        media["pixel_values"] = torch.cat([item.patches for item in presentation.images]).to(dtype)
        media["image_grid_thw"] = grids(presentation.images)
    if presentation.videos:
        media["pixel_values_videos"] = torch.cat([item.patches for item in presentation.videos]).to(dtype)
        media["video_grid_thw"] = grids(presentation.videos)
    with torch.no_grad():
        states = full_models[dtype].model(
            input_ids=presentation.ids[None],
            attention_mask=torch.ones_like(presentation.ids)[None],
            mm_token_type_ids=token_types(presentation, presenter)[None],
            use_cache=False,
            output_hidden_states=True,
            **media,
        )
        ours = checkpoint.load_text_encoder(torch.device("cpu"), dtype)(presentation)
    assert ours.dtype == dtype
    assert torch.equal(ours, states.hidden_states[configs.TAP][0])
    assert not torch.equal(ours, states.last_hidden_state[0])  # what a live final norm, or one layer more, would give


@pytest.mark.parametrize("size", [(64, 96), (768, 1344), (30, 64), (128, 96), (5000, 4000)])
def test_image_patches_are_those_of_the_processor(size):
    pytest.importorskip("torchvision", reason="transformers' image processor needs torchvision")
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor(**configs.IMAGE_PROCESSOR)
    image = pixels(*size)
    theirs = processor(images=[image.movedim(-1, 0)], return_tensors="pt")
    ours = image_patches(image, TINY)
    assert list(ours.grid) == theirs["image_grid_thw"][0].tolist()
    assert torch.equal(ours.patches, theirs["pixel_values"])


@pytest.mark.parametrize("size", [(2, 64, 96), (3, 64, 64), (31, 768, 1344), (26, 768, 1344), (25, 768, 1344)])
def test_video_patches_are_those_of_the_processor(size):
    pytest.importorskip("torchvision", reason="transformers' video processor needs torchvision")
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    processor = Qwen3VLVideoProcessor(**configs.VIDEO_PROCESSOR, cap_pixels_per_frame=False)
    frames = pixels(*size)
    theirs = processor(videos=[frames.movedim(-1, 1)], do_sample_frames=False, return_tensors="pt")
    ours = video_patches(frames, TINY)
    assert list(ours.grid) == theirs["video_grid_thw"][0].tolist()
    assert torch.equal(ours.patches, theirs["pixel_values_videos"])
