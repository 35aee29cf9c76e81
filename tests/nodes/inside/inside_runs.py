"""The nodes over a tiny engine, called as the host calls them; progress, Cancel and files."""

import os
from types import SimpleNamespace

import av
import comfy.model_management
import pytest
import torch
from comfy_execution.utils import CurrentNodeContext

from comfyui_h3.h3core.errors import OutputError, RequestError
from comfyui_h3.nodes import progress as progress_module
from comfyui_h3.nodes.decode_audio import H3DecodeAudio
from comfyui_h3.nodes.decode_video import H3DecodeVideo
from comfyui_h3.nodes.encode_prompt import H3EncodePrompt
from comfyui_h3.nodes.progress import HostProgress, LoadProgress, describe, show_notices, show_text
from comfyui_h3.nodes.sample import H3SampleDiT
from comfyui_h3.nodes.save_mp4 import H3SaveMP4, check_prefix, graph_tags, output_path
from comfyui_h3.nodes.video import H3Video

Interrupted = comfy.model_management.InterruptProcessingException


@pytest.fixture(scope="module")
def conditioning(tiny_engine):
    return H3EncodePrompt.execute(tiny_engine, "rain on a tin roof", 64, 64, 5)[0]


@pytest.fixture(scope="module")
def latents(tiny_engine, conditioning):
    return H3SampleDiT.execute(tiny_engine, conditioning, 42, 3)[0]


@pytest.fixture(scope="module")
def audio(tiny_engine, latents):
    return H3DecodeAudio.execute(tiny_engine, latents)[0]


@pytest.fixture(scope="module")
def video(tiny_engine, latents, audio):
    return H3DecodeVideo.execute(tiny_engine, latents, audio)[0]


@pytest.fixture
def save(monkeypatch):
    """``save(video, **inputs)``: H3SaveMP4 with the hidden inputs of a queued graph."""
    hidden = SimpleNamespace(prompt={"1": {"class_type": "H3LoadModel"}}, extra_pnginfo={"workflow": {"nodes": []}})
    monkeypatch.setattr(H3SaveMP4, "hidden", hidden)

    def run(video, **inputs):
        settings = {"filename_prefix": "video/H3", "crf": 30, "preset": "ultrafast", "save_metadata": True}
        return H3SaveMP4.execute(video, **{**settings, **inputs}).ui

    return run


def cancel_at(monkeypatch, call):
    """Lets the host's Cancel be pressed before call number ``call`` of the progress."""
    calls = []

    def check():
        calls.append(None)
        if len(calls) == call:
            raise Interrupted

    monkeypatch.setattr(comfy.model_management, "throw_exception_if_processing_interrupted", check)


def test_sound_is_the_hosts_audio(audio):
    assert set(audio) == {"waveform", "sample_rate"}
    assert audio["waveform"].shape[:2] == (1, 2)
    assert audio["waveform"].dtype == torch.float32
    assert audio["sample_rate"] == 32000


def test_video_is_the_hosts_video_with_sound(video, audio):
    assert isinstance(video, H3Video)
    assert (video.get_dimensions(), video.get_frame_count()) == ((64, 64), 5)
    assert torch.equal(video.get_components().audio["waveform"], audio["waveform"])


def test_saved_file_is_shown_and_timed(video, save, host_folders):
    shown = save(video)
    assert shown["images"] == [{"filename": "H3_00001_.mp4", "subfolder": "video", "type": "output"}]
    assert shown["animated"] == (True,)
    assert [row["name"] for row in shown["h3_timings"] if not row["name"].startswith("load_")] == [
        "encode",
        "modulate",
        "sample",
        "decode_video",
        "decode_audio",
        "save_mp4",
    ]
    assert all(row.keys() == {"name", "seconds", "num_units"} for row in shown["h3_timings"])
    with av.open(host_folders[1] / "video" / "H3_00001_.mp4") as file:
        assert file.metadata["prompt"] == '{"1": {"class_type": "H3LoadModel"}}'
        assert file.metadata["workflow"] == '{"nodes": []}'
    assert save(video)["images"][0]["filename"] == "H3_00002_.mp4"


def test_switch_leaves_the_graph_out(video, save, host_folders):
    save(video, save_metadata=False)
    with av.open(host_folders[1] / "video" / "H3_00001_.mp4") as file:
        assert not {"prompt", "workflow"} & set(file.metadata)


def test_disable_metadata_of_the_host_wins(monkeypatch):
    from comfy.cli_args import args

    assert graph_tags({}, {"workflow": {}}) == {"prompt": "{}", "workflow": "{}"}
    assert graph_tags(None, None) == {}
    monkeypatch.setattr(args, "disable_metadata", True)
    assert graph_tags({}, {"workflow": {}}) == {}


def test_given_sound_replaces_that_of_the_video(video, save, host_folders):
    save(video, audio={"waveform": torch.zeros(1, 1, 48000), "sample_rate": 48000})
    with av.open(host_folders[1] / "video" / "H3_00001_.mp4") as file:
        assert file.streams.audio[0].rate == 48000


def test_sound_that_is_not_finite_writes_no_file(video, save, host_folders):
    with pytest.raises(OutputError, match="decode_audio"):
        save(video, audio={"waveform": torch.full((1, 2, 800), float("nan")), "sample_rate": 32000})
    assert [names for _, _, names in os.walk(host_folders[1]) if names] == []


def test_unusable_output_folder_says_what_to_do(video, save, host_folders):
    (host_folders[1] / "plain").write_text("")
    with pytest.raises(OutputError, match=r"Not a directory; choose another filename_prefix"):
        save(video, filename_prefix="plain/H3")


