"""What the nodes tell the host about themselves."""

import asyncio
import inspect

import pytest

from comfyui_h3.nodes import H3Extension
from comfyui_h3.nodes._compat import make

NODES = asyncio.run(H3Extension().get_node_list())
SCHEMAS = {node.define_schema().node_id: node.define_schema() for node in NODES}


def test_ids_are_those_that_saved_workflows_hold():
    assert list(SCHEMAS) == [
        "H3LoadModel",
        "H3LoRA",
        "H3Canvas",
        "H3PromptBuilder",
        "H3PromptChecker",
        "H3Keyframe",
        "H3EncodeFLMedia",
        "H3ReferenceImage",
        "H3ReferenceVideo",
        "H3ReferenceAudio",
        "H3EncodeRefMedia",
        "H3EncodePrompt",
        "H3SampleDiT",
        "H3DecodeVideo",
        "H3DecodeAudio",
        "H3SaveMP4",
        "H3Component",
    ]


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
def test_everything_is_explained(node):
    schema = node.define_schema()
    assert schema.display_name
    assert schema.description
    for socket in [*schema.inputs, *(schema.outputs or [])]:
        assert socket.tooltip, f"{schema.node_id}.{socket.id}"


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
def test_outputs_have_names_and_no_id_of_an_input(node):
    schema = node.define_schema()
    inputs = {socket.id for socket in schema.inputs}
    for output in schema.outputs or []:
        assert output.display_name == output.id.removeprefix("all_")  # chained nodes: shown alike, other ids
        assert output.id not in inputs


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
def test_inputs_are_the_arguments_of_execute(node):
    inputs = {socket.id: socket for socket in node.define_schema().inputs}
    arguments = dict(inspect.signature(node.execute).parameters)
    assert arguments.keys() == inputs.keys()
    for name, argument in arguments.items():
        assert (argument.default is not argument.empty) == inputs[name].optional


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
def test_validation_runs_with_any_input_linked(node):
    """The host leaves an input out when another node gives its value, or passes None."""
    arguments = inspect.signature(node.validate_inputs).parameters
    if "kwargs" in arguments:
        pytest.skip("this node leaves validation to the host")
    assert node.validate_inputs() is True
    assert node.validate_inputs(**dict.fromkeys(arguments)) is True


def test_dispensable_arguments_are_dropped_where_unknown():
    def old(name, *, tooltip):
        return name, tooltip

    assert make(old, "a", tooltip="b", advanced=True, search_aliases=["c"]) == ("a", "b")


def test_other_unknown_arguments_are_errors():
    with pytest.raises(TypeError):
        make(lambda name: name, "a", tooltipp="b")
