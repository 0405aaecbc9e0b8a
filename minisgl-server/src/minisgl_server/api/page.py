"""``/``: a page to talk with the model and to see the load."""

from __future__ import annotations

from importlib.resources import files

from starlette.responses import HTMLResponse

_POLICY = (
    "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageRoute:
    """The route; the page is one file without anything from elsewhere."""

    def __init__(self) -> None:
        """Read the page."""
        self._text = files("minisgl_server.page").joinpath("index.html").read_text("utf-8")

    async def page(self) -> HTMLResponse:
        """Return the page."""
        return HTMLResponse(self._text, headers={"Content-Security-Policy": _POLICY})
