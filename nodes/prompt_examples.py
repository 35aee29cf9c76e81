"""What the prompt nodes show before anything is typed: one video, as fields of the builder and as a whole prompt."""

FIRST_SHOT = """\
Live-action cinematic realism, cool dawn light. A medium shot frames a lighthouse keeper (S1), a man in his sixties \
with a white beard and a yellow oilskin coat, on a wet iron gallery above the sea. The camera pushes in with small \
amplitude at slow speed while he wipes the great lens with a cloth. He turns his head and says in a low, rough voice: \
<d>[English] She has never missed a night.</d>"""
SECOND_SHOT = """\
the camera cuts to a close-up of the turning lens, static, the first sunlight splitting into bands on the wall behind \
it."""
SHOTS = f"{FIRST_SHOT}\n\n00:03.200 {SECOND_SHOT}"
SOUNDSCAPE = """\
Wind moves steadily around the gallery and waves break far below. The cloth squeaks on the glass, and the gears of the \
lamp tick slowly."""
MUSIC = "A low cello holds long notes at a slow tempo, joined by a few soft piano notes that stay under the voice."
SUBJECTS = """\
<Subject 1> is the lighthouse keeper in <Picture 1>, a man in his sixties with a white beard and a yellow oilskin \
coat."""
SUMMARY = "The target video shows <Subject 1> cleaning the lens of his lighthouse at dawn and saying one sentence."
RETENTION = (
    "<Subject 1> (appears in [Shot 1]): fully_preserved - his face, his white beard and his yellow coat are kept."
)
STYLE = "The target video is in a realistic cinematic style with cool dawn light."

PROMPT = f"""\
integrated_multimodal_description: [Shot 1] {FIRST_SHOT} [Shot 2] At 00:03.200, {SECOND_SHOT}

overall_soundscape: {SOUNDSCAPE}

non_diegetic_music: {MUSIC}"""
"""What the builder makes of these fields for video from text alone."""
