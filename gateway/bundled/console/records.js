// Views of what is registered and stored: adapters, prompts, keys, usage, shadowed requests.
import { Action, ask, Asked, at, Cards, dollars, ms, number, share, Table, useAsked } from "./parts.js";
import { html, useState } from "./preact.js";

function Bars({ label, rows }) {
  const most = Math.max(1e-9, ...rows.map(([, value]) => Math.abs(value)));
  return html`<svg width="100%" height=${rows.length * 20} role="img" aria-label=${label}>${rows.map(([name, value], place) =>
    html`<g><text x="0" y=${place * 20 + 14}>${name.length > 40 ? `${name.slice(0, 39)}…` : name}</text>
      <rect class=${value < 0 ? "bar below" : "bar"} x="35%" y=${place * 20 + 3} height="13" width=${`${64 * Math.abs(value) / most}%`} /></g>`)}</svg>`;
}

// A text that a spreadsheet would take for a formula gets an apostrophe before it.
function cell(value) {
  if (typeof value === "number") return String(value);
  const text = String(value ?? "");
  return `"${(/^\s*[=+\-@]|^[\t\r\n]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
}

function download(name, rows) {
  const columns = Object.keys(rows[0]);
  const lines = [columns.map(cell), ...rows.map((row) => columns.map((one) => cell(row[one])))];
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([lines.map((one) => `${one.join(",")}\r\n`).join("")], { type: "text/csv" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// Usage

const GROUPS = ["tenant", "model", "day", "tenant,model", "tenant,day", "model,day", "tenant,model,day", "org", "user", "key", "route", "adapter", "backend"];
const SPANS = { "1": "last day", "7": "last 7 days", "30": "last 30 days", "": "all" };
const PLOTS = {
  tokens: [(one) => one.input_tokens + one.output_tokens, (value) => number(value)],
  cost: [(one) => one.cost_nanousd, dollars],
  margin: [(one) => one.margin_tokens, (value) => number(value)],
};

export function Usage() {
  const [by, set] = useState("tenant");
  const [days, setDays] = useState("7");
  const [plot, setPlot] = useState("tokens");
  const hour = Math.floor(Date.now() / 3_600_000) * 3_600;
  const [state] = useAsked(`/admin/usage?by=${by}${days && `&since=${hour - days * 86_400}`}`);
  const choose = (label, value, change, options) => html`<label>${label} <select value=${value} onChange=${(event) => change(event.target.value)}>
    ${options.map(([name, title]) => html`<option value=${name}>${title}</option>`)}</select></label>`;
  const keys = by.split(",");
  const [value, shown] = PLOTS[plot];
  return html`<h2>Usage</h2>
    <div class="row">${choose("by", by, set, GROUPS.map((one) => [one, one.replaceAll(",", ", ")]))}
      ${choose("time", days, setDays, Object.entries(SPANS))} ${choose("plot of", plot, setPlot, Object.keys(PLOTS).map((one) => [one, one]))}</div>
    <${Asked} state=${state}>${({ rows }) => {
      const name = (one) => keys.map((key) => String(one[key] ?? "–")).join(", ");
      const order = keys.includes("day") ? rows.slice(-31) : [...rows].sort((a, b) => value(b) - value(a)).slice(0, 20);
      const sum = (of) => rows.reduce((total, one) => total + of(one), 0);
      return html`${rows.length ? html`<${Cards} figures=${[
          ["requests", number(sum((one) => one.requests))], ["tokens", number(sum(PLOTS.tokens[0]))],
          ["operator's cost", dollars(sum(PLOTS.cost[0]))], ["margin, tokens", number(sum(PLOTS.margin[0]))],
        ]} /><h3>${plot} by ${keys.join(", ")}${rows.length > order.length ? `, ${order.length} of ${rows.length} lines` : ""}</h3>
        <${Bars} label=${`${plot} by ${by}`} rows=${order.map((one) => [`${name(one)}: ${shown(value(one))}`, value(one)])} />
        <div class="row"><button onClick=${() => download(`usage-by-${by.replaceAll(",", "-")}.csv`, rows)}>Download as CSV</button></div>` : null}
      <${Table} rows=${rows.slice(0, 500)} empty="The ledger has no request in this time." columns=${[
        ...keys.map((key) => [key, (one) => one[key] ?? "–"]), ["requests", (one) => number(one.requests), "number"], ["input", (one) => number(one.input_tokens), "number"],
        ["cached", (one) => number(one.cached_tokens), "number"], ["output", (one) => number(one.output_tokens), "number"],
        ["cost", (one) => dollars(one.cost_nanousd), "number"], ["without a price", (one) => number(one.unpriced_tokens), "number"],
        ["margin, tokens", (one) => number(one.margin_tokens), "number"],
      ]} />${rows.length > 500 ? html`<p class="quiet">The first 500 of ${number(rows.length)} lines; the CSV has all.</p>` : null}`;
    }}<//>`;
}

