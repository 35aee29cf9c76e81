"""A headless ComfyUI as a child process, driven over HTTP and websocket: for the demo, ``make serve`` and the tests.

``with ComfyHost(...) as host``: the server runs inside the block; ``host.submit(prompt)`` gives a ``Job`` with its
``events(timeout_s)``, ``history()`` and ``outputs()``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import html
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import websocket

MODEL_FOLDER = "minimax_h3"  # below models/
ENDS = ("execution_success", "execution_error", "execution_interrupted")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
START_ATTEMPTS = 3  # another program may take the free port that was found


class HostError(Exception):
    """The host did not do what was asked; the message ends with what its log says, or where it is."""


class PromptRefused(HostError):
    """The host refused a prompt before running it (HTTP 400). ``answer`` is its JSON."""

    def __init__(self, answer: dict[str, Any]):
        self.answer = answer
        super().__init__(self._first_line(answer))

    @staticmethod
    def _first_line(answer: dict[str, Any]) -> str:
        for node in (answer.get("node_errors") or {}).values():
            for error in node["errors"]:
                return f"{node['class_type']}: {error.get('details') or ''} ({error['message']})".splitlines()[0]
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)


PROGRESS_TEXT = 3  # of binary frames: a line on a node; the others are previews


def progress_text(frame: bytes) -> str | None:
    """The text of a binary frame: its kind, the length of a node's id, the id, then the text; None for other kinds."""
    if len(frame) < 8 or int.from_bytes(frame[:4], "big") != PROGRESS_TEXT:
        return None
    start = 8 + int.from_bytes(frame[4:8], "big")
    return html.unescape(frame[start:].decode("utf-8", "replace"))


@dataclass(frozen=True)
class Event:
    """One message of the websocket: ``type`` as in the protocol, or "text" of a node; ``data`` its payload."""

    type: str
    data: dict[str, Any]


class Job:
    """One submitted prompt and the websocket that reports on it."""

    def __init__(self, host: ComfyHost, prompt_id: str, socket_: websocket.WebSocket):
        self.host = host
        self.prompt_id = prompt_id
        self._socket = socket_

    def events(self, timeout_s: float) -> Iterator[Event]:
        """Messages of this job up to and with its end (one of ``ENDS``). HostError on a time-out or a dead host."""
        deadline = time.monotonic() + timeout_s
        self._socket.settimeout(1.0)
        with contextlib.closing(self._socket):
            while True:
                if time.monotonic() > deadline:
                    raise HostError(f"no end of the job within {timeout_s:.0f} s; log: {self.host.log_path}")
                try:
                    message = self._socket.recv()
                except websocket.WebSocketTimeoutException:
                    self.host.check_alive()
                    continue
                except (OSError, websocket.WebSocketException) as error:
                    self.host.check_alive(grace_s=5)
                    raise HostError(f"the host closed the connection; log: {self.host.log_path}") from error
                if isinstance(message, bytes):
                    text = progress_text(message)
                    if text is not None:
                        yield Event("text", {"text": text, "prompt_id": self.prompt_id})
                    continue
                if not message:
                    continue
                content = json.loads(message)
                event = Event(content["type"], content.get("data") or {})
                if event.data.get("prompt_id") == self.prompt_id:
                    yield event
                    if event.type in ENDS:
                        return

    def wait(self, timeout_s: float) -> list[Event]:
        """All messages of this job; the last one is its end."""
        return list(self.events(timeout_s))

    def history(self, timeout_s: float = 10) -> dict[str, Any]:
        """The host's record of the ended job: ``outputs``, ``status``, ``prompt``."""
        deadline = time.monotonic() + timeout_s
        while True:  # it appears a moment after the last message
            found = self.host.get(f"/history/{self.prompt_id}")
            if self.prompt_id in found:
                return found[self.prompt_id]
            if time.monotonic() > deadline:
                raise HostError(f"the host has no history of job {self.prompt_id}; log: {self.host.log_path}")
            time.sleep(0.05)

    def outputs(self) -> dict[str, Any]:
        """UI output by node id."""
        return self.history()["outputs"]