def test_names_lose_their_control_characters(host_folders):
    assert check_prefix("a\nb\u202e\ud800c\x7f") == "abc"
    path, subfolder = output_path("v\0ideo/%width%x%height%", 64, 32)
    assert (path.parent.name, path.name, subfolder) == ("video", "64x32_00001_.mp4", "video")
    with pytest.raises(RequestError):
        output_path("../x", 64, 32)


def test_cancel_in_sampling_leaves_the_engine_usable(tiny_engine, conditioning, latents, monkeypatch):
    with monkeypatch.context() as patch:
        cancel_at(patch, 2)
        with pytest.raises(Interrupted):
            H3SampleDiT.execute(tiny_engine, conditioning, 42, 3)
    again = H3SampleDiT.execute(tiny_engine, conditioning, 42, 3)[0]
    assert torch.equal(again.video, latents.video)
    assert torch.equal(again.audio, latents.audio)


@pytest.mark.parametrize("stage", ["encode", "decode_video", "decode_audio"])
def test_cancel_in_any_stage_leaves_the_engine_usable(tiny_engine, latents, video, audio, monkeypatch, stage):
    run = {
        "encode": lambda: H3EncodePrompt.execute(tiny_engine, "rain on a tin roof", 64, 64, 5)[0].text,
        "decode_video": lambda: H3DecodeVideo.execute(tiny_engine, latents)[0].frames.pixels,
        "decode_audio": lambda: H3DecodeAudio.execute(tiny_engine, latents)[0]["waveform"],
    }[stage]
    with monkeypatch.context() as patch:
        cancel_at(patch, 1)
        with pytest.raises(Interrupted):
            run()
    assert torch.equal(run(), run())


def test_cancel_while_writing_leaves_no_file(video, save, host_folders, monkeypatch):
    cancel_at(monkeypatch, 4)
    with pytest.raises(Interrupted):
        save(video)
    assert os.listdir(host_folders[1] / "video") == []


def test_impossible_request_reaches_the_host_unchanged(tiny_engine):
    with pytest.raises(RequestError, match=r"^height=50 is not a multiple of 32 pixels; use 32 or 64$"):
        H3EncodePrompt.execute(tiny_engine, "rain", 64, 50, 5)


@pytest.fixture
def page(monkeypatch):
    """What reaches the page from a node that runs as number 7: its bar and its lines of text."""
    import comfy.utils
    import server

    seen = SimpleNamespace(bar=[], text=[])
    page_server = SimpleNamespace(send_progress_text=lambda text, node: seen.text.append((node, text)))
    monkeypatch.setattr(server.PromptServer, "instance", page_server, raising=False)
    hook = lambda value, total, preview, **_: seen.bar.append((value, total))  # noqa: E731
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    with CurrentNodeContext("prompt", "7"):
        yield seen


def test_progress_reaches_bar_and_text_of_the_node(page):
    on_step = HostProgress("Sampling")
    for done in range(4):
        on_step(done, 3)
    assert (page.bar[0], page.bar[-1]) == ((0, 3), (3, 3))
    assert page.text[0] == ("7", "Sampling: waiting for the weights")
    assert page.text[1] == ("7", "Sampling: 0 of 3")
    assert page.text[-1][1].startswith("Sampling: 3 of 3, ")


def test_text_is_not_sent_for_every_frame(page, monkeypatch):
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: 100.0)
    on_frame = HostProgress("Writing")
    for done in range(363):
        on_frame(done, 362)
    assert len(page.text) == 3


def test_text_is_escaped_for_the_page(page):
    """It draws the text as HTML: a label would vanish, and a file name could hold a script."""
    show_text("<Video 1> & <img src=x onerror=alert(1)>")
    assert page.text == [("7", "&lt;Video 1&gt; &amp; &lt;img src=x onerror=alert(1)&gt;")]


def test_notices_are_one_line_and_each_is_there_once(page):
    show_notices(["one.", "two", "one"])
    show_notices([])
    assert page.text == [("7", "notice: one; two")]


def test_bar_and_pace_start_again_with_the_next_weights(page, monkeypatch):
    now = iter([0.0, 10.0, 100.0, 101.0])
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(now))
    on_load = LoadProgress("the media encoders")
    for done, total in ((0, 2e9), (2e9, 2e9), (0, 1e9), (1e9, 1e9)):
        on_load(done, total)
    assert page.text[-1][1] == "Loading the media encoders: 1.0 of 1.0 GB, 1.00 GB/s"
    assert page.bar[-1] == (1e9, 1e9)


def test_odd_length_is_noticed_on_the_node(tiny_engine, page):
    conditioning = H3EncodePrompt.execute(tiny_engine, "rain on a tin roof", 64, 64, 8)[0]
    assert conditioning.request.num_frames == 22
    assert page.text[-1][1].startswith("notice: frames=8 is not 17k + 5: rounded up to 22 (0.92 s); ")


def test_strict_refuses_what_would_be_noticed(tiny_engine):
    with pytest.raises(RequestError, match=r"strict is set: .*rounded up to 22"):
        H3EncodePrompt.execute(tiny_engine, "rain", 64, 64, 8, strict=True)


@pytest.mark.parametrize(
    ("done", "seconds", "line"),
    [
        (0, 0.0, "Sampling: 0 of 49"),
        (12, 12.6, "Sampling: 12 of 49, 1.05 s each, about 39 s left"),
        (24, 6.0, "Sampling: 24 of 49, 4.0 a second, about 6 s left"),
        (49, 51.5, "Sampling: 49 of 49, 1.05 s each, 51.5 s"),
    ],
)
def test_line_says_pace_and_what_is_left(done, seconds, line):
    assert describe("Sampling", done, 49, seconds) == line
