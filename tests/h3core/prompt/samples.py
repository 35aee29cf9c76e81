"""Prompts of every mode that follow every rule, and what is found when one place of them is changed."""

from comfyui_h3.h3core.prompt import PromptContext, check

BODY = """\
integrated_multimodal_description: [Shot 1] Live-action, cinematic, soft noon light. A wide shot frames a clockmaker \
(S1), a thin man with round glasses, bent over an open pocket watch at a bench. The camera pushes in with small \
amplitude at slow speed while he lowers a tiny gear into place and says in a dry, quiet voice: <d>[English] Listen. It \
breathes again.</d> [Shot 2] At 00:02.500, the camera cuts to a close-up of the moving balance wheel, static, under a \
sign reading "OPEN". [Shot 3] At 00:04.000, the shot switches to his apprentice (S2), a girl with red hair, who laughs \
and answers: <d>[German] Endlich!</d>

overall_soundscape: A fine, even ticking fills the room. Metal tools touch the bench, and a cart rolls past outside.

non_diegetic_music: A solo clarinet at a slow tempo, joined by quiet plucked strings."""
ALIGN = "How the reference pictures align with the target video \u2014 "
FIRST = (
    "For the target video, at 0.00 seconds into the target video, <Picture 1> (from [Shot 1]) is fully referenced.\n\n"
)
FIRST_LAST = (
    f"{ALIGN}Picture 1 (from Shot 1) aligns with the 0.00-second mark of the target video; Picture 2 (from Shot 3) "
    "aligns with the 5.17-second mark of the target video.\n\n"
)
LAST = f"{ALIGN}<Picture 1> (from [Shot 3]) aligns with the 5.17-second mark of the target video.\n\n"
REFERENCE = """\
subject_definitions:
<Subject 1> is the clockmaker in <Picture 1>, a thin man with round glasses and a grey apron.
<Subject 2> is the workshop in <Picture 2>, with a long bench below a skylight.
<Video 1> is the source of the slow camera path.
<Audio 2> is the voice-timbre reference for <Subject 1> (S1).

summary:
[reference generation + audio reference] The target video shows <Subject 1> at work in <Subject 2>, along the camera \
path of <Video 1> and with the voice of <Audio 2>.

retention_analysis:
<Subject 1> (appears in [Shot 1], [Shot 2]): fully_preserved - face, glasses and apron are kept.
<Subject 2> (appears in [Shot 1]): partially_preserved - the bench is kept, the light is later in the day.
<Video 1> (camera path): weak_reference - only the slow approach is followed.
<Audio 2>: reference - the timbre guides the spoken line and no signal is copied.

detailed_description:
The target video is in a realistic cinematic style with warm, low light.
[Shot 1] A wide shot opens on <Subject 2>, the workshop with its long bench. <Subject 1> (S1), the thin man in the \
grey apron, lifts a watch to his ear and says in the timbre of <Audio 2>, <d>[English] Listen.</d> The camera pushes \
in at slow speed along the path of <Video 1>.
[Shot 2] At 00:03.000, the shot cuts to a close-up of <Subject 1> as he smiles.

overall_soundscape:
A fine, even ticking fills the room.

non_diegetic_music:
N/A"""
GOOD = {
    "t2va": BODY,
    "first": FIRST + BODY,
    "first_last": FIRST_LAST + BODY,
    "last": LAST + BODY,
    "ref2va": REFERENCE,
}
MEDIA = {"num_pictures": 2, "num_videos": 1, "num_audios": 2}


def context(mode="t2va", num_frames=124, **fields):
    return PromptContext(mode=mode, num_frames=num_frames, **({**MEDIA, **fields} if mode == "ref2va" else fields))


def found(prompt, mode="t2va", **fields):
    """{code: level} of everything that is found."""
    return {finding.code: finding.level for finding in check(prompt, context(mode, **fields)).findings}


def changed(old, new, mode="t2va", **fields):
    """What is found when a good prompt is changed in one place."""
    assert old in GOOD[mode]
    return found(GOOD[mode].replace(old, new, 1), mode, **fields)