// Adapters

function Promotion({ one, role, done }) {
  const name = one.id.split(":")[0].split("@")[0];
  const [alias, setAlias] = useState(one.aliases[0] ?? "");
  const [percent, setPercent] = useState(100);
  if (role === "viewer") return null;
  const body = { ...(alias ? { alias } : {}), percent: Number(percent), comment: "from the console" };
  return html`<div class="row"><label>alias <input size="12" maxlength="128" placeholder=${name} value=${alias} onInput=${(event) => setAlias(event.target.value)} /></label>
    <label>percent <input type="number" min="1" max="100" value=${percent} onInput=${(event) => setPercent(event.target.value)} /></label>
    <${Action} role=${role} label="Promote" done=${done} run=${() => ask(`/admin/adapters/${encodeURIComponent(one.id)}/promote`, "POST", body)}
      says=${alias ? `${percent} % of the sessions of ${alias} get ${one.id}, in every gateway within a second.` : `${one.id} becomes active under its own name; no alias changes.`} /></div>`;
}

export function Adapters({ role }) {
  const [state, again] = useAsked("/admin/adapters");
  return html`<h2>Adapters</h2><${Asked} state=${state}>${(data) => html`
    <p>${data.resident.length} of ${data.places} slots used.</p>
    <${Table} rows=${data.adapters} by=${(one) => one.id} empty="No adapter is registered: sluice adapters add." columns=${[
      ["id", (one) => one.id], ["state", (one) => one.state], ["aliases", (one) => one.aliases.join(", ") || "–"], ["base model", (one) => one.base_model], ["rank", (one) => number(one.rank), "number"],
      ["loaded", (one) => one.resident ? `yes, ${number(one.leases)} in use` : "no"], ["by", (one) => one.author],
      ["evaluation", (one) => one.evaluation ? html`<span class=${one.evaluation.passed ? "good" : "bad"}>${one.evaluation.passed ? "passed" : "failed"}</span>` : "none"],
      ["", (one) => html`<${Promotion} one=${one} role=${role} done=${again} />`],
    ]} />
    <h3>Aliases</h3>
    <${Table} rows=${data.aliases} by=${(one) => one.alias} empty="No alias." columns=${[
      ["alias", (one) => one.alias], ["version", (one) => one.target ?? "–"], ["canary", (one) => one.canary ? `${one.canary}, ${number(one.percent, 1)} %` : "–"], ["earlier versions", (one) => one.history.join(", ") || "–"],
      ["", (one) => html`<${Action} role=${role} label="Roll back" done=${again} says=${`${one.alias} points to its previous version again, in every gateway within a second.`}
        run=${() => ask(`/admin/adapters/aliases/${encodeURIComponent(one.alias)}/rollback`, "POST", { comment: "from the console" })} />`],
    ]} />
    ${data.refused.length ? html`<h3>Not served here</h3><${Table} rows=${data.refused} columns=${[["id", (one) => one.id], ["reason", (one) => one.reason]]} />` : null}
    ${data.fetching.length ? html`<h3>Downloads</h3><${Table} rows=${data.fetching} columns=${[["from", (one) => one.location], ["bytes", (one) => `${number(one.done_bytes)} of ${number(one.total_bytes)}`, "number"]]} />` : null}`}<//>`;
}

// Keys

// Each limit of a key: its name, what is used of it, and the most.
function limitsOf(one) {
  const given = (limits, used, model) => Object.entries(limits ?? {}).filter(([, most]) => most).map(([name, most]) => ({ name: `${model}${name.replaceAll("_", " ")}`, used: used?.[name] ?? 0, most }));
  return [...given(one.limits, one.used, ""), ...given(one.budget, one.spent, ""),
    ...Object.entries(one.model_limits).flatMap(([model, limits]) => given(limits, one.model_used[model], `${model}: `))];
}

