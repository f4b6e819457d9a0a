"""``/docs``: Swagger UI; the gateway serves its scripts itself, not a CDN."""

from typing import Final

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

ASSETS: Final = "/docs/assets"


async def _docs(request: Request) -> HTMLResponse:
    root = request.scope.get("root_path", "").rstrip("/")
    return get_swagger_ui_html(
        openapi_url=f"{root}{request.app.openapi_url}",
        title=f"{request.app.title}: API",
        swagger_js_url=f"{root}{ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{root}{ASSETS}/swagger-ui.css",
        swagger_favicon_url=f"{root}{ASSETS}/favicon-32x32.png",
    )


ROUTES: Final = (
    Route("/docs", _docs),
    # Swagger UI's files come from the package fastapi-swagger.
    Mount(ASSETS, StaticFiles(packages=[("fastapi_swagger", "resources")])),
)
