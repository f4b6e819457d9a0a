// The operator's console. Texts reach the page as text nodes alone.
import { Action, Asked, at, ask, Cards, dollars, ms, number, share, Table, useAsked } from "./parts.js";
import { Playground } from "./playground.js";
import { html, render, useEffect, useState } from "./preact.js";
import { Adapters, Keys, Prompts, Shadow, Usage } from "./records.js";
import { Routing } from "./routing.js";

const REQUEST_COLUMNS = [
  ["request", (one) => one.request_id],
  ["at (UTC)", (one) => at(one.at)],
  ["tenant", (one) => one.tenant ?? "–"],
  ["contract", (one) => one.contract],
  ["route", (one) => one.route ?? "–"],
  ["model", (one) => one.model ?? "–"],
  ["backend", (one) => one.fallback ? `${one.backend ?? "–"} (fallback ${one.fallback})` : one.backend ?? "–"],
  ["status", (one) => html`<span class=${one.error_code || one.status >= 400 ? "bad" : "good"}>${one.status}${one.error_code ? ` ${one.error_code}` : ""}</span>`],
  ["in", (one) => number(one.input_tokens), "number"],
  ["cached", (one) => number(one.cached_tokens), "number"],
  ["out", (one) => number(one.output_tokens), "number"],
  ["waited", (one) => ms(one.queue_wait_ms), "number"],
  ["TTFT", (one) => ms(one.ttft_ms), "number"],
  ["total", (one) => ms(one.total_ms), "number"],
];
const requestLink = (one) => `#/requests/${encodeURIComponent(one.request_id)}`;

// Views

const HOLDS = { slots: "a free slot in the engine's batch", prefill: "earlier prompts to be computed", memory: "KV memory: the forecast exceeds the watermark" };

