"""The console in a real browser: every view, actions by clicks, and hostile texts that stay texts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.contracts.evaluation_report import sign
from tests.clients.shop_worker import serving_shop
from tests.integration.live import ADMIN_KEY, ROOT, LiveGateway, gateway

playwright = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[clients]'")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")

VIEWS = (
    "now",
    "requests",
    "routing",
    "adapters",
    "prompts",
    "keys",
    "usage",
    "shadow",
    "batches",
    "playground",
)
ASKED = {"model": "demo", "messages": [{"role": "user", "content": "Who wrote Berserk?"}], "max_tokens": 8}
TAGS = (
    "script",
    "img src=x",
    "svg",
    "iframe",
    "body",
    "details open",
    "video src=x",
    "a href=javascript:window.ran=1",
)
EVENTS = ("onload", "onerror", "onmouseover", "ontoggle", "onfocus")
PAYLOADS = [f"<{tag} {event}=window.ran=1>" for tag in TAGS for event in EVENTS]


# Checks that axe lacks: contrast below WCAG's 4.5, of SVG text too, and content wider than the screen.
FAULTS = """() => {
  const faults = [];
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
      .map((one) => one <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (!/, 0\\)$/.test(color)) return color;
    }
    return "rgb(255, 255, 255)";
  };
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !one.getClientRects().length || one.disabled) continue;
    const style = getComputedStyle(one);
    const [a, b] = [light(one.closest("svg") ? style.fill : style.color), light(behind(one))];
    const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (contrast < 4.5) faults.push(`contrast ${contrast.toFixed(2)}: ${one.outerHTML.slice(0, 80)}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) faults.push(`${document.documentElement.scrollWidth} px wide`);
  return [...new Set(faults)];
}"""
AXE = "() => axe.run().then(({ violations }) => violations.map((one) => [one.id, one.impact, one.nodes[0].html]))"


@contextmanager
def serving(folder: Path) -> Iterator[tuple[LiveGateway, httpx.Client]]:
    """Run a gateway of the embedded engine with its adapters; each request is mirrored to a worker."""
    shadow = {"backend": "shop", "sample": 1.0}
    route = {"backends": [{"name": "local", "weight": 100}], "fallback": [], "shadow": shadow}
    (folder / "routing.yaml").write_text(yaml.safe_dump({"routes": {"self_hosted_generation": route}}))
    with serving_shop() as shop:
        settings = {
            "backends": {
                "local": {"kind": "engine"},
                "shop": {"kind": "openai", "base_urls": [f"{shop}/v1"]},
            },
            "routing": {"file": str(folder / "routing.yaml")},
            "adapters": {"file": "adapters.yaml"},
        }
        (folder / "sluice.yaml").write_text(yaml.safe_dump(settings))
        with (
            gateway(folder, config=folder / "sluice.yaml") as live,
            httpx.Client(base_url=live.url, headers=live.headers, timeout=60) as client,
        ):
            yield live, client


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    """A gateway with two routing revisions, and with keys and requests that have hostile names."""
    with serving(tmp_path_factory.mktemp("console")) as (running, client):
        client.post("/v1/chat/completions", json=ASKED).raise_for_status()
        config = client.get("/admin/routing").json()["config"]
        config["routes"]["second"] = config["routes"]["self_hosted_generation"]
        client.put("/admin/routing", json={"config": config, "comment": PAYLOADS[0]}).raise_for_status()
        for number, payload in enumerate(PAYLOADS):
            named = {"x-request-id": payload}
            client.post("/v1/chat/completions", json={**ASKED, "model": payload}, headers=named)
            made = {"tenant": f"t{number}", "comment": payload}
            client.post("/admin/keys", json=made).raise_for_status()
        yield running


@contextmanager
def signed_in(live: LiveGateway, place: str = "", log: list[str] | None = None) -> Iterator[Any]:
    """Open a signed-in page at this place of the console; what the browser logs is added to ``log``."""
    said = [] if log is None else log
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        made = browser.new_page()
        made.on("console", lambda line: said.append(line.text))
        made.on("pageerror", lambda error: said.append(str(error)))
        made.goto(f"{live.url}/console{place}")
        made.fill("input[type=password]", ADMIN_KEY)
        made.click("form button")
        made.wait_for_selector("nav")
        yield made
        browser.close()


@contextmanager
def browsing(live: LiveGateway) -> Iterator[Any]:
    """Open a signed-in page; at the end check that the browser logged nothing and ran no payload."""
    complaints: list[str] = []
    with signed_in(live, log=complaints) as made:
        yield made
        assert complaints == []
        assert made.evaluate("window.ran") is None


@pytest.fixture
def page(live: LiveGateway) -> Iterator[Any]:
    with browsing(live) as made:
        yield made


def show(page: Any, live: LiveGateway, view: str) -> None:
    page.goto(f"{live.url}/console#/{view}")
    until(page, lambda: "loading…" not in page.inner_text("main"))


def until(page: Any, condition: Callable[[], bool]) -> None:
    """Poll a condition; the page's policy forbids evaluating strings, so the page itself cannot wait."""
    for _ in range(1_200):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError(page.inner_text("main"))


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_shows_hostile_texts_and_runs_none_of_them(
    page: Any, live: LiveGateway, view: str
) -> None:
    show(page, live, view)
    text = page.inner_text("main")
    assert text and "undefined" not in text and "[object" not in text
    assert re.search(r"\d-\d\dT\d\d:", text) is None, "all times are shown in one form"
    assert page.query_selector("[role=alert]") is None
    if view in ("requests", "keys"):
        assert sum(payload in text for payload in PAYLOADS) == len(PAYLOADS)


def test_a_list_without_requests_speaks_of_matches_only_after_a_search(page: Any, live: LiveGateway) -> None:
    page.route("**/admin/console/requests*", lambda route: route.fulfill(json={"requests": []}))
    show(page, live, "requests")
    assert "No request since the start" in page.inner_text("main")
    page.fill("main input", "nobody")
    page.click("main form button")
    until(page, lambda: "None of the last 2,000 requests matches" in page.inner_text("main"))


def test_a_request_is_found_and_shown_with_its_stages(page: Any, live: LiveGateway) -> None:
    show(page, live, "requests")
    page.fill("main input", "self_hosted")
    page.click("main form button")
    until(page, lambda: page.locator("tbody tr").count() < 5)
    page.click("tbody a")
    page.wait_for_selector("svg")
    assert "canonicalize" in page.inner_text("main") and "TTFT" in page.inner_text("main")


def test_a_rollback_by_clicks_is_in_force(page: Any, live: LiveGateway, tmp_path: Path) -> None:
    show(page, live, "routing")
    assert "second" in page.inner_text("main")
    page.click("text=Roll back to 1")
    until(page, lambda: page.locator("[role=alertdialog] del").count() > 0)
    asked = page.inner_text("[role=alertdialog]")
    assert "every gateway within a second" in asked and "routes.second" in asked
    page.click("button.danger")
    until(page, lambda: page.inner_text("main p b") == "3")
    shown = httpx.get(f"{live.url}/admin/routing", headers={"authorization": f"Bearer {ADMIN_KEY}"}).json()
    assert list(shown["config"]["routes"]) == ["self_hosted_generation"]


def test_a_backend_without_a_weight_has_its_whole_route(page: Any, live: LiveGateway) -> None:
    config = httpx.get(f"{live.url}/admin/routing", headers=live.headers).json()["config"]
    config["routes"]["bare"] = {"backends": [{"name": "local"}]}
    httpx.put(f"{live.url}/admin/routing", headers=live.headers, json={"config": config}).raise_for_status()
    show(page, live, "routing")
    assert "100 %" in page.inner_text("tr:has-text('bare')")
    assert page.locator("text=Promote local").count() == 0


def test_a_canary_is_compared_with_the_stable_backend_and_aborted_by_clicks(tmp_path: Path) -> None:
    """The canary's backend is unreachable: the engine answers its requests, which counts against it."""
    away = {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "model": "demo"}
    route = {"backends": [{"name": "local", "weight": 100}], "fallback": []}
    (tmp_path / "routing.yaml").write_text(yaml.safe_dump({"routes": {"self_hosted_generation": route}}))
    settings = {
        "backends": {"local": {"kind": "engine"}, "away": away},
        "routing": {"file": str(tmp_path / "routing.yaml")},
    }
    (tmp_path / "sluice.yaml").write_text(yaml.safe_dump(settings))
    plan = {"route": "self_hosted_generation", "backend": "away", "steps": [50, 80, 100], "window_seconds": 1}
    with gateway(tmp_path, config=tmp_path / "sluice.yaml") as live, browsing(live) as page:
        client = httpx.Client(base_url=live.url, headers=live.headers, timeout=60)
        client.post("/admin/canary/start", json=plan).raise_for_status()
        for number in range(8):
            asked = {"messages": ASKED["messages"], "session_id": f"s{number}", "sampling": {"max_tokens": 2}}
            client.post("/v1/generate", json={**asked, "route": plan["route"]})

        def judged() -> Any:
            return client.get("/admin/canary").json()["canary"]["checks"].get("fallback", {})

        until(page, lambda: judged().get("canary", 0) > 0 and judged()["baseline"] > 0)
        show(page, live, "routing")
        checks = page.locator("tr:has(td:text-is('fallback'))").inner_text()
        canary, stable = checks.split("\t")[1:3]
        assert canary.startswith("100 % (") and stable.startswith("0 % (0 % to")
        assert page.locator("rect.base").count() > 0
        assert "80 %" in page.inner_text(".cards")  # the next step
        page.click("text=Abort the canary")
        page.wait_for_selector("[role=alertdialog] ins")
        page.click("button.danger")
        until(page, lambda: "aborted" in page.inner_text("main"))
        shares = client.get("/admin/routing").json()["config"]["routes"]["self_hosted_generation"]["backends"]
        assert {one["name"]: one["weight"] for one in shares} == {"local": 100.0, "away": 0.0}
        client.close()


def test_an_adapter_is_promoted_by_clicks_and_is_in_force(page: Any, live: LiveGateway) -> None:
    client = httpx.Client(base_url=live.url, headers=live.headers, timeout=60)
    added = {"id": "style_v1", "location": str(ROOT / "models/adapters/jp_style_v1")}
    sha256 = client.post("/admin/adapters", json=added).raise_for_status().json()["sha256"]
    report = {"passed": True, "candidate_sha256": sha256, "prompts": {"sha256": "0" * 64}}
    signed = {"report": sign(report, ADMIN_KEY.encode())}
    client.post("/admin/adapters/style_v1/evaluation", json=signed).raise_for_status()
    show(page, live, "adapters")
    row = page.locator("tr:has(td:text-is('style_v1'))")
    row.locator("input >> nth=0").fill("style")
    row.locator("button", has_text="Promote").click()
    assert "100 % of the sessions of style get style_v1" in page.inner_text("[role=alertdialog]")
    page.click("button.danger")
    until(page, lambda: page.locator("tr:has(td:text-is('style'))").count() > 0)
    asked = {"messages": ASKED["messages"], "adapter_id": "style", "sampling": {"max_tokens": 2}}
    assert client.post("/v1/generate", json=asked).json()["backend_version"] == "demo+style_v1"
    client.close()


def test_the_comparison_with_a_shadow_is_shown(page: Any, live: LiveGateway) -> None:
    def report() -> Any:
        return httpx.get(f"{live.url}/admin/shadow", headers=live.headers, timeout=60).json()

    until(page, lambda: report()["pairs"] > 0)
    show(page, live, "shadow")
    text = page.inner_text("main")
    assert all(name in text.splitlines()[2] for name in ("demo", "shop", "got the same requests"))
    checks = page.locator("tr:has(td:text-is('shape'))").first.inner_text().split("\t")
    assert checks[2].startswith("100 % (") and checks[3].startswith("100 % (")
    assert "All pairs" in text and "the shadow answered" in text and "TTFT" in text


@pytest.mark.parametrize("view", ["now", "keys"])
def test_a_session_that_has_ended_asks_for_a_key_again(live: LiveGateway, view: str) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    made = httpx.post(f"{live.url}/admin/keys", json={"tenant": "ops", "role": "operator"}, headers=headers)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{live.url}/console#/{view}")
        page.fill("input[type=password]", made.json()["key"])
        page.click("form button")
        page.wait_for_selector("nav")
        until(page, lambda: "loading…" not in page.inner_text("main"))
        httpx.delete(f"{live.url}/admin/keys/{made.json()['id']}", headers=headers).raise_for_status()
        if view == "keys":
            page.evaluate("() => { location.hash = '#/routing' }")
        page.wait_for_selector("input[type=password]")
        assert page.inner_text("[role=alert]") == "The session has ended."
        page.fill("input[type=password]", ADMIN_KEY)
        page.click("form button")
        page.wait_for_selector("nav")
        browser.close()


@pytest.mark.parametrize("view", ["batches", "playground"])
def test_a_view_of_callers_paths_says_at_the_operators_port_that_it_does_not_work_there(
    live: LiveGateway, view: str
) -> None:
    with signed_in(live) as page:
        page.route("**/v1/*", lambda route: route.fulfill(status=404, json={"error": {"message": "nothing"}}))
        page.goto(f"{live.url}/console#/{view}")
        until(page, lambda: "server.admin_port" in page.inner_text("main"))
        assert "server.admin_port" in page.inner_text("[role=alert]")


def test_a_view_says_that_the_gateway_cannot_be_reached_and_shows_its_rows_once_it_is_back(
    live: LiveGateway,
) -> None:
    with signed_in(live) as page:
        page.route("**/admin/keys*", lambda route: route.abort())
        page.goto(f"{live.url}/console#/keys")
        until(page, lambda: "the gateway cannot be reached" in page.inner_text("main"))
        page.unroute("**/admin/keys*")
        until(page, lambda: "cannot be reached" not in page.inner_text("main"))
        assert page.query_selector("main table")


def test_an_address_of_no_view_shows_the_view_now_and_one_that_is_wrongly_encoded_no_request(
    live: LiveGateway,
) -> None:
    with signed_in(live, "#/constructor") as page:
        until(page, lambda: "Now at" in page.inner_text("main"))
        page.goto(f"{live.url}/console#/requests/%E0%A4%A")
        until(page, lambda: "All requests" in page.inner_text("main"))
        page.wait_for_selector("[role=alert]")


def test_a_sign_out_that_failed_says_that_the_session_goes_on(live: LiveGateway) -> None:
    with signed_in(live, "#/routing") as page:
        page.route("**/console/session", lambda route: route.abort())
        page.click("text=Sign out")
        until(page, lambda: "not signed out" in page.inner_text("header"))


def test_a_live_view_goes_on_after_an_answer_of_a_proxy_whose_gateway_restarts(live: LiveGateway) -> None:
    with browsing(live) as page:
        page.goto(f"{live.url}/console#/keys")
        until(page, lambda: "loading…" not in page.inner_text("main"))
        asked: list[str] = []

        def proxy(route: Any) -> None:
            asked.append(route.request.url)
            if len(asked) == 1:
                route.fulfill(status=204)
            else:
                route.continue_()

        page.route("**/console/live", proxy)
        page.goto(f"{live.url}/console#/now")
        until(page, lambda: "in flight" in page.inner_text("main"))
        assert len(asked) == 2


def test_a_long_comment_leaves_the_buttons_of_the_keys_on_the_screen(page: Any, live: LiveGateway) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    made = httpx.post(f"{live.url}/admin/keys", json={"tenant": "t", "comment": "n" * 255}, headers=headers)
    show(page, live, "keys")
    box = page.locator("tr", has_text=made.json()["id"]).locator("button", has_text="Revoke").bounding_box()
    assert box["x"] + box["width"] <= page.viewport_size["width"]


def test_a_revoked_key_is_gone(page: Any, live: LiveGateway) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    made = httpx.post(f"{live.url}/admin/keys", json={"tenant": "leaving"}, headers=headers).json()
    show(page, live, "keys")
    row = page.locator("tr", has_text=made["id"])
    row.locator("button", has_text="Revoke").click()
    page.click("button.danger")
    row.wait_for(state="detached")
    refused = httpx.get(f"{live.url}/v1/models", headers={"authorization": f"Bearer {made['key']}"})
    assert refused.status_code == 401


def test_an_open_question_stays_with_its_key_when_another_key_is_revoked(
    page: Any, live: LiveGateway
) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    first, second, third = (
        httpx.post(f"{live.url}/admin/keys", json={"tenant": "row"}, headers=headers).json()["id"]
        for _ in range(3)
    )
    show(page, live, "keys")
    rows = {name: page.locator("tr", has_text=name) for name in (first, second, third)}
    for name in (first, second):
        rows[name].locator("button", has_text="Revoke").click()
    rows[first].locator("button.danger").click()
    rows[first].wait_for(state="detached")
    assert second in page.inner_text("[role=alertdialog]")
    assert rows[third].locator("[role=alertdialog]").count() == 0


def test_a_key_is_found_by_its_tenant(page: Any, live: LiveGateway) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    made = httpx.post(f"{live.url}/admin/keys", json={"tenant": "needle"}, headers=headers).json()["id"]
    show(page, live, "keys")
    page.fill("main input", "needl")
    until(page, lambda: page.locator("tbody tr").count() == 1)
    assert made in page.inner_text("tbody tr")
    page.fill("main input", "nobody's")
    until(page, lambda: "No key matches." in page.inner_text("main"))


def test_a_question_is_answered_and_left_by_keys_alone(page: Any, live: LiveGateway) -> None:
    show(page, live, "routing")
    page.locator("text=Roll back to 1").focus()
    page.keyboard.press("Enter")
    focused = page.locator(":focus")
    until(page, lambda: focused.count() and focused.get_attribute("role") == "alertdialog")
    until(page, lambda: page.locator("button.danger").count() > 0)
    page.keyboard.press("Tab")
    assert page.locator("[role=alertdialog] :focus").count() == 1
    page.keyboard.press("Escape")
    until(page, lambda: focused.count() and focused.inner_text() == "Roll back to 1")
    assert page.locator("[role=alertdialog]").count() == 0


def test_an_operator_whose_change_came_second_sees_the_first_one_at_once(live: LiveGateway) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with signed_in(live) as page:
        show(page, live, "routing")
        page.locator("button", has_text="Roll back to 2").click()
        until(page, lambda: page.locator("button.danger").count() > 0)
        config = httpx.get(f"{live.url}/admin/routing", headers=headers).json()["config"]
        config["routes"]["third"] = config["routes"]["self_hosted_generation"]
        httpx.put(f"{live.url}/admin/routing", json={"config": config}, headers=headers).raise_for_status()
        page.click("button.danger")
        until(page, lambda: "nothing was changed" in page.inner_text("main"))
        until(page, lambda: "third" in page.locator("main table").first.inner_text())
        told = page.locator("tr", has_text="nothing was changed")
        assert told.locator("td").first.inner_text() == "2"


def test_the_key_that_is_nearest_to_a_limit_comes_first(page: Any, live: LiveGateway) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    limits = {"requests_per_minute": 100, "tokens_per_day": 10}
    made = httpx.post(f"{live.url}/admin/keys", json={"tenant": "near", "limits": limits}, headers=headers)
    key = made.raise_for_status().json()
    asked = {**ASKED, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    while True:  # until the limit is used up
        answer = httpx.post(
            f"{live.url}/v1/chat/completions",
            json=asked,
            headers={"authorization": f"Bearer {key['key']}"},
            timeout=60,
        )
        if answer.status_code != 200:
            break
    shown = httpx.get(f"{live.url}/admin/keys", headers=headers).json()["keys"]
    [used] = [one["used"]["tokens_per_day"] for one in shown if one["id"] == key["id"]]
    show(page, live, "keys")
    assert key["id"] in page.inner_text("tbody tr:first-child")
    assert f"tokens per day: {used:,} of 10" in page.inner_text("tbody tr:first-child")


def test_usage_is_summed_plotted_and_downloaded_without_formulas(page: Any, live: LiveGateway) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    formula = "=cmd|'/c calc'!A1"
    asked = {**ASKED, "user": formula}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=asked, headers=headers, timeout=60)
    answer.raise_for_status()

    def summed() -> bool:
        page.reload()
        show(page, live, "usage")
        page.select_option("main select >> nth=0", "user")
        until(page, lambda: page.locator("thead th").all_inner_texts()[:1] == ["user"])
        return formula in page.inner_text("main")

    until(page, summed)
    assert page.locator("svg rect").count() == page.locator("tbody tr").count() > 0
    with page.expect_download() as download:
        page.click("text=Download as CSV")
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith('"user","requests"')
    assert any(line.startswith(f'"\'{formula}"') for line in lines[1:])
    assert not any(line.startswith(('"=', "=")) for line in lines)


def test_a_prompt_is_rendered_with_its_sections_and_its_boundary(page: Any, live: LiveGateway) -> None:
    show(page, live, "prompts")
    page.click("tbody a")
    page.wait_for_selector("textarea")
    page.fill("textarea", "Who drew it?")
    page.click("text=Render")
    until(page, lambda: "After the boundary" in page.inner_text("main"))
    assert "Who drew it?" in page.inner_text("pre >> nth=-1")
    assert "recent turns" in page.inner_text("main") and "input tokens" in page.inner_text("main")


def test_the_playground_streams_the_answers_of_two_models_next_to_each_other(
    page: Any, live: LiveGateway
) -> None:
    sent: list[dict[str, Any]] = []
    page.on("request", lambda asked: asked.method == "POST" and sent.append(asked.post_data_json))
    show(page, live, "playground")
    page.fill("textarea[name=message]", "Who wrote Berserk?")
    page.select_option("main select >> nth=1", index=1)
    page.click("text=Send")
    until(page, lambda: page.inner_text("main").count("tokens in") == 2)
    assert all(text.strip() for text in page.locator("section pre").all_inner_texts())
    page.click("summary")
    page.fill("textarea[name=tools]", "[{")
    page.click("text=Send")
    assert page.inner_text("[role=alert]").startswith("tools: ")
    page.click("text=An example")
    page.click("text=Send")
    until(page, lambda: len(sent) == 4 and page.query_selector("form [role=alert]") is None)
    until(page, lambda: page.inner_text("main").count("tokens in") == 2)
    assert [one["tools"][0]["function"]["name"] for one in sent[2:]] == ["find", "find"]


def test_the_playground_shows_reasoning_under_the_name_that_the_gateway_gives_it(
    page: Any, live: LiveGateway
) -> None:
    deltas = {"reasoning": "By its author."}, {"reasoning_content": " So:"}, {"content": "Miura"}
    events = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas]
    page.route("**/v1/chat/completions", lambda asked: asked.fulfill(body="".join(events)))
    show(page, live, "playground")
    page.fill("textarea[name=message]", "Who wrote Berserk?")
    page.click("text=Send")
    until(page, lambda: page.locator("section pre >> text=Miura").count() == 1)
    assert page.locator("section details pre").text_content() == "By its author. So:"


def test_axe_finds_nothing_in_any_view_on_small_screens_dark_and_light(page: Any, live: LiveGateway) -> None:
    pytest.importorskip("axe_playwright_python", reason="pip install -e '.[clients]'")
    axe = (resources.files("axe_playwright_python") / "axe.min.js").read_text()
    page.set_viewport_size({"width": 360, "height": 740})
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for view in VIEWS:
            show(page, live, view)
            page.evaluate(f"() => {{ {axe} }}")
            assert page.evaluate(AXE) + page.evaluate(FAULTS) == [], (scheme, view)
