"""Writes workflows/*.json (for the graph editor) and workflows/api/*.json (for the queue) from one description.

python _bootstrap.py scripts.make_workflows            writes both forms of every workflow
python _bootstrap.py scripts.make_workflows --check    only says whether the files are up to date
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from comfyui_h3.scripts.workflows.forms import api_form, editor_form
from comfyui_h3.scripts.workflows.graphs import WORKFLOWS

ROOT = Path(__file__).resolve().parents[1]


def project_version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml has no version")
    return found[1]


def files() -> dict[Path, str]:
    """Every file and what belongs in it."""
    wanted = {}
    for name, make in WORKFLOWS.items():
        forms = {ROOT / "workflows" / f"{name}.json": editor_form(make(), project_version())}
        forms[ROOT / "workflows" / "api" / f"{name}.json"] = api_form(make())
        wanted.update({path: json.dumps(form, indent=2, ensure_ascii=False) + "\n" for path, form in forms.items()})
    return wanted


def main() -> int:
    wanted = files()
    if sys.argv[1:] == ["--check"]:
        stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text("utf-8") != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what scripts/make_workflows.py writes")
        return 1 if stale else 0
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
