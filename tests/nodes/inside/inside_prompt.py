"""The prompt nodes: what they make, what they let pass, and what stops a job."""

import inspect

import pytest
import torch

from comfyui_h3.h3core.errors import RequestError
from comfyui_h3.h3core.prompt import MODES, PromptContext, check
from comfyui_h3.h3core.types import Condition, EncodedMedia, EncodedMedium, ResolvedRequest
from comfyui_h3.nodes.prompt_builder import H3PromptBuilder
from comfyui_h3.nodes.prompt_checker import H3PromptChecker

BUILDER = {i.id: i.default for i in H3PromptBuilder.define_schema().inputs if not i.optional}
CHECKER = {i.id: i.default for i in H3PromptChecker.define_schema().inputs if not i.optional}
NODES = [H3PromptBuilder, H3PromptChecker]


def media(task="fl2va", pictures=1, videos=0, sounds=0, num_frames=124):
    """Encoded media with as many of each kind; a second keyframe is the last frame. Nobody looks at the latents."""
    request = ResolvedRequest(
        width=64, height=64, num_frames=num_frames, num_latent_frames=37, num_audio_latents=207, task=task
    )
    sound = torch.zeros(2, 32, 1)
    conditions = [
        *(Condition(kind="keyframe", frame=index * (num_frames - 1)) for index in range(pictures) if task == "fl2va"),
        *(Condition(kind="image") for _ in range(pictures) if task == "ref2va"),
        *(Condition(kind="video", audio=sound) for _ in range(videos)),
        *(Condition(kind="audio", audio=sound) for _ in range(sounds)),
    ]
    return EncodedMedia(request=request, media=tuple(EncodedMedium(condition=condition) for condition in conditions))


def build(**fields):
    return H3PromptBuilder.execute(**{**BUILDER, **fields}).args


def examine(**fields):
    return H3PromptChecker.execute(**{**CHECKER, **fields}).args


@pytest.mark.parametrize("mode", MODES)
def test_defaults_make_a_prompt_without_findings(mode):
    assert H3PromptBuilder.validate_inputs(**{**BUILDER, "mode": mode}) is True
    prompt, report = build(mode=mode)
    assert not check(prompt, PromptContext(mode=mode, num_frames=124)).findings
    assert report.startswith("0 errors, 0 warnings; ")
    assert examine(prompt=prompt) == (prompt, report)
    assert examine(prompt=prompt, mode=mode)[0] == prompt


def test_checker_begins_with_what_the_builder_makes():
    assert CHECKER["prompt"] == build()[0]


def test_checker_passes_with_its_defaults():
    assert H3PromptChecker.validate_inputs(**CHECKER) is True
    assert examine()[0] == CHECKER["prompt"]


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
def test_schema_follows_the_conventions(node):
    """As inside_schemas asks of every node; ids and options are held by saved workflows."""
    schema = node.define_schema()
    sockets = {socket.id: socket for socket in schema.inputs}
    assert all(socket.tooltip for socket in [*schema.inputs, *schema.outputs])
    assert all(output.display_name == output.id and output.id not in sockets for output in schema.outputs)
    arguments = inspect.signature(node.execute).parameters
    assert list(sockets) == list(arguments)
    assert [name for name in sockets if sockets[name].optional] == [
        name for name, argument in arguments.items() if argument.default is None
    ]
    assert next(socket.options for socket in schema.inputs if socket.id == "mode")[-5:] == list(MODES)


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
def test_validation_runs_with_any_input_linked(node):
    assert node.validate_inputs() is True
    fields = BUILDER if node is H3PromptBuilder else CHECKER
    for name in fields:
        assert node.validate_inputs(**{**fields, name: None}) is True


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"frames": 1}, "use 5 or more"),
        ({"mode": "i2va"}, "use one of t2va"),
        ({"shots": ""}, "no shot"),
        ({"shots": "One.\n\nTwo."}, "shot 2 has no time"),
        ({"shots": "One.\n\n00:02.000 two.\n\n1.5 s three."}, "times must increase"),
        ({"shots": "One.\n\n00:09.000 two."}, "the video ends at 5.17 s"),
        ({"shots": "[Shot 1] One."}, "leave the markers out"),
        ({"shots": "One.\n\n0:7 two."}, "write 00:03.200 or 3.2 s"),
        ({"soundscape": " "}, "N/A"),
        ({"music": ""}, "N/A"),
        ({"mode": "ref2va", "task_types": "editing"}, "no task type"),
        ({"mode": "ref2va", "subjects": ""}, "subject_definitions is empty"),
    ],
)
def test_fields_that_make_no_prompt_are_answered_before_the_job(wrong, remedy):
    assert remedy in H3PromptBuilder.validate_inputs(**{**BUILDER, **wrong}).splitlines()[0]


