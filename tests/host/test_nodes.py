"""The pack inside a host: import, schemas, and what a request that cannot run answers."""

import re
import shutil

import pytest

from comfyui_h3.scripts.comfy_host import PromptRefused
from comfyui_h3.tests.host.conftest import ROOT

NODES = {
    "H3LoadModel": "Load H3",
    "H3LoRA": "H3 LoRA",
    "H3Canvas": "H3 Canvas",
    "H3PromptBuilder": "H3 Prompt Builder",
    "H3PromptChecker": "H3 Prompt Checker",
    "H3Keyframe": "H3 Keyframe",
    "H3EncodeFLMedia": "H3 Encode FL Media",
    "H3ReferenceImage": "H3 Reference Image",
    "H3ReferenceVideo": "H3 Reference Video",
    "H3ReferenceAudio": "H3 Reference Audio",
    "H3EncodeRefMedia": "H3 Encode Ref Media",
    "H3EncodePrompt": "H3 Encode Prompt",
    "H3SampleDiT": "H3 Sample DiT",
    "H3DecodeVideo": "H3 Decode Video",
    "H3DecodeAudio": "H3 Decode Audio",
    "H3SaveMP4": "H3 Save MP4",
}


def import_lines(log):
    """The host's lines '<seconds> seconds [(IMPORT FAILED)]: <folder>'."""
    return re.findall(r"([\d.]+) seconds( \(IMPORT FAILED\))?: (\S.*)", log)


def refused(host, prompt):
    """First line that a client of the queue reads when the host does not take the prompt."""
    with pytest.raises(PromptRefused) as caught:
        host.submit(prompt)
    return str(caught.value)


def test_pack_is_imported_in_half_a_second(host):
    ((seconds, failed, _),) = (line for line in import_lines(host.log()) if line[2].endswith("ComfyUI-H3"))
    assert not failed
    assert float(seconds) < 0.5


@pytest.mark.parametrize("node", NODES)
def test_node_is_registered_under_its_display_name(host, node):
    assert host.object_info(node)["display_name"] == NODES[node]


@pytest.mark.parametrize("node", NODES)
def test_every_input_has_a_tooltip(host, node):
    schema = host.object_info(node)
    for group in ("required", "optional"):
        for name, (_, options) in schema["input"].get(group, {}).items():
            assert options.get("tooltip"), f"{node}.{name}"


@pytest.mark.parametrize(
    ("request_", "remedy"),
    [
        ({"width": 33}, "32 or 64"),
        ({"width": 0}, "32"),
        ({"height": 50}, "32 or 64"),
        ({"frames": 1}, "5"),
        ({"prompt": "as in <Picture 1>"}, "remove it from the prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \n\t"}, "prompt"),
    ],
)
def test_impossible_request_is_refused_with_its_remedy_in_the_first_line(host, tiny_prompt, request_, remedy):
    line = refused(host, tiny_prompt(host, **request_))
    assert remedy in line
    assert next(iter(request_)) in line


def test_unknown_model_is_refused(host, tiny_prompt, node_id):
    prompt = tiny_prompt(host)
    prompt[node_id(prompt, "H3LoadModel")]["inputs"]["model"] = "absent"
    assert "absent" in refused(host, prompt)


def test_prompt_of_vision_tokens_ends_with_an_error_that_says_what_to_remove(host, tiny_prompt):
    end = host.submit(tiny_prompt(host, prompt="a cat <|image_pad|>")).wait(60)[-1]
    assert end.type == "execution_error"
    assert end.data["node_type"] == "H3EncodePrompt"
    assert "<|image_pad|>" in end.data["exception_message"].splitlines()[0]


@pytest.fixture(scope="module")
def crowded_host(start_host, tmp_path_factory):
    """A host with two copies of the pack, and without metadata in its outputs."""
    clone = tmp_path_factory.mktemp("copies") / "h3 copy"
    kept_out = shutil.ignore_patterns(".*", "out", "tests", "__pycache__")
    shutil.copytree(ROOT, clone, ignore=kept_out)
    with start_host({"ComfyUI-H3": ROOT, "h3 copy": clone}, ["--disable-metadata"]) as host:
        yield host


def test_second_copy_of_the_pack_is_refused_and_the_first_works(crowded_host):
    lines = [line for line in import_lines(crowded_host.log()) if line[2].endswith(("ComfyUI-H3", "h3 copy"))]
    assert sorted(bool(failed) for _, failed, _ in lines) == [False, True]
    assert "ComfyUI-H3 is installed twice" in crowded_host.log()
    assert set(NODES) <= set(crowded_host.object_info())


def test_saved_file_has_no_metadata_when_the_host_disables_it(crowded_host, tiny_prompt, tmp_path, open_video):
    job = crowded_host.submit(tiny_prompt(crowded_host), workflow={"nodes": []})
    assert job.wait(120)[-1].type == "execution_success"
    with open_video(job) as video:
        assert not {"prompt", "workflow"} & set(video.metadata)