export function Keys({ role }) {
  const [state, again] = useAsked("/admin/keys");
  const [text, set] = useState("");
  return html`<h2>Keys and limits</h2>
    <label>id, tenant, role or comment <input value=${text} maxlength="128" onInput=${(event) => set(event.target.value)} /></label><${Asked} state=${state}>${(data) => {
    const keys = data.keys.map((one) => ({ ...one, most: limitsOf(one) })).map((one) => ({ ...one, nearest: Math.max(0, ...one.most.map((limit) => limit.used / limit.most)) }));
    const near = keys.filter((one) => one.nearest >= .8).length;
    const found = keys.filter((one) => [one.id, one.tenant, one.role, one.comment].some((value) => value.includes(text)));
    return html`<p class=${near ? "bad" : "quiet"}>${near ? `${number(near)} of ${number(keys.length)} keys have used 80 % of a limit or more.` : "No key has used 80 % of a limit."} Keys nearest to a limit come first.</p>
    <${Table} rows=${found.sort((a, b) => b.nearest - a.nearest).slice(0, 500)} by=${(one) => one.id} empty=${keys.length ? "No key matches." : "There is no key yet: sluice keys create TENANT."} columns=${[
      ["id", (one) => one.id], ["tenant", (one) => one.tenant], ["role", (one) => one.role], ["comment", (one) => one.comment || "–"], ["last used", (one) => one.last_used_at ? at(one.last_used_at) : "never"],
      ["nearest limit", (one) => one.most.length ? html`<span class=${one.nearest >= .8 ? "bad" : ""}>${share(one.nearest)}</span>` : "no limit", "number"],
      ["used of limits", (one) => one.most.map(({ name, used, most }) => html`<div class=${used >= .8 * most ? "bad" : ""}>${name}: ${number(used, 2)} of ${number(most, 2)}</div>`)],
      ["", (one) => html`<${Action} role=${role === "admin" ? role : "viewer"} label="Revoke" done=${again}
        says=${`${one.id} of ${one.tenant} is refused in every gateway within a second. This cannot be undone.`} run=${() => ask(`/admin/keys/${encodeURIComponent(one.id)}`, "DELETE")} />`],
    ]} />${found.length > 500 ? html`<p class="quiet">The first 500 of ${number(found.length)} keys.</p>` : null}`;
  }}<//>`;
}

// Prompts

export function Prompts({ id, role }) {
  return id ? html`<${Prompt} id=${id} role=${role} />` : html`<${PromptList} />`;
}

function PromptList() {
  const [state] = useAsked("/admin/prompts");
  return html`<h2>Prompts</h2><${Asked} state=${state}>${(data) => html`<${Table} rows=${data.prompts} onRow=${(one) => `#/prompts/${encodeURIComponent(one.id)}`}
    empty="No prompt version is registered: see docs/prompts.md." columns=${[
      ["version", (one) => one.id], ["published", (one) => one.published_at ? at(one.published_at) : "in a file"], ["routes", (one) => one.routes.join(", ") || "–"], ["SHA-256", (one) => one.sha256.slice(0, 12)],
    ]} />`}<//>`;
}

function Prompt({ id, role }) {
  const [state] = useAsked(`/admin/prompts/${encodeURIComponent(id)}`);
  const [text, setText] = useState("");
  const [preview, set] = useState(null);
  const render = (event) => {
    event.preventDefault();
    set({ loading: true });
    ask("/admin/budget/preview", "POST", { prompt_version: id, messages: [{ role: "user", content: text }] }).then((data) => set({ data }), (error) => set({ error }));
  };
  return html`<p><a href="#/prompts">All prompts</a></p><${Asked} state=${state}>${(one) => html`<h2>${one.id}</h2>
    <p>Routes: ${one.routes.join(", ") || "none"}. Tokens for the answer: ${number(one.reserve)}. Summaries: ${one.summarizer}. Volatile content: ${one.volatile ?? "as configured"}.</p>
    ${one.budgets ? html`<h3>Section budgets</h3><${Table} rows=${Object.entries(one.budgets)} columns=${[["section", ([name]) => name.replaceAll("_", " ")], ["tokens", ([, value]) => number(value), "number"]]} />` : null}
    <h3>Stable prefix, the same for every request</h3><pre>${one.stable_text}</pre>
    ${role === "viewer" ? null : html`<h3>Preview</h3><form onSubmit=${render}>
      <label>message of the user <textarea required value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label><div class="row"><button>Render</button></div></form>`}
    ${preview ? html`<${Asked} state=${preview}>${(data) => html`<${Preview} data=${data} />`}<//>` : null}`}<//>`;
}