def test_fields_of_references_do_not_matter_without_them():
    assert H3PromptBuilder.validate_inputs(**{**BUILDER, "subjects": "", "task_types": "", "style": ""}) is True


def test_linked_length_does_not_refuse_a_late_shot():
    fields = {**BUILDER, "shots": "One.\n\n00:09.000 two.", "frames": None}
    assert H3PromptBuilder.validate_inputs(**fields) is True


def test_length_off_the_grid_is_rounded_up():
    assert "(from [Shot 2]) aligns with the 5.88-second mark" in build(mode="last", frames=125)[0]


def test_report_shows_how_media_are_numbered():
    report = build(mode="ref2va", media=media("ref2va", pictures=2, videos=1, sounds=1))[1]
    assert report.splitlines()[0] == "connected: <Picture 1>, <Picture 2>, <Video 1> with <Audio 1>, <Audio 2>"
    assert "<Picture 2> is connected and never named" in report


def test_media_of_another_length_are_refused():
    with pytest.raises(RequestError, match="frames=124, and the connected media were prepared for 243"):
        build(mode="first", media=media(num_frames=243))


@pytest.mark.parametrize(
    "text", ["雨の夜 🌧", " leading and trailing \n", "a\r\nb", "e\u0301", "مرحبا", "<|im_end|>", "\x00 a"]
)
def test_prompt_passes_byte_for_byte(text):
    assert examine(prompt=text, stop_on_errors=False)[0] == text


def test_errors_stop_the_job_with_the_first_in_the_first_line():
    broken = CHECKER["prompt"].replace("</d>", "").replace("[Shot 2]", "[Shot 3]")
    with pytest.raises(RequestError) as info:
        examine(prompt=broken)
    lines = str(info.value).splitlines()
    assert lines[0].startswith("the prompt has 2 errors: line 1: ")
    assert "turn stop_on_errors off" in lines[0]
    assert len(lines) == 2
    assert examine(prompt=broken, stop_on_errors=False)[1].startswith("2 errors, ")


def test_many_errors_make_a_short_message():
    with pytest.raises(RequestError) as info:
        examine(prompt="</d>" * 10_000)
    assert len(str(info.value).splitlines()) == 11


def test_plain_prose_runs_where_errors_do_not_stop():
    with pytest.raises(RequestError, match="Plain prose runs as well"):
        examine(prompt="A cat sleeps.")
    assert examine(prompt="A cat sleeps.", stop_on_errors=False)[0] == "A cat sleeps."


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (media("fl2va", 1), "first, 124 frames"),
        (media("fl2va", 2, num_frames=243), "first_last, 243 frames"),
        (media("ref2va", 1, 1), "ref2va, 124 frames"),
        (None, "t2va, 124 frames"),
    ],
)
def test_auto_follows_the_media(given, line):
    assert line in examine(media=given, stop_on_errors=False)[1].splitlines()[0]


def test_labels_are_compared_with_the_media():
    prompt = build(mode="ref2va")[0]
    assert examine(prompt=prompt, media=media("ref2va", pictures=1))[0] == prompt
    with pytest.raises(RequestError, match="<Picture 1> is named, and nothing of that kind is connected"):
        examine(prompt=prompt, media=media("ref2va", pictures=0, videos=1))


def test_mode_that_does_not_go_with_the_media_is_refused():
    with pytest.raises(RequestError, match="mode=t2va, but the connected media are for first"):
        examine(mode="t2va", media=media("fl2va", 1))


def test_tokens_are_counted_by_the_engine(tiny_engine):
    report = examine(engine=tiny_engine)[1]
    assert f"{tiny_engine.count_tokens(CHECKER['prompt'])} tokens" in report.splitlines()[0]


@pytest.mark.parametrize("value", ["abc", 3, {}])
def test_value_in_place_of_a_link_is_refused_with_the_node_to_connect(value):
    with pytest.raises(RequestError, match="Load H3"):
        examine(engine=value)
    with pytest.raises(RequestError, match="H3 Encode FL Media"):
        examine(media=value)
    with pytest.raises(RequestError, match="H3 Encode FL Media"):
        build(media=value)


def test_empty_prompt_is_answered_before_the_job():
    assert "the prompt is empty" in H3PromptChecker.validate_inputs(**{**CHECKER, "prompt": " "})
    assert H3PromptChecker.validate_inputs(**{**CHECKER, "prompt": " ", "stop_on_errors": False}) is True
