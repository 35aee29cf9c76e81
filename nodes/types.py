"""Sockets between our own nodes. Their values are the objects of h3core, passed by reference."""

from comfy_api.latest import io

H3Engine = io.Custom("H3_ENGINE")  # h3core.engine.Engine
H3Loras = io.Custom("H3_LORAS")  # tuple of h3core.config.LoraChoice
H3Components = io.Custom("H3_COMPONENTS")  # tuple of h3core.config.ComponentSource
H3Conditioning = io.Custom("H3_CONDITIONING")  # h3core.types.Conditioning
H3Latents = io.Custom("H3_LATENTS")  # h3core.types.Latents
H3Keyframes = io.Custom("H3_KEYFRAMES")  # tuple of h3core.media.references.Keyframe
H3References = io.Custom("H3_REFERENCES")  # tuple of h3core.media.references.Reference
H3Media = io.Custom("H3_MEDIA")  # h3core.types.EncodedMedia: either of the two, encoded
