"""Draws the pictures of the console's views for the documentation: python -m tests.clients.console_pictures docs"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from tests.clients.test_console import browsing, serving, show, until
from tests.integration.live import LiveGateway
from tests.integration.test_batches import begun, client_of, ended

TENANTS = ("shop", "search", "support")
QUESTIONS = ("Who wrote Berserk?", "Something like Vinland Saga, please.", "How much is shipping to Spain?")
VIEWS = ("adapters", "batches", "keys", "prompts", "requests", "routing", "usage")


def fill(live: LiveGateway, client: httpx.Client) -> None:
    """Send the requests of three tenants, run a batch and change the routing."""
    for number, tenant in enumerate(TENANTS):
        made = {"tenant": tenant, "comment": f"{tenant}'s backend"}
        limits = {"limits": {"requests_per_minute": 90}} if tenant == "shop" else {}
        key = client.post("/admin/keys", json={**made, **limits}).raise_for_status().json()["key"]
        for question in itertools.islice(itertools.cycle(QUESTIONS), 24 - 7 * number):
            asked = {"model": "demo", "max_tokens": 24, "messages": [{"role": "user", "content": question}]}
            headers = {"authorization": f"Bearer {key}"}
            client.post("/v1/chat/completions", json=asked, headers=headers).raise_for_status()
    openai = client_of(live)
    messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
    ended(openai, begun(openai, 24, "/v1/chat/completions", messages=messages, max_tokens=8))
    config = client.get("/admin/routing").json()["config"]
    config["routes"]["self_hosted_generation"]["slo"] = {"ttft_ms": 250, "total_ms": 2_000}
    client.put("/admin/routing", json={"config": config, "comment": "slower is fine"}).raise_for_status()


def main(to: Annotated[Path, typer.Argument(help="The folder of the pictures.")]) -> None:
    """Draw each view of a gateway that has had some requests."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (live, client):
        fill(live, client)
        with browsing(live) as page:
            page.set_viewport_size({"width": 1_000, "height": 640})

            def draw(name: str) -> None:
                page.screenshot(path=to / f"console-{name}.png")

            for view in VIEWS:
                show(page, live, view)
                draw(view)
            show(page, live, "requests")
            page.click("tbody a")
            page.wait_for_selector("svg")
            draw("request")
            until(page, lambda: client.get("/admin/shadow").json()["pairs"] > 30)
            show(page, live, "shadow")
            draw("shadow")
            show(page, live, "playground")
            page.fill("textarea[name=message]", QUESTIONS[0])
            page.select_option("main select >> nth=1", index=1)
            page.click("text=Send")
            until(page, lambda: page.inner_text("main").count("tokens in") == 2)
            draw("playground")
            show(page, live, "now")
            page.wait_for_selector(".cards")
            draw("now")


if __name__ == "__main__":
    typer.run(main)
