"""Prompts and notes of the example workflows. The prompts have the form that H3 was trained on."""

T2VA_PROMPT = """integrated_multimodal_description: [Shot 1] Live-action cinematic realism, warm early light, shallow \
depth of field. A medium shot of a potter (S1), a woman in her fifties with grey hair tied back and clay \
on her forearms, at a wheel beside a tall window. The camera pushes in with small amplitude at slow \
speed while she draws the wet clay up into a tall vase; water beads run down its side and drops fly off \
the rim. She looks up, smiles, and says in a low, unhurried voice: <d>[English] Every pot remembers the \
hand that made it.</d> [Shot 2] At 00:03.200, the camera cuts to a close-up of her thumbs pressing the \
rim into a gentle wave, static, the window light rolling over the turning surface.

overall_soundscape: A steady low hum of the wheel and the wet slide of hands on clay, very close. Rain ticks on the \
window glass, and a wooden floor creaks once as she shifts her weight.

non_diegetic_music: A solo nylon-string guitar at a slow tempo, sparse single notes that stay quiet under the voice."""

FLIGHT = """the silhouettes of the hills slide past in parallax while the balloon rocks a little on the wind. A pilot \
(S1), unseen in the basket, calls down in a bright, clear female voice: <d>[English] You can see the whole valley \
from up here!</d>"""

FIRST_FRAME_PROMPT = f"""For the target video, at 0.00 seconds into the target video, <Picture 1> (from [Shot 1]) is \
fully referenced.

integrated_multimodal_description: [Shot 1] Flat cut-paper animation with clean edges and soft gradients. A wide shot \
of green rolling hills at dawn under a pale blue sky with a round white sun; a hot-air balloon with red and yellow \
stripes stands low over the middle ridge on the left. The burner glows, the balloon lifts off the ridge and rises \
straight up, and {FLIGHT} The camera pedestals up with small amplitude at slow speed and keeps the balloon in the left \
third of the picture until it is high above the farthest ridge.

overall_soundscape: The burner roars twice for about a second, close and full. A light wind moves over the grass, \
small birds call far below, and the basket creaks as it sways.

non_diegetic_music: A solo clarinet over plucked strings at a moderate tempo, quiet at first and rising a little as \
the balloon climbs."""

FL2VA_PROMPT = f"""How the reference pictures align with the target video — Picture 1 (from Shot 1) aligns with the \
0.00-second mark of the target video; Picture 2 (from Shot 1) aligns with the 5.17-second mark of the target video.

integrated_multimodal_description: [Shot 1] Flat cut-paper animation with clean edges and soft gradients. A wide shot \
of green rolling hills at dawn under a pale blue sky with a round white sun; a hot-air balloon with red and yellow \
stripes stands low over the middle ridge on the left. The burner glows, the balloon lifts off and drifts up and to the \
right in one long arc, and {FLIGHT} Meanwhile a whole day passes: the sun sinks behind the far ridge and turns orange, \
the sky darkens to violet above a burning horizon, and the hills fall into purple shadow. The camera trucks right with \
small amplitude at slow speed and comes to rest as the balloon hangs high on the right, dark red against the dusk.

overall_soundscape: The burner roars once for about a second, then a steady wind takes over and the basket creaks as \
it sways. Birdsong from the valley thins out and gives way to crickets.

non_diegetic_music: A solo clarinet over plucked strings at a moderate tempo, thinning out to held low strings towards \
the end."""

