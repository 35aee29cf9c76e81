"""H3 LoRA in a host: from a file in models/loras to another video."""

import pytest

from comfyui_h3.scripts.comfy_host import PromptRefused
from comfyui_h3.tests.h3core.lora.lora_files import comfyui, kohya, make_factors


@pytest.fixture(scope="module")
def loras(host):
    """Names of two files in the host's folder."""
    folder = host.base_dir / "models" / "loras" / "h3"
    folder.mkdir(parents=True, exist_ok=True)
    comfyui(make_factors(1)).save(folder / "a.safetensors")
    kohya(make_factors(2)).save(folder / "b.safetensors")
    return "h3/a.safetensors", "h3/b.safetensors"


@pytest.fixture
def chained(host, tiny_prompt, node_id):
    """``chained(*(name, strength))``: the T2VA workflow with a chain of H3 LoRA nodes in front of Load H3."""

    def build(*loras):
        prompt = tiny_prompt(host, seed=11)
        before = {}
        for number, (name, strength) in enumerate(loras):
            prompt[f"lora{number}"] = {"class_type": "H3LoRA", "inputs": {"lora": name, "strength": strength, **before}}
            before = {"loras": [f"lora{number}", 0]}
        prompt[node_id(prompt, "H3LoadModel")]["inputs"] |= before
        return prompt

    return build


def picture(job, open_video):
    """The first frame of the video that a job saved."""
    assert job.wait(180)[-1].type == "execution_success"
    with open_video(job) as video:
        return next(video.decode(video=0)).to_ndarray(format="rgb24")


def test_chain_changes_the_video_and_its_strength_too(host, loras, chained, open_video):
    chains = [(), ((loras[0], 1.0),), ((loras[0], 1.0), (loras[1], 1.0)), ((loras[0], 1.0), (loras[1], -1.0))]
    frames = [picture(host.submit(chained(*chain)), open_video) for chain in chains]
    for number, frame in enumerate(frames):
        assert all((frame != other).any() for other in frames[number + 1 :])


def test_node_says_what_became_of_the_keys(host, loras, chained):
    events = host.submit(chained((loras[1], 0.3))).wait(180)
    texts = [str(event.data) for event in events]
    assert any("LoRA b.safetensors x 0.3 (kohya: 45 keys applied, 0 ignored, 0 failed)" in text for text in texts)


def test_absent_file_is_refused_before_the_job(host, loras, chained):
    with pytest.raises(PromptRefused, match="choose one of what is there"):
        host.submit(chained(("h3/c.safetensors", 1.0)))
