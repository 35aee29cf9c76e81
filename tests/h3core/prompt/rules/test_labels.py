"""Labels, the subjects they define, and the media they count."""

import pytest

from comfyui_h3.h3core.prompt import check
from comfyui_h3.tests.h3core.prompt.samples import BODY, MEDIA, REFERENCE, changed, context, found


@pytest.mark.parametrize(
    ("new", "code"),
    [
        ("<Image 1>", "label-kind"),
        ("<subject 1>", "label-kind"),
        ("<Character 2>", "label-kind"),
        ("<Subject 1 ", "label-open"),
        ("<Subject1>", "label-form"),
        ("<Subject 01>", "label-form"),
        ("<Subject>", "label-form"),
    ],
)
def test_labels_have_four_kinds_and_one_form(new, code):
    assert changed("<Subject 1> as he", f"{new} as he", "ref2va") == {code: "error"}


def test_unknown_tag_is_a_warning():
    assert changed("laughs", "<laughs>") == {"unknown-tag": "warning"}
    assert changed("laughs", "is < 3 and <3 > 2") == {}


def test_undefined_subject_is_an_error():
    assert changed("<Subject 1> as he", "<Subject 3> as he", "ref2va") == {"subject-undefined": "error"}


def test_subject_is_defined_before_it_is_used():
    assert changed("round glasses and a grey apron.", "a grey apron in <Subject 2>.", "ref2va") == {
        "subject-late": "error"
    }


def test_subjects_belong_to_references():
    assert changed("a clockmaker", "<Subject 1>") == {"subject-mode": "error"}


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("<Subject 2> is the workshop", "- <Subject 2> is the workshop", "definition-line"),
        ("<Subject 2> is the workshop", "<Subject 2>: the workshop", "definition-line"),
        ("<Video 1> is the source", "<Subject 2> is the source", "definition-twice"),
    ],
)
def test_unusual_definitions_are_warnings(old, new, code):
    assert changed(old, new, "ref2va")[code] == "warning"


@pytest.mark.parametrize("kind", ["Picture", "Video", "Audio"])
def test_label_without_its_medium_is_an_error(kind):
    assert changed("as he smiles", f"as <{kind} 3> smiles", "ref2va") == {"label-without-media": "error"}
    assert changed("a clockmaker", f"<{kind} 1>") == {"label-without-media": "error"}


def test_bare_picture_counts_with_first_and_last_frame_only():
    assert changed("a clockmaker", "a clockmaker as in Picture 2", "first_last") == {}
    assert changed("a clockmaker", "a clockmaker as in Picture 3", "first_last") == {"label-without-media": "error"}
    assert changed("a clockmaker", "a clockmaker by Picture 9", "first") == {}
    assert changed("a clockmaker", "<Picture 1>", "first_last") == {"picture-brackets": "warning"}


def test_media_that_are_not_named():
    assert found(REFERENCE, "ref2va", num_pictures=3) == {"media-uncited": "warning"}
    without = REFERENCE.replace("<Picture 1>", "a photo").replace("<Picture 2>", "a photo")
    assert found(without, "ref2va") == {"media-uncited": "error"}
    assert found(without, "ref2va", num_pictures=0) == {}
    assert found(BODY, "first")["media-uncited"] == "error"


def test_number_of_media_decides_the_words():
    without = REFERENCE.replace("<Picture 1>", "a photo").replace("<Picture 2>", "a photo")
    both = check(without, context("ref2va")).text()
    assert (
        "<Picture 1>, <Picture 2> are connected and no Picture is named; say what they are for, or disconnect" in both
    )
    assert "<Picture 1> is connected and no Picture is named; say what it is for, or disconnect it" in (
        check(without, context("ref2va", num_pictures=1)).text()
    )
    cited = REFERENCE.replace("as he smiles", "as <Picture 3> smiles")
    assert "<Picture 3> is named, and only 2 of that kind are connected;" in check(cited, context("ref2va")).text()


def test_soundtrack_need_not_be_named():
    assert found(REFERENCE, "ref2va", soundtracks=(1,)) == {}
    assert found(REFERENCE, "ref2va", soundtracks=()) == {"media-uncited": "warning"}
    assert found(REFERENCE, "ref2va", num_audios=3) == {"media-uncited": "warning"}  # one video: one of the two at most


def test_unknown_media_are_not_compared():
    unknown = dict.fromkeys(MEDIA)
    assert found(REFERENCE.replace("<Picture 2>", "<Picture 9>"), "ref2va", **unknown) == {}