REF2VA_PROMPT = """subject_definitions:
<Subject 1> is the toy robot in <Picture 1>, made of blue tin, with a boxy head and body, round cream-coloured eyes, a \
red ball on its antenna, red hands and red feet, and a cream panel with a dial and three lamps on its chest.
<Video 1> is a clip of rolling green hills under a pale sky, past which the camera moves to the right.
<Audio 2> is a low, sustained voice that sings slow open vowels.

summary:
[reference generation + audio reference] <Subject 1> walks over the hills of <Video 1> at dawn, sings with the voice \
of <Audio 2> and greets the sun.

retention_analysis:
<Subject 1> (appears in [Shot 1], [Shot 2]): fully_preserved - the blue tin, the boxy shapes, the red antenna ball, \
hands and feet, and the panel with its dial and three lamps are kept as they are.
<Video 1> (hills and camera movement in [Shot 1]): attribute_transfer - the layered green hills and the steady move of \
the camera to the right are taken over, with the robot added.
<Audio 2>: reference - the low, sustained timbre of the voice is kept for what the robot sings and says.

detailed_description:
The target video is a flat cut-paper animation with clean edges, soft gradients and an even dawn light. Every layer of \
the landscape moves as one piece of paper, and the robot casts a soft, short shadow.
[Shot 1] A wide shot of layered green hills under a pale blue sky that warms to cream at the horizon, with a round \
white sun on the right. <Subject 1> (S1) walks along the nearest ridge from the left, a third of the picture high, \
stiff in the knees and rocking from one red foot to the other; at each step its antenna ball swings back and forth and \
the needle on its chest panel jumps a little. The camera trucks right with small amplitude at slow speed beside it, so \
that the near ridge passes fast, the middle ridge slower and the far ridge hardly at all. The three lamps light up one \
after the other, red, yellow, green, in time with three bell strokes. It lifts both red hands to its sides like a \
singer and holds one long open vowel, its round eyes half closed, while a few paper leaves drift through the picture \
from right to left. The robot slows down, its steps become shorter, and it comes to a halt on the highest point of \
the ridge with the sun in front of it. [Shot 2] At 00:03.000, the camera cuts to a medium close-up of <Subject 1> \
(S1) from the front, the hills soft behind it and the warm light on the left side of its head. It blinks twice; its \
pupils turn up towards the sun, and the small highlight in them grows. The camera pushes in with small amplitude at \
slow speed. It tilts its head a little to the right, which makes the antenna quiver, and says slowly in the same low, \
sustained voice: <d>[English] Good morning, sun.</d> The needle on its panel swings all the way over and stays there, \
the green lamp keeps glowing, and it raises one red hand and waves it twice in front of the hills.

overall_soundscape: A light wind moves over the hills, and tin feet tap on dry ground in an even step that stops \
before the cut. Three soft bells ring, one with each lamp, and small springs squeak as head and hand move.

non_diegetic_music: N/A"""

START = """1. Put the folder of the MiniMax H3 release (it holds {folders}) into `models/minimax_h3/`, refresh the \
page with `R` and choose it in **Load H3**."""

QUEUE = """Queue. The MP4 appears in `output/video/` and on the last node. It carries this graph: drop it on the page \
to get it back."""

MEDIA = """Copy the files of `workflows/media/` of this pack into the `input/` folder of ComfyUI, or choose your own \
in the **Load** nodes."""

T2VA_NOTE = f"""## Text to video with sound

{START.format(folders="`FL2VA/`")}
2. Write the prompt. H3 was trained on three sections: `integrated_multimodal_description`, `overall_soundscape`, \
`non_diegetic_music`. Spoken words go between `<d>[English]` and `</d>`.
3. {QUEUE}

**Size**: multiples of 32, up to the area of 1344 x 768. **Length**: frames at 24 per second, in steps of 17: 124 \
(5.2 s), 243 (10.1 s), 362 (15.1 s). **Sigma points**: 50 is the release's setting, one more than forwards."""

FIRST_FRAME_NOTE = f"""## First frame to video with sound

{START.format(folders="`FL2VA/`")}
2. {MEDIA}
3. The first line of the prompt names the picture as the first frame; keep it, and describe what happens from there.
4. {QUEUE}

**H3 Canvas** takes the ratio of the picture and feeds both encode nodes: they need the same size and length. Choose a \
ratio there to have another one; the picture is then stretched, or cropped with `fit` = `cover`."""

FL2VA_NOTE = f"""## First and last frame to video with sound

{START.format(folders="`FL2VA/`")}
2. {MEDIA}
3. The first line of the prompt says where the two pictures stand: at 0.00 seconds and at the end of the video. With \
another duration, write the seconds that **H3 Canvas** shows. `Shot 1` there is the last shot.
4. {QUEUE}

More keyframes: chain **H3 Keyframe** nodes into `keyframes`."""

REF2VA_NOTE = f"""## References to video with sound

{START.format(folders="`Ref2VA/`")}
2. {MEDIA}
3. The prompt has six sections and calls the media by number, in the order of their chain: `<Picture 1>` the robot, \
`<Video 1>` the hills, `<Audio 1>` the sound of that clip, `<Audio 2>` the voice. **H3 Encode Ref Media** shows the \
numbers. Bypass (Ctrl+B) a reference node to leave its medium out, and take its label out of the prompt.
4. {QUEUE}

**Cost**: a picture of `size` = `diffusers`, the release's setting, adds 4,096 rows and more; `match` adds fewest."""
