"""Command line: ``python -m comfyui_h3.h3core.tiny --out models/minimax_h3/tiny-h3``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="h3core.tiny", description="Write the tiny H3: random weights in the layout of the real checkpoint."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; FL2VA/ and Ref2VA/ appear in it")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other weights (default 0)")
    parser.add_argument(
        "--layout",
        choices=("official", "diffusers", "comfyui"),
        default="official",
        help="files as MiniMax, diffusers or ComfyUI names them; the last are single files without configs",
    )
    args = parser.parse_args()
    if args.layout == "diffusers":
        from comfyui_h3.h3core.tiny.write_diffusers import write_diffusers

        write_diffusers(args.out, args.seed)
    elif args.layout == "comfyui":
        from comfyui_h3.h3core.tiny.write_comfyui import write_comfyui

        write_comfyui(args.out, args.seed)
    else:
        from comfyui_h3.h3core.tiny.write import write_official

        write_official(args.out, args.seed)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    sys.stdout.write(f"{args.out}: {size / 1e6:.1f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
