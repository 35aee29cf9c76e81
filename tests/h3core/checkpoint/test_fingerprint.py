"""A checkpoint that was replaced on disk is another one."""

import os
import shutil

import pytest

from comfyui_h3.h3core.checkpoint.index import fingerprint


@pytest.fixture
def copy(tiny_h3, tmp_path):
    return shutil.copytree(tiny_h3 / "FL2VA", tmp_path / "h3" / "FL2VA").parent


@pytest.mark.parametrize(
    "file",
    [
        "FL2VA/model_index.json",
        "FL2VA/video_vae/source/config.json",
        "FL2VA/transformer/model.safetensors.index.json",
        "FL2VA/transformer/model-00002-of-00003.safetensors",
    ],
)
def test_fingerprint_follows_configs_and_weights(copy, file):
    before = fingerprint(copy)
    assert fingerprint(copy) == before
    os.utime(copy / file, ns=(1, 1))
    assert fingerprint(copy) != before


def test_fingerprint_sees_into_linked_folders(copy, tmp_path):
    (copy / "FL2VA").rename(tmp_path / "elsewhere")
    (copy / "FL2VA").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    before = fingerprint(copy)
    os.utime(tmp_path / "elsewhere/transformer/config.json", ns=(1, 1))
    assert fingerprint(copy) != before


def test_dangling_links_and_absent_folders_have_one_too(copy, tmp_path):
    (copy / "FL2VA/gone.json").symlink_to(tmp_path / "nowhere")
    assert fingerprint(copy)
    assert fingerprint(tmp_path / "absent")
