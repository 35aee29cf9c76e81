"""The fixed strings of H3's prompt format: modes, section names, first lines, task types and relationship markers.

Source: the prompt guide that comes with the MiniMax H3 release. These are the strings of the training data, byte for
byte; everything else in a prompt is the user's own text.
"""

from __future__ import annotations

import re

T2VA, FIRST, FIRST_LAST, LAST, REF2VA = MODES = ("t2va", "first", "first_last", "last", "ref2va")
"""Text alone; with a first frame; with first and last frame; with a last frame; with references."""

NUM_KEYFRAMES = {T2VA: 0, FIRST: 1, FIRST_LAST: 2, LAST: 1}

BASE_MAIN, REFERENCE_MAIN = "integrated_multimodal_description", "detailed_description"
SOUNDSCAPE, MUSIC = "overall_soundscape", "non_diegetic_music"
DEFINITIONS, SUMMARY, RETENTION = "subject_definitions", "summary", "retention_analysis"
BASE_SECTIONS = (BASE_MAIN, SOUNDSCAPE, MUSIC)
REFERENCE_SECTIONS = (DEFINITIONS, SUMMARY, RETENTION, REFERENCE_MAIN, SOUNDSCAPE, MUSIC)
NONE = "N/A"

PICTURE, VIDEO, AUDIO, SUBJECT = "Picture", "Video", "Audio", "Subject"
MEDIA_KINDS = (PICTURE, VIDEO, AUDIO)
LABEL_KINDS = (SUBJECT, *MEDIA_KINDS)

VIDEO_EDITING, VIDEO_CONTINUATION = "video editing", "video continuation"
AUDIO_REUSE, AUDIO_REFERENCE = "audio reuse", "audio reference"
TASK_TYPES = (
    "keyframe completion",
    "reference generation",
    VIDEO_EDITING,
    VIDEO_CONTINUATION,
    AUDIO_REUSE,
    AUDIO_REFERENCE,
)
EDIT_SENTENCE = "The target video is an edited version of <Video 1>"

VISUAL_MARKERS = ("fully_preserved", "partially_preserved", "attribute_transfer", "weak_reference")
AUDIO_MARKERS = ("fully_copy", "partially_copy", "reference", "weak_reference")

LANGUAGES = (
    "Arabic",
    "Chinese",
    "English",
    "French",
    "German",
    "Italian",
    "Japanese",
    "Korean",
    "Portuguese",
    "Russian",
    "Spanish",
)
"""Spoken languages that H3 supports stably. Others are allowed."""

FIRST_FRAME_LINE = (
    "For the target video, at 0.00 seconds into the target video, <Picture 1> (from [Shot 1]) is fully referenced."
)
ALIGNMENT = "How the reference pictures align with the target video — "
ALIGNED_AT_START = "Picture 1 (from Shot 1) aligns with the 0.00-second mark of the target video; "

FIRST_LINE_PATTERNS = {
    FIRST: re.compile(re.escape(FIRST_FRAME_LINE)),
    FIRST_LAST: re.compile(
        re.escape(ALIGNMENT + ALIGNED_AT_START)
        + r"Picture 2 \(from Shot (?P<shot>[1-9]\d*)\) aligns with the "
        + r"(?P<seconds>\d+\.\d\d)-second mark of the target video\."
    ),
    LAST: re.compile(
        re.escape(ALIGNMENT)
        + r"<Picture 1> \(from \[Shot (?P<shot>[1-9]\d*)\]\) aligns with the "
        + r"(?P<seconds>\d+\.\d\d)-second mark of the target video\."
    ),
}


def first_line(mode: str, last_shot: int, seconds: str) -> str:
    """The line above the sections, "" for the modes that have none. seconds: the duration with two decimals."""
    end = f"aligns with the {seconds}-second mark of the target video."
    if mode == FIRST:
        return FIRST_FRAME_LINE
    if mode == FIRST_LAST:
        return f"{ALIGNMENT}{ALIGNED_AT_START}Picture 2 (from Shot {last_shot}) {end}"
    if mode == LAST:
        return f"{ALIGNMENT}<Picture 1> (from [Shot {last_shot}]) {end}"
    return ""


def sections_of(mode: str) -> tuple[str, ...]:
    """The sections a prompt of this mode has, in order."""
    return REFERENCE_SECTIONS if mode == REF2VA else BASE_SECTIONS


def main_section_of(mode: str) -> str:
    """The section with the shots."""
    return REFERENCE_MAIN if mode == REF2VA else BASE_MAIN


def markers_of(kind: str) -> tuple[str, ...]:
    """The relationship markers that a retention line of a label of this kind may have."""
    return AUDIO_MARKERS if kind == AUDIO else VISUAL_MARKERS


def shot_time(milliseconds: int) -> str:
    """``MM:SS.mmm``"""
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes:02}:{rest // 1000:02}.{rest % 1000:03}"
