"""Which folders are offered as checkpoints, under which names."""

import pytest

from comfyui_h3.nodes.models import component_folders, find_checkpoints, has_partition


def make_partition(folder):
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    (folder / "transformer" / "config.json").write_text("{}")
    (folder / "transformer" / "model.safetensors").write_bytes(b"weights")
    return folder


def make_release(folder, partitions=("FL2VA", "Ref2VA")):
    for name in partitions:
        make_partition(folder / name)
    return folder


def test_release_is_offered_by_its_folder(tmp_path):
    release = make_release(tmp_path / "MiniMax-H3")
    assert find_checkpoints([tmp_path]) == {"MiniMax-H3": release}


@pytest.mark.parametrize("partition", ["FL2VA", "Ref2VA"])
def test_one_partition_is_enough(tmp_path, partition):
    make_release(tmp_path / "half", [partition])
    assert list(find_checkpoints([tmp_path])) == ["half"]


def test_partition_without_its_parent_is_offered(tmp_path):
    make_partition(tmp_path / "my fl2va")
    assert list(find_checkpoints([tmp_path])) == ["my fl2va"]


def test_partitions_of_a_release_are_not_offered_beside_it(tmp_path):
    make_release(tmp_path / "MiniMax-H3")
    assert "MiniMax-H3/FL2VA" not in find_checkpoints([tmp_path])


def test_root_may_be_the_release_itself(tmp_path):
    release = make_release(tmp_path / "MiniMax-H3")
    assert find_checkpoints([release]) == {"MiniMax-H3": release}


def test_deeper_folders_are_found_with_their_path_as_name(tmp_path):
    make_release(tmp_path / "models--org--name" / "snapshots" / "0a1b")
    assert list(find_checkpoints([tmp_path])) == ["models--org--name/snapshots/0a1b"]


def test_links_are_followed(tmp_path):
    release = make_release(tmp_path / "disk" / "release")
    models = tmp_path / "models"
    models.mkdir()
    (models / "H3 链接").symlink_to(release, target_is_directory=True)
    assert find_checkpoints([models]) == {"H3 链接": models / "H3 链接"}


@pytest.mark.parametrize("transformer", ["transformer", "transformer_ref"])
def test_folder_of_diffusers_is_offered(tmp_path, transformer):
    folder = tmp_path / "h3-diffusers"
    (folder / transformer).mkdir(parents=True)
    (folder / "modular_model_index.json").write_text("{}")
    assert find_checkpoints([tmp_path]) == {"h3-diffusers": folder}
    assert list(component_folders(folder)) == [transformer]


def test_component_folders_are_named_by_their_path(tmp_path):
    release = make_release(tmp_path / "h3")
    (release / "FL2VA/video_vae/source").mkdir(parents=True)
    found = component_folders(release)
    assert list(found) == ["FL2VA/transformer", "FL2VA/video_vae/source", "Ref2VA/transformer"]
    assert found["FL2VA/video_vae/source"] == release / "FL2VA/video_vae/source"


def test_release_of_linked_partitions_is_found(tmp_path):
    partition = make_partition(tmp_path / "disk" / "x")
    (tmp_path / "models" / "h3").mkdir(parents=True)
    (tmp_path / "models" / "h3" / "FL2VA").symlink_to(partition, target_is_directory=True)
    assert list(find_checkpoints([tmp_path / "models"])) == ["h3"]


def test_ring_of_links_ends(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").symlink_to(tmp_path, target_is_directory=True)
    assert find_checkpoints([tmp_path]) == {}


def test_earlier_root_wins(tmp_path):
    first, second = make_release(tmp_path / "1" / "h3"), make_release(tmp_path / "2" / "h3")
    assert find_checkpoints([tmp_path / "1", tmp_path / "2"]) == {"h3": first}
    assert find_checkpoints([tmp_path / "2", tmp_path / "1"]) == {"h3": second}


def test_other_folders_and_missing_roots_are_passed_over(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.safetensors").write_bytes(b"")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    make_release(tmp_path / ".cache" / "partial")
    assert find_checkpoints([tmp_path, tmp_path / "absent"]) == {}


def test_missing_partition_is_noticed(tmp_path):
    release = make_release(tmp_path / "half", ["FL2VA"])
    assert has_partition(release, "fl2va")
    assert not has_partition(release, "ref2va")
