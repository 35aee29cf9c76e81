"""Jobs through the API queue of a host: the shipped workflow, progress, cancel, caching, core nodes, files."""

import json
import time

import numpy as np
import pytest

from comfyui_h3.scripts.comfy_host import PromptRefused
from comfyui_h3.tests.host.conftest import ROOT

FRAMES = 22  # of tiny_prompt
FROM_SAMPLER = {"H3SampleDiT", "H3DecodeVideo", "H3DecodeAudio", "H3SaveMP4"}


def run(host, prompt, **options):
    """The job and its events; it must end well."""
    job = host.submit(prompt, **options)
    events = job.wait(180)
    assert events[-1].type == "execution_success", events[-1].data.get("exception_message")
    return job, events


def executed_classes(prompt, events):
    """Classes of the nodes that ran, as opposed to coming from the cache."""
    nodes = {event.data["node"] for event in events if event.type == "executing" and event.data.get("node")}
    return {prompt[node]["class_type"] for node in nodes}


def same_graph(one, other):
    """Whether two prompts have the same nodes and inputs; hosts add keys of their own to nodes."""
    return {key: (node["class_type"], node["inputs"]) for key, node in one.items()} == {
        key: (node["class_type"], node["inputs"]) for key, node in other.items()
    }


def is_forward(event, node, num_forwards):
    """Whether a message reports forwards of the sampler ``node``, not the loading of its weights before them."""
    return event.type == "progress" and str(event.data["node"]) == node and event.data["max"] == num_forwards


@pytest.fixture(scope="module")
def finished(host, tiny_prompt):
    """(prompt, job, events) of one run of the shipped workflow with the UI form beside it."""
    prompt = tiny_prompt(host, seed=11, sigma_points=9, prompt="a lighthouse in a storm")
    workflow = json.loads((ROOT / "workflows" / "t2va.json").read_text())
    return prompt, *run(host, prompt, workflow=workflow)


def test_shipped_workflow_makes_a_video_with_sound(finished, open_video):
    _, job, _ = finished
    with open_video(job) as file:
        video, sound = file.streams.video[0], file.streams.audio[0]
        assert (video.width, video.height, video.average_rate) == (64, 64, 24)
        assert (sound.rate, sound.channels) == (32000, 2)
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video)]
        file.seek(0)
        samples = np.concatenate([frame.to_ndarray() for frame in file.decode(sound)], axis=1)
    assert len(frames) == FRAMES
    assert np.stack(frames).std() > 1
    assert np.sqrt((samples**2).mean()) > 1e-4


def test_saved_file_carries_prompt_and_workflow(finished, open_video):
    prompt, job, _ = finished
    with open_video(job) as file:
        assert same_graph(json.loads(file.metadata["prompt"]), prompt)
        assert json.loads(file.metadata["workflow"])["nodes"]


def test_history_carries_the_stage_times(finished, node_id):
    prompt, job, _ = finished
    timings = job.outputs()[node_id(prompt, "H3SaveMP4")]["h3_timings"]
    assert len(timings) >= 4
    assert all(row["seconds"] >= 0 and row["name"] for row in timings)


def test_progress_arrives_once_per_forward(finished, node_id, throttles_progress):
    prompt, _, events = finished
    sampler = node_id(prompt, "H3SampleDiT")
    values = [event.data["value"] for event in events if is_forward(event, sampler, 8)]
    assert values[-1] == 8
    if throttles_progress:
        assert values == sorted(values)
    else:
        assert [value for value in values if value] == list(range(1, 9))


def test_unchanged_prompt_is_fully_cached(finished, host):
    prompt, _, _ = finished
    _, events = run(host, prompt)
    assert executed_classes(prompt, events) == set()


def test_changed_seed_runs_from_the_sampler_only(host, tiny_prompt):
    run(host, tiny_prompt(host, seed=21))
    prompt = tiny_prompt(host, seed=22)
    _, events = run(host, prompt)
    assert executed_classes(prompt, events) == FROM_SAMPLER


def test_changed_prompt_keeps_the_model(host, tiny_prompt):
    run(host, tiny_prompt(host, prompt="one"))
    prompt = tiny_prompt(host, prompt="two")
    _, events = run(host, prompt)
    assert executed_classes(prompt, events) == {"H3EncodePrompt", *FROM_SAMPLER}