function Preview({ data }) {
  const { cuts, prefix } = data;
  return html`<${Cards} figures=${[
      ["input tokens", number(data.input_tokens)], ["reserved for the answer", number(data.generation_reserve)], ["the model's context", number(data.max_model_len)],
      ["shared prefix", `${number(prefix.tokens)} in ${number(prefix.blocks)} blocks`],
    ]} />
    <h3>Sections</h3><${Table} rows=${Object.entries(data.sections)} columns=${[
      ["section", ([name]) => name.replaceAll("_", " ")], ["tokens", ([, one]) => number(one.tokens), "number"], ["budget", ([, one]) => number(one.budget), "number"]]} />
    <p>${cuts.dropped_chunks.length} evidence chunks and ${cuts.dropped_turns} turns dropped (${cuts.summarized_turns} of them summarized), ${cuts.cut_chunks.length} chunks cut, ${cuts.merged_chunks.length} merged.</p>
    <h3>Before the boundary: shared with other requests</h3><pre>${data.prompt.before_boundary}</pre>
    <h3>After the boundary: this request's own</h3><pre>${data.prompt.after_boundary}</pre>`;
}

// Shadow

const MEASURES = { ttft_ms: ["TTFT", ms], total_ms: ["total", ms], cost_nanousd: ["operator's cost", dollars] };

export function Shadow() {
  const [state] = useAsked("/admin/shadow");
  const range = (one, shown) => one ? `${shown(one.mean)}${one.low === null ? "" : ` (${shown(one.low)} to ${shown(one.high)})`}` : "–";
  return html`<h2>Shadow</h2><${Asked} state=${state}>${(data) => data.pairs ? html`
    <p>${data.primary.join(", ")} answered; ${data.shadow.join(", ")} got the same requests from ${at(data.since)} to ${at(data.until)}. Ranges have a confidence of ${share(data.confidence)}; a difference is the shadow's value minus the primary's.</p>
    <${Cards} figures=${[["pairs", number(data.pairs)], ["compared", number(data.compared)],
      ...Object.entries(data.failures).map(([name, count]) => [`shadow: ${name}`, number(count), "bad"])]} />
    ${data.groups.map((group) => html`<h3>${group.by ? `${group.by.replaceAll("_", " ")}: ${group.value ?? "none"}` : "All pairs"} (${number(group.pairs)})</h3>
      <${Table} rows=${group.numbers} empty="No answer of both sides to compare." columns=${[
        ["measure", (one) => MEASURES[one.measure]?.[0] ?? one.measure.replaceAll("_", " ")], ["pairs", (one) => number(one.pairs), "number"],
        ...["primary", "shadow"].map((side) => [`${side}: mean, p50, p99`, (one) => ["mean", "p50", "p99"].map((name) => (MEASURES[one.measure]?.[1] ?? number)(one[side][name])).join(", "), "number"]),
        ["difference", (one) => range(one.difference, MEASURES[one.measure]?.[1] ?? ((value) => number(value, 1))), "number"],
      ]} />
      ${group.checks.length ? html`<${Table} rows=${group.checks} columns=${[
        ["check passed", (one) => one.check.replaceAll("_", " ")], ["pairs", (one) => number(one.pairs), "number"],
        ...["primary", "shadow", "difference"].map((side) => [side, (one) => range(one[side], share), "number"]),
      ]} />` : null}
      <${Table} rows=${[["the shadow answered", group.answered], ["same finish reason", group.same_finish_reason], ["same tools", group.same_tools], ["same calls", group.same_calls],
          ["same language", group.same_language], ["likeness", group.likeness], ["length relative to the primary's", group.length_ratio]].filter(([, one]) => one)}
        columns=${[["agreement", ([name]) => name], ["share", ([, one]) => range(one, share), "number"]]} />`)}
    <h3>Finish reasons</h3><${Table} rows=${data.finish_reasons} empty="None." columns=${[
      ["primary", (one) => one.primary ?? "–"], ["shadow", (one) => one.shadow ?? "–"], ["pairs", (one) => number(one.pairs), "number"]]} />`
    : html`<p class="quiet">Nothing was compared yet: see docs/shadow.md.</p>`}<//>`;
}
