"""Results of ``slide predict`` over loopback, tiles read from the slides as they are looked at."""

from __future__ import annotations

import contextlib
import html
import json
import re
import threading
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from planaria.errors import DataError, PlanariaError
from planaria.pathology.heat import DISCLAIMER, load_heat
from planaria.pathology.slides import SlidePool
from planaria.pathology.viewer import jpeg, plan_pyramid, pyramid_tile, render_page


@dataclass(frozen=True, kw_only=True)
class Result:
    """One slide's folder of results."""

    name: str
    folder: Path
    slide: Path
    """Where the slide was when it was scored."""
    mpp: float | None
    """The user's resolution, where one was given."""
    call: str
    notes: tuple[str, ...]


def find_results(folder: Path) -> dict[str, Result]:
    """The results below ``folder`` by name; DataError where there is none."""
    found: dict[str, Result] = {}
    for path in sorted(folder.glob("*/prediction.json")):
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found[path.parent.name] = Result(
            name=path.parent.name,
            folder=path.parent,
            slide=Path(facts["slide"]),
            mpp=facts.get("mpp_override"),
            call=facts["call"],
            notes=tuple(facts["notes"]),
        )
    if not found:
        raise DataError(f"{folder}: no predictions; make some with 'planaria slide predict'")
    return found


class Viewer:
    """A server on 127.0.0.1 for one folder of results; ``close`` ends it."""

    def __init__(self, folder: Path, *, port: int = 0, slides: int = 8) -> None:
        self.results = find_results(folder)
        overrides = {r.slide.stem: r.mpp for r in self.results.values() if r.mpp is not None}
        self._pool = SlidePool(capacity=slides, mpp=overrides)
        # OpenSlide handles are shared by the server's threads one at a time.
        self._lock = threading.Lock()
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, viewer=self))
        except (OSError, OverflowError) as error:
            raise DataError(f"port {port} cannot be used ({error}); choose another") from error
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where the list of slides is."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def start(self) -> None:
        """Serves from a thread."""
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def serve(self) -> None:
        """Serves until interrupted."""
        try:
            self._server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Ends the server and closes the slides."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()
        with self._lock:
            self._pool.close()

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, type and body for a request's path."""
        if path == "/":
            return HTTPStatus.OK, "text/html; charset=utf-8", self._index().encode()
        match = re.fullmatch(r"/([^/]+)/(?:tiles/(\d+)/(\d+)_(\d+)\.jpg)?", path)
        result = self.results.get(unquote(match[1])) if match else None
        if match is None or result is None:
            return HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"no such slide\n"
        try:
            with self._lock:
                slide = self._pool.get(result.slide)
                if match[2] is None:
                    text = render_page(
                        slide,
                        heat=load_heat(result.folder / "heat.npz"),
                        call=result.call,
                        notes=result.notes,
                        inline_px=None,
                    )
                    return HTTPStatus.OK, "text/html; charset=utf-8", text.encode()
                pixels = pyramid_tile(
                    slide,
                    pyramid=plan_pyramid(slide),
                    level=int(match[2]),
                    column=int(match[3]),
                    row=int(match[4]),
                )
            return HTTPStatus.OK, "image/jpeg", jpeg(pixels)
        except PlanariaError as error:
            return HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", f"{error}\n".encode()

    def _index(self) -> str:
        rows = "".join(
            f'<li><a href="{quote(r.name, safe="")}/">{html.escape(r.name)}</a> '
            f"{html.escape(r.call)}</li>"
            for r in self.results.values()
        )
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            '<link rel="icon" href="data:,"><title>Slides</title>'
            "<style>body{font:16px/1.6 system-ui,sans-serif;margin:2rem;max-width:50rem}</style>"
            f"<h1>Slides</h1><ul>{rows}</ul><p>{DISCLAIMER}</p></html>"
        )


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, *args: Any, viewer: Viewer) -> None:
        self._viewer = viewer
        super().__init__(*args)

    def do_GET(self) -> None:
        """Answers a request; pages of other sites cannot read it, since no CORS header is sent."""
        host = self.headers.get("Host", "")
        if host.split(":")[0] not in ("127.0.0.1", "localhost"):
            # A name that an attacker points at loopback would make the page's origin his.
            self.send_error(HTTPStatus.FORBIDDEN, "only for this machine")
            return
        status, kind, body = self._viewer.answer(self.path.split("?")[0])
        # A browser that pans away drops the connections of tiles that it no longer wants.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: the command line prints the address once."""