def test_interrupt_ends_sampling_within_one_forward_and_the_next_job_works(host, tiny_prompt, node_id):
    prompt = tiny_prompt(host, seed=31, sigma_points=200, width=256, height=256)
    sampler = node_id(prompt, "H3SampleDiT")
    job = host.submit(prompt)
    before, after, end = [], 0, None
    for event in job.events(180):
        end = event
        if not is_forward(event, sampler, 199):
            continue
        before.append(time.monotonic())
        if len(before) == 3:
            host.interrupt(job.prompt_id)
        after += len(before) > 3
    assert end.type == "execution_interrupted"
    assert end.data["node_type"] == "H3SampleDiT"
    assert after <= 2  # one that was on its way, one of the forward that was running
    assert job.history()["status"]["status_str"] == "error"
    run(host, tiny_prompt(host, seed=32))


def test_freed_host_runs_the_next_job(host, tiny_prompt):
    run(host, tiny_prompt(host, seed=41))
    host.free()
    deadline = time.monotonic() + 20
    prompt = tiny_prompt(host, seed=41)
    while time.monotonic() < deadline:  # the host frees in its own time
        time.sleep(1)
        _, events = run(host, prompt)
        if executed_classes(prompt, events):
            break
    assert executed_classes(prompt, events) == {"H3LoadModel", "H3EncodePrompt", *FROM_SAMPLER}


def test_core_save_video_saves_our_video_with_its_sound(host, tiny_prompt, node_id, open_video):
    prompt = tiny_prompt(host, seed=51)
    video, audio = node_id(prompt, "H3DecodeVideo"), node_id(prompt, "H3DecodeAudio")
    prompt[video]["inputs"]["audio"] = [audio, 0]
    del prompt[node_id(prompt, "H3SaveMP4")]
    saved = {"video": [video, 0], "filename_prefix": "core/video", "format": "auto", "codec": "auto"}
    prompt["core"] = {"class_type": "SaveVideo", "inputs": saved}
    job, _ = run(host, prompt, workflow={"nodes": []})
    with open_video(job, "core") as file:
        assert (file.streams.audio[0].rate, file.streams.audio[0].channels) == (32000, 2)
        assert sum(1 for _ in file.decode(file.streams.video[0])) == FRAMES
        assert same_graph(json.loads(file.metadata["prompt"]), prompt)


def test_get_video_components_gives_image_and_audio(host, tiny_prompt, node_id):
    prompt = tiny_prompt(host, seed=61)
    video, audio = node_id(prompt, "H3DecodeVideo"), node_id(prompt, "H3DecodeAudio")
    prompt[video]["inputs"]["audio"] = [audio, 0]
    del prompt[node_id(prompt, "H3SaveMP4")]
    prompt["parts"] = {"class_type": "GetVideoComponents", "inputs": {"video": [video, 0]}}
    prompt["images"] = {"class_type": "SaveImage", "inputs": {"images": ["parts", 0], "filename_prefix": "parts"}}
    sound = {"audio": ["parts", 1], "filename_prefix": "parts", "quality": "V0"}
    prompt["sound"] = {"class_type": "SaveAudioMP3", "inputs": sound}
    job, _ = run(host, prompt)
    outputs = job.outputs()
    assert len(outputs["images"]["images"]) == FRAMES
    assert len(host.view(outputs["sound"]["audio"][0])) > 1000


def test_save_mp4_leaves_metadata_out_when_asked(host, tiny_prompt, node_id, open_video):
    prompt = tiny_prompt(host, seed=71)
    prompt[node_id(prompt, "H3SaveMP4")]["inputs"]["save_metadata"] = False
    job, _ = run(host, prompt, workflow={"nodes": []})
    with open_video(job) as file:
        assert not {"prompt", "workflow"} & set(file.metadata)


def test_output_name_may_not_leave_the_output_folder(host, tiny_prompt, node_id):
    prompt = tiny_prompt(host, seed=71)
    prompt[node_id(prompt, "H3SaveMP4")]["inputs"]["filename_prefix"] = "../../escaped"
    with pytest.raises(PromptRefused, match="output folder"):
        host.submit(prompt)
    assert not list(host.base_dir.parent.rglob("escaped*"))


def test_server_with_a_loaded_model_stops_cleanly(start_host, tiny_prompt):
    with start_host() as host:
        run(host, tiny_prompt(host))
        assert host.stop(timeout_s=30) == 0


def test_server_stops_in_mid_sampling(start_host, tiny_prompt, node_id):
    with start_host() as host:
        prompt = tiny_prompt(host, sigma_points=200, width=256, height=256)
        sampler = node_id(prompt, "H3SampleDiT")
        for event in host.submit(prompt).events(180):
            if is_forward(event, sampler, 199):
                break
        started = time.monotonic()
        assert host.stop(timeout_s=30) == 0
        assert time.monotonic() - started < 15
