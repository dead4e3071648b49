"""A real HTTP server that speaks OpenAI's chat protocol, for judges behind an API.

Answers come from a function of the prompt, so that a test decides what the model says, how long it
takes and when it refuses. Every request is counted.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "openai-api/local/stub"
"""What Inspect calls the model behind the server."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer of the server."""

    text: str = ""
    """What the model says; log-probabilities are never returned, whatever was asked for."""
    status: int = 200
    """Status code; other than 200, ``text`` is the error's message."""
    delay: float = 0.0
    """Seconds before anything is sent."""
    tokens: tuple[int, int] = (100, 5)
    """Tokens of input and output that are billed."""


@dataclass
class Server:
    """A running server and what it was asked."""

    url: str
    prompts: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answered: int = 0
    """Requests that were answered with 200 to their end."""

    @property
    def environment(self) -> dict[str, str]:
        """What Inspect reads the address and the key of ``MODEL`` from."""
        return {"LOCAL_BASE_URL": self.url, "LOCAL_API_KEY": "none"}


@contextmanager
def serving(reply: Callable[[str, int], Reply]) -> Iterator[Server]:
    """Serve on a free port; ``reply`` gets the prompt and how often it came before."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = body["messages"][-1]["content"]
            prompt = content if isinstance(content, str) else content[0]["text"]
            with lock:
                before = server.prompts.count(prompt)
                server.prompts.append(prompt)
                server.bodies.append(body)
            made = reply(prompt, before)
            time.sleep(made.delay)
            try:
                self._send(made, body)
            except (BrokenPipeError, ConnectionResetError):
                return  # the client was killed, or had waited long enough
            with lock:
                server.answered += made.status == 200

        def _send(self, made: Reply, body: dict[str, Any]) -> None:
            if made.status == 200:
                read, written = made.tokens
                row: dict[str, Any] = {
                    "id": "chatcmpl-0",
                    "object": "chat.completion",
                    "created": 0,
                    "model": body["model"],
                    "choices": [
                        {
                            "index": 0,
                            "finish_reason": "stop",
                            "message": {"role": "assistant", "content": made.text},
                        }
                    ],
                    "usage": {
                        "prompt_tokens": read,
                        "completion_tokens": written,
                        "total_tokens": read + written,
                    },
                }
            else:
                row = {"error": {"message": made.text, "type": "error", "code": None}}
            data = json.dumps(row).encode()
            self.send_response(made.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on the terminal."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(url=f"http://127.0.0.1:{httpd.server_address[1]}/v1")
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
