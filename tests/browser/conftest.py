"""A ComfyUI with its page, this pack and the tiny H3, and a headless Chromium to open it in."""

import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

import pytest

from comfyui_h3.scripts.checkpoints import TINY_NAME, tiny_checkpoint
from comfyui_h3.scripts.comfy_host import ComfyHost
from comfyui_h3.scripts.demo import example_media
from comfyui_h3.tests.browser.editor import CHROMIUM_ARGS, Editor, find_chromium
from comfyui_h3.tests.host import conftest as headless

ROOT = headless.ROOT
host_dir = headless.host_dir  # the fixture: the same hosts as the tests without a page


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.host)


@pytest.fixture(scope="session")
def chromium():
    """Path of a Chromium; skips where something that the browser tests need is not installed."""
    for module, file in (("playwright", "test.txt"), ("comfyui_frontend_package", "page.txt")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"this Python has no {module}: pip install -r requirements/{file}, as make test does")
    found = find_chromium()
    if found is None:
        pytest.skip("no Chromium: install one (Debian: apt install chromium) or name it in H3_CHROMIUM")
    return found


# Per module, here and below: Playwright keeps an event loop in this thread, which other tests may want for themselves.
@pytest.fixture(scope="module")
def browser(chromium):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def page_host_dir(chromium, host_dir):
    """A ComfyUI whose own version of the page is installed: with another one, a user would see other errors."""
    wanted = re.search(r"^comfyui-frontend-package==(\S+)", (host_dir / "requirements.txt").read_text(), re.MULTILINE)
    found = importlib.metadata.version("comfyui-frontend-package")
    if wanted and wanted[1] != found:
        pytest.skip(f"{host_dir} needs comfyui-frontend-package=={wanted[1]}, this Python has {found}")
    return host_dir


@pytest.fixture(scope="module")
def host(page_host_dir, tmp_path_factory):
    """The server, with the media of the workflows in its input folder."""
    base = tmp_path_factory.mktemp("page") / "base"
    packs, models, inputs = {"ComfyUI-H3": ROOT}, {TINY_NAME: tiny_checkpoint()}, example_media()
    env = {"TRITON_INTERPRET": "0"}
    with ComfyHost(page_host_dir, base, packs=packs, models=models, inputs=inputs, page=True, env=env) as host:
        host.post("/settings/Comfy.TutorialCompleted", True)  # else a dialog of templates covers the graph
        assert "H3SaveMP4" in host.object_info(), host.log_tail()
        yield host


@pytest.fixture(scope="module")
def visit(browser, host):
    """``with visit() as editor``: the page, freshly opened."""
    return lambda: Editor(browser, host, needed_node="H3SaveMP4")


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory):
    """Folder for pictures of the page: H3_SCREENSHOTS, else a temporary one."""
    folder = Path(os.environ.get("H3_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