function Now() {
  const [live, set] = useState(null);
  const [lost, setLost] = useState(false);
  useEffect(() => {
    let source, later, left = false;
    const open = () => {
      source = new EventSource("/console/live");
      source.onmessage = (event) => { setLost(false); set(JSON.parse(event.data)); };
      source.onerror = () => {
        setLost(true);
        // The browser itself tries again when a connection fails, but not after a status such as 401, 429 or 502.
        if (source.readyState === EventSource.CLOSED) later = setTimeout(again, 2000);
      };
    };
    const again = () => ask("/console/session").then(
      (who) => left || (who ? open() : dispatchEvent(new Event("unauthorized"))),
      () => { if (!left) later = setTimeout(again, 2000); },
    );
    open();
    return () => { left = true; clearTimeout(later); source.close(); };
  }, []);
  if (!live) return html`<p class="quiet">${lost ? "the gateway cannot be reached; trying again" : "loading…"}</p>`;
  const figures = live.figures;
  const gates = Object.entries(live.gates);
  const queued = gates.filter(([, gate]) => gate.queue.requests);
  return html`<h2>Now at ${live.gateway} ${lost ? html`<span class="bad" role="alert">no answer since ${at(live.at)}</span>` : null}</h2>
    <${Cards} figures=${[
      ["in flight", number(live.fleet.find((one) => one.gateway === live.gateway).in_flight)],
      ["waiting", number(gates.reduce((sum, [, gate]) => sum + gate.queue.requests, 0))],
      ["requests a second", number(figures.requests_per_second, 1)],
      ["TTFT p50 / p99", `${ms(figures.ttft_ms_p50)} / ${ms(figures.ttft_ms_p99)}`],
      ["TPOT p50 / p99", `${ms(figures.tpot_ms_p50)} / ${ms(figures.tpot_ms_p99)}`],
      ["goodput, requests a second", number(live.targets.reduce((sum, one) => sum + one.goodput, 0), 2)],
      ["errors, last minute", number(figures.errors_last_minute), figures.errors_last_minute ? "bad" : "good"],
      ["fallbacks, last minute", number(figures.fallbacks_last_minute)],
      ["refused, last minute", number(figures.shed_last_minute), figures.shed_last_minute ? "bad" : "good"],
    ]} />
    <h3>Gateways</h3>
    <${Table} rows=${live.fleet} empty="" columns=${[
      ["name", (one) => one.gateway === live.gateway ? html`<b>${one.gateway}</b> (this one)` : one.gateway],
      ["state", (one) => one.gone ? html`<span class="bad">gone, last seen ${at(one.at)}</span>` : html`<span class="good">here</span>`],
      ["version", (one) => one.version],
      ...[["in flight", "in_flight"], ["waiting", "waiting"], ["errors", "errors"], ["fallbacks", "fallbacks"], ["refused", "refused"]].map(([title, name]) =>
        [title, (one) => one.gone ? "–" : number(one[name]), "number"]),
      ["requests a second", (one) => one.gone ? "–" : number(one.requests_per_second, 1), "number"],
      ["TTFT p50 / p99", (one) => one.gone ? "–" : `${ms(one.ttft_ms_p50)} / ${ms(one.ttft_ms_p99)}`, "number"],
      ["TPOT p50 / p99", (one) => one.gone ? "–" : `${ms(one.tpot_ms_p50)} / ${ms(one.tpot_ms_p99)}`, "number"],
    ]} />
    <h3>Routes against their targets, last minute</h3>
    <${Table} rows=${live.targets} empty="No request has ended in the last minute." columns=${[
      ["route", (one) => one.route], ["requests", (one) => number(one.requests), "number"],
      ["first token: target", (one) => ms(one.ttft_target_ms), "number"],
      ["in time (target: half)", (one) => html`<span class=${one.ttft_met !== null && one.ttft_met < .5 ? "bad" : ""}>${share(one.ttft_met)}</span>`, "number"],
      ["whole answer: target", (one) => ms(one.total_target_ms), "number"],
      ["in time (target: 99 %)", (one) => html`<span class=${one.total_met !== null && one.total_met < .99 ? "bad" : ""}>${share(one.total_met)}</span>`, "number"],
      ["goodput, requests a second", (one) => number(one.goodput, 2), "number"],
    ]} />
    <h3>Backends</h3>
    <${Table} rows=${live.backends} empty="No backend is configured: see docs/workers.md." columns=${[
      ["name", (one) => one.name], ["kind", (one) => one.kind], ["model", (one) => one.model],
      ["state", (one) => html`<span class=${one.state === "ready" ? "good" : "bad"}>${one.state}</span>`],
      ["workers", (one) => number(one.load?.workers), "number"], ["running", (one) => number(one.load?.running), "number"],
      ["queued in the engine", (one) => number(one.load?.waiting), "number"], ["KV memory", (one) => share(one.load?.kv_usage), "number"],
      ["input found in the prefix cache", (one) => share(live.prefix_hits[one.name]), "number"],
    ]} />
    ${live.workers.length ? html`<h3>Workers</h3><${Table} rows=${live.workers} columns=${[
      ["pool", (one) => one.pool], ["worker", (one) => one.url],
      ["state", (one) => html`<span class=${one.state === "in_service" ? "good" : "bad"}>${one.state.replaceAll("_", " ")}</span>`],
      ["in flight from this gateway", (one) => number(one.in_flight), "number"], ["running", (one) => number(one.running), "number"],
      ["queued in the worker", (one) => number(one.waiting), "number"], ["KV memory", (one) => share(one.kv_usage), "number"],
      ["ejections", (one) => number(one.ejections), "number"],
    ]} />` : null}
    <h3>Admission</h3>
    <${Table} rows=${gates} empty="No request yet." columns=${[
      ["engine", ([name]) => name],
      ["in flight", ([, gate]) => `${number(gate.in_flight.sequences)} of ${number(gate.in_flight.limit)}`, "number"],
      ["waiting: high, normal, low", ([, gate]) => ["high", "normal", "low"].map((one) => gate.queue.classes[one]).join(", "), "number"],
      ["KV now / forecast", ([, gate]) => `${share(gate.memory.used)} / ${share(gate.memory.forecast)}`, "number"],
      ["overload level", ([, gate]) => number(gate.ladder.rung), "number"],
      ["circuit breaker", ([, gate]) => html`<span class=${gate.circuit.state === "closed" ? "good" : "bad"}>${gate.circuit.state}</span>`],
    ]} />
    <h3>Waiting requests and their reasons</h3>
    <${Table} rows=${queued.flatMap(([engine, gate]) => gate.queue.tenants.slice(0, 50).map((one) => ({ engine, gate, ...one })))} empty="No request waits." columns=${[
      ["engine", (one) => one.engine], ["tenant", (one) => one.tenant], ["class", (one) => one.class], ["requests", (one) => number(one.requests), "number"],
      ["the first in the queue waits for", (one) => HOLDS[one.gate.queue.held_by] ?? one.gate.queue.held_by ?? "its turn"],
      ["prompt tokens ahead, at most", (one) => number(one.gate.queue.tokens + one.gate.in_flight.prefill_tokens), "number"],
      ["time to compute these", (one) => one.gate.rates.prefill_tokens_per_s ? ms(1000 * (one.gate.queue.tokens + one.gate.in_flight.prefill_tokens) / one.gate.rates.prefill_tokens_per_s) : "–", "number"],
    ]} />
    <h3>Last decisions</h3>
    <${Table} rows=${live.decisions} empty="None yet." columns=${[
      ["at (UTC)", (one) => at(one.at)], ["decision", (one) => one.decision ?? one.kind ?? "–"], ["backend", (one) => one.backend],
      ["tenant", (one) => one.tenant ?? "–"], ["reason", (one) => one.reason ?? "–"], ["waited", (one) => ms(one.waited_ms ?? one.wait_ms), "number"],
    ]} />
    <h3>Last requests</h3>
    <${Table} rows=${live.requests} empty="None yet." columns=${REQUEST_COLUMNS} onRow=${requestLink} />`;
}

