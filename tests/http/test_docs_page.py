"""``/docs`` needs no other host: the gateway serves every file that the page loads."""

from __future__ import annotations

import re

from gateway.testing import fake_services
from tests.http.conftest import Connect

NO_KEY = {"authorization": ""}


async def test_the_page_and_everything_it_loads_come_from_the_gateway(connect: Connect) -> None:
    async with connect(fake_services()) as client:
        page = await client.get("/docs", headers=NO_KEY)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert not re.search(r"https?://", page.text)
        assets = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert {one.rsplit(".", 1)[-1] for one in assets} == {"js", "css", "png"}
        for asset in assets:
            loaded = await client.get(asset, headers=NO_KEY)
            assert loaded.status_code == 200 and loaded.content, asset
        assert "url: '/openapi.json'" in page.text or '"/openapi.json"' in page.text


async def test_the_page_has_what_swagger_ui_needs(connect: Connect) -> None:
    async with connect(fake_services()) as client:
        script = await client.get("/docs/assets/swagger-ui-bundle.js", headers=NO_KEY)
        assert "SwaggerUIBundle" in script.text and "javascript" in script.headers["content-type"]
        assert (await client.get("/docs/assets/../../app.py", headers=NO_KEY)).status_code == 404
        assert (await client.get("/docs/assets/nothing.js", headers=NO_KEY)).status_code == 404