def _die_with_parent() -> None:
    """In the child, before it becomes the server: SIGTERM when our process ends, also by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class ComfyHost:
    """One server with a private base folder (models, input, output, user), stopped when the ``with`` block ends.

    host_dir: a ComfyUI folder; nothing is written in it. packs and models: name -> folder, linked into custom_nodes/
    and models/minimax_h3/. inputs: files copied into input/, unless one of that name is there. page: serve the graph
    editor (needs comfyui-frontend-package). port: 0 takes a free one.
    """

    def __init__(
        self,
        host_dir: Path,
        base_dir: Path,
        *,
        packs: Mapping[str, Path],
        models: Mapping[str, Path] | None = None,
        inputs: Sequence[Path] = (),
        page: bool = False,
        address: str = "127.0.0.1",
        port: int = 0,
        cpu: bool = True,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ):
        self.host_dir = Path(host_dir).resolve()
        self.base_dir = Path(base_dir).resolve()
        self.log_path = self.base_dir / "comfyui.log"
        self.address = address
        self.port = port
        self.process: subprocess.Popen[bytes] | None = None
        self._packs = dict(packs)
        self._models = dict(models or {})
        self._inputs = list(inputs)
        self._page = page
        self._find_port = port == 0
        self._cpu = cpu
        self._extra_args = list(extra_args)
        self._env = dict(env or {})
        self._python = python
        # An environment may name a proxy; this server is never behind one.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    # --- process

    @property
    def url(self) -> str:
        reach = "127.0.0.1" if self.address in ("0.0.0.0", "") else self.address
        return f"http://{reach}:{self.port}"

    def __enter__(self) -> ComfyHost:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 180) -> None:
        """Start the server and wait until it answers."""
        if not (self.host_dir / "main.py").is_file():
            raise HostError(f"{self.host_dir} has no main.py: it is not a ComfyUI folder")
        self._lay_out()
        atexit.register(self.stop)
        for attempt in range(1, START_ATTEMPTS + 1):
            if self._find_port:
                self.port = free_port()
            self._spawn()
            try:
                self._wait_until_ready(timeout_s)
                return
            except HostError as error:
                if not self._find_port or attempt == START_ATTEMPTS or "address already in use" not in str(error):
                    raise

    def _lay_out(self) -> None:
        for folder, links in (("custom_nodes", self._packs), (f"models/{MODEL_FOLDER}", self._models)):
            parent = self.base_dir / folder
            parent.mkdir(parents=True, exist_ok=True)
            for name, target in links.items():
                link = parent / name
                if link.is_symlink():
                    link.unlink()
                link.symlink_to(Path(target).resolve(), target_is_directory=True)
        for name in ("input", "output", "temp", "user", "web"):
            (self.base_dir / name).mkdir(exist_ok=True)
        for source in self._inputs:  # copied: a page that saves over an input must not reach ours
            target = self.base_dir / "input" / source.name
            if not target.exists():
                shutil.copyfile(source, target)
        (self.base_dir / "web" / "index.html").touch()  # the host insists on a page

    def _command(self) -> list[str]:
        command = [self._python, str(self.host_dir / "main.py"), "--listen", self.address, "--port", str(self.port)]
        command += ["--base-directory", str(self.base_dir), "--database-url", "sqlite:///:memory:", "--log-stdout"]
        command += ["--disable-auto-launch", "--disable-api-nodes"]
        command += ["--disable-all-custom-nodes"]
        if self._packs:
            command += ["--whitelist-custom-nodes", *self._packs]
        if not self._page:
            command += ["--front-end-root", str(self.base_dir / "web")]
        return command + (["--cpu"] if self._cpu else []) + self._extra_args

    def _spawn(self) -> None:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self._env}
        if self._cpu:
            env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve each other where cores are shared
        # A shell starts background commands with SIGINT ignored; a child that inherits this cannot be stopped cleanly.
        main_thread = threading.current_thread() is threading.main_thread()
        ignored = main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            with self.log_path.open("wb") as log:
                self.process = subprocess.Popen(
                    self._command(),
                    cwd=self.base_dir,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C in a terminal reaches us; we stop the server
                    preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                )
        finally:
            if ignored:
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self.check_alive()
            try:
                self.get("/system_stats", timeout_s=5)
                return
            except (HostError, OSError, http.client.HTTPException):
                if time.monotonic() > deadline:
                    raise HostError(self._with_log(f"ComfyUI did not answer within {timeout_s:.0f} s")) from None
            time.sleep(0.2)

    def check_alive(self, grace_s: float = 0) -> None:
        """Raise HostError, with the end of the log, when the process is gone or goes within ``grace_s``."""
        if self.process is None:
            raise HostError("ComfyUI is not running")
        try:
            code = self.process.wait(grace_s) if grace_s else self.process.poll()
        except subprocess.TimeoutExpired:
            return
        if code is not None:
            raise HostError(self._with_log(f"ComfyUI ended with exit code {code}"))

    def stop(self, timeout_s: float = 15) -> int | None:
        """Stop the server: SIGINT, and SIGKILL after ``timeout_s``. The exit code; None when none was started."""
        atexit.unregister(self.stop)
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout_s)
            except BaseException as error:  # a second Ctrl-C, too, ends the wait and not the duty
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
        return self.process.returncode

    def log(self) -> str:
        """All that the server has written so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, num_lines: int = 30) -> str:
        return "\n".join(self.log().splitlines()[-num_lines:])

    def _with_log(self, message: str) -> str:
        return f"{message}; log: {self.log_path}\n{self.log_tail()}"

    # --- requests

    def _request(self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float) -> bytes:
        request = urllib.request.Request(self.url + path, data=body, headers=headers, method=method)
        with self._opener.open(request, timeout=timeout_s) as response:
            return response.read()

    def get(self, path: str, timeout_s: float = 60) -> Any:
        """JSON of a GET. HostError names the path and the status."""
        try:
            return json.loads(self._request("GET", path, None, {}, timeout_s))
        except urllib.error.HTTPError as error:
            raise HostError(f"GET {path}: HTTP {error.code}; log: {self.log_path}") from error

    def post(self, path: str, value: object, timeout_s: float = 60) -> Any:
        """JSON answer, or None for an empty one. PromptRefused for HTTP 400."""
        headers = {"Content-Type": "application/json"}
        try:
            answer = self._request("POST", path, json.dumps(value).encode(), headers, timeout_s)
        except urllib.error.HTTPError as error:
            text = error.read()
            if error.code == 400 and text.startswith(b"{"):
                raise PromptRefused(json.loads(text)) from None
            raise HostError(f"POST {path}: HTTP {error.code}; log: {self.log_path}") from error
        return json.loads(answer) if answer.strip() else None

    def object_info(self, node: str | None = None) -> dict[str, Any]:
        """Schema of all nodes, or of one of them."""
        return self.get(f"/object_info/{node}")[node] if node else self.get("/object_info")

    def submit(self, prompt: Mapping[str, Any], workflow: Mapping[str, Any] | None = None) -> Job:
        """Queue an API-format prompt. ``workflow``: its UI form, which saving nodes embed. PromptRefused if invalid."""
        client_id = uuid.uuid4().hex
        address = f"{self.url.replace('http', 'ws', 1)}/ws?clientId={client_id}"
        connection = websocket.create_connection(address, timeout=30, http_no_proxy=["*"])
        body: dict[str, Any] = {"prompt": prompt, "client_id": client_id}
        if workflow is not None:
            body["extra_data"] = {"extra_pnginfo": {"workflow": workflow}}
        try:
            return Job(self, self.post("/prompt", body)["prompt_id"], connection)
        except BaseException:
            connection.close()
            raise

    def interrupt(self, prompt_id: str | None = None) -> None:
        """Cancel the running job; with ``prompt_id`` only if it is that one."""
        self.post("/interrupt", {"prompt_id": prompt_id} if prompt_id else {})

    def free(self) -> None:
        """Unload models and forget cached outputs; the host does it between prompts."""
        self.post("/free", {"unload_models": True, "free_memory": True})

    def upload(self, path: Path) -> str:
        """Put a file into the host's input folder; its name there."""
        boundary = uuid.uuid4().hex
        name = path.name.replace('"', "_")
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n'
        head += "Content-Type: application/octet-stream\r\n\r\n"
        body = head.encode() + path.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return json.loads(self._request("POST", "/upload/image", body, headers, 60))["name"]

    def view(self, file: Mapping[str, str]) -> bytes:
        """Content of an output file, given as nodes report it: filename, subfolder, type."""
        query = {key: file[key] for key in ("filename", "subfolder", "type") if key in file}
        return self._request("GET", f"/view?{urllib.parse.urlencode(query)}", None, {}, 60)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_is_free(address: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