function Requests({ id }) {
  return id ? html`<${Request} id=${id} />` : html`<${RequestSearch} />`;
}

function RequestSearch() {
  const [text, set] = useState("");
  const [errors, setErrors] = useState(false);
  const [path, go] = useState("/admin/console/requests");
  const [state, again] = useAsked(path);
  const search = (event) => {
    event.preventDefault();
    const next = `/admin/console/requests?text=${encodeURIComponent(text)}&errors=${errors}`;
    if (next === path) again(); else go(next);
  };
  return html`<h2>Requests of this gateway</h2>
    <form class="row" onSubmit=${search}>
      <label>id, tenant, key id, model, route, backend or error <input value=${text} maxlength="128" onInput=${(event) => set(event.target.value)} /></label>
      <label><input type="checkbox" checked=${errors} onChange=${(event) => setErrors(event.target.checked)} /> errors only</label>
      <button>Search</button>
    </form>
    <${Asked} state=${state}>${(data) => html`<${Table} rows=${data.requests} columns=${REQUEST_COLUMNS} onRow=${requestLink}
      empty=${/text=[^&]|=true/.test(path) ? "None of the last 2,000 requests matches; older ones are in the ledger (Usage)." : "No request since the start; older ones are in the ledger (Usage)."} />
      ${data.requests.length < 100 ? null : html`<p class="quiet">The newest 100 that match.</p>`}`}<//>`;
}

function Request({ id }) {
  const [state] = useAsked(`/admin/console/requests/${encodeURIComponent(id)}`);
  return html`<p><a href="#/requests">All requests</a></p><${Asked} state=${state}>${(one) => {
    const stages = Object.entries(one.stage_ms ?? {});
    const whole = Math.max(one.total_ms, 1e-9);
    let begun = 0;
    return html`<h2>${one.request_id}</h2>
      <${Cards} figures=${[
        ["status", `${one.status} ${one.error_code ?? ""}`, one.error_code ? "bad" : "good"], ["total", ms(one.total_ms)], ["TTFT", ms(one.ttft_ms)],
        ["waited for admission", ms(one.queue_wait_ms)], ["input / cached", `${number(one.input_tokens)} / ${number(one.cached_tokens)}`],
        ["output", number(one.output_tokens)], ["operator's cost", dollars(one.cost_nanousd)],
      ]} />
      <h3>Stages</h3>
      <svg width="100%" height=${stages.length * 22 + 4} role="img" aria-label="stages of the request">${stages.map(([name, took], place) => {
        const start = begun; begun += took;
        return html`<g><text x="0" y=${place * 22 + 15}>${name}: ${ms(took)}</text>
          <rect class="bar" x=${`${25 + 74 * start / whole}%`} y=${place * 22 + 4} width=${`${Math.max(.15, 74 * took / whole)}%`} height="14" /></g>`;
      })}</svg>
      <h3>What was left out of the prompt</h3>
      <p>${one.dropped_chunks} evidence chunks and ${one.dropped_turns} turns dropped (${one.summarized_turns} of them summarized), ${one.cut_chunks} chunks cut, ${one.merged_chunks} merged.</p>
      <h3>All recorded fields</h3><pre>${JSON.stringify(one, null, 2)}</pre>`;
  }}<//>`;
}

