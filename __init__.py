"""ComfyUI-H3: MiniMax H3 video with sound, as nodes of a ComfyUI host."""

import logging

if __package__:  # empty when pytest imports this file by its path
    from ._bootstrap import register

    register()


async def comfy_entrypoint():
    """The pack's ``ComfyExtension``; nodes are imported here, so that importing the package needs no host."""
    try:
        from comfyui_h3.nodes import H3Extension
    except Exception:
        # The host reports a failed pack in one line without a traceback; this line is the only one that has it.
        logging.getLogger(__name__).exception("ComfyUI-H3 could not load its nodes")
        raise
    return H3Extension()