function Batches({ role }) {
  const [state, again] = useAsked("/v1/batches?limit=50");
  return html`<h2>Batches of this key's tenant</h2><${Asked} state=${state}>${({ data }) => html`<${Table} rows=${data} by=${(one) => one.id} empty="None: see docs/batches.md." columns=${[
    ["id", (one) => one.id], ["status", (one) => one.status], ["endpoint", (one) => one.endpoint], ["model", (one) => one.model ?? "–"],
    ["done", (one) => `${number(one.request_counts.completed)} of ${number(one.request_counts.total)}`, "number"], ["failed", (one) => number(one.request_counts.failed), "number"],
    ["expires", (one) => at(one.expires_at)],
    ["", (one) => ["validating", "in_progress"].includes(one.status) ? html`<${Action} role=${role} label="Cancel" done=${again}
      says="No further line starts; ended lines stay in the result files." run=${() => ask(`/v1/batches/${encodeURIComponent(one.id)}/cancel`, "POST", {})} />` : null],
  ]} />`}<//>`;
}

// The frame

const VIEWS = { now: ["Now", Now], requests: ["Requests", Requests], routing: ["Routing", Routing], adapters: ["Adapters", Adapters], prompts: ["Prompts", Prompts],
  keys: ["Keys", Keys], usage: ["Usage", Usage], shadow: ["Shadow", Shadow], batches: ["Batches", Batches], playground: ["Playground", Playground] };

// An address that a person typed may have no such encoding.
const decoded = (id) => { try { return decodeURIComponent(id); } catch { return id; } };

function SignIn({ done, reason }) {
  const [key, set] = useState("");
  const [fault, setFault] = useState(reason);
  const send = (event) => {
    event.preventDefault();
    ask("/console/session", "POST", { key }).then(done, (error) => setFault(error.message));
  };
  return html`<main><h2>Sign in to Sluice</h2><p>Use a key of role viewer, operator or admin. It is exchanged for a session of eight hours and not stored.</p>
    <form class="row" onSubmit=${send}><label>key <input type="password" autocomplete="off" required value=${key} onInput=${(event) => set(event.target.value)} /></label><button>Sign in</button></form>
    ${fault ? html`<p class="bad" role="alert">${fault}</p>` : null}</main>`;
}

function Console() {
  const [who, set] = useState(undefined);
  const [place, setPlace] = useState(location.hash);
  const look = () => { ask("/console/session").then(set, (error) => set({ error })); };
  useEffect(() => {
    look();
    const moved = () => setPlace(location.hash);
    const ended = () => set({ error: { message: "The session has ended." } });
    addEventListener("hashchange", moved);
    addEventListener("unauthorized", ended);
    moved();  // the address may have changed since the first render
    return () => { removeEventListener("hashchange", moved); removeEventListener("unauthorized", ended); };
  }, []);
  if (who === undefined) return html`<main class="quiet">loading…</main>`;
  if (!who || who.error) return html`<${SignIn} done=${look} reason=${who?.error?.message} />`;
  const [name, id] = place.replace(/^#\//, "").split("/");
  const current = Object.hasOwn(VIEWS, name) ? name : "now";
  const [, View] = VIEWS[current];
  const leave = () => { ask("/console/session", "DELETE").then(look, (error) => set({ ...who, fault: error.message })); };
  return html`<header><h1>Sluice</h1><nav aria-label="views">${Object.entries(VIEWS).map(([one, [title]]) =>
      html`<a href=${`#/${one}`} aria-current=${one === current ? "page" : undefined}>${title}</a>`)}</nav>
    <span class="who">${who.fault ? html`<span class="bad" role="alert">not signed out: ${who.fault}</span> ` : null}${who.key_id} (${who.role}) <button onClick=${leave}>Sign out</button></span></header>
    <main><${View} key=${current + (id ?? "")} id=${id ? decoded(id) : null} role=${who.role} /></main>`;
}

render(html`<${Console} />`, document.getElementById("console"));
