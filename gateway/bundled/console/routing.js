// The view of routing: revisions and what they changed, shares, and the canary.
import { Action, ask, Asked, at, Cards, Changes, number, share, Table, useAsked } from "./parts.js";
import { html, useState } from "./preact.js";

export function Routing({ role }) {
  const [state, again] = useAsked("/admin/routing");
  const [history, andAgain] = useAsked("/admin/routing/history");
  const done = () => { again(); andAgain(); };
  // What a dry run showed is what is done: another change in between is a conflict.
  const change = (path, body) => ({
    preview: () => ask(path, "POST", { ...body, dry_run: true }),
    run: (dry) => ask(path, "POST", { ...body, comment: "from the console", expected_revision: dry.parent }),
  });
  return html`<h2>Routing</h2>
    <${Asked} state=${state}>${(data) => html`<p>Revision <b>${data.revision}</b> by ${data.author} since ${at(data.in_force_since)} (UTC): ${data.comment || data.action}</p>
      <${Table} rows=${Object.entries(data.config.routes).flatMap(([route, config]) => config.backends.map((one) => ({ route, weight: 100, ...one, fallback: (config.fallback ?? []).join(", ") })))}
        by=${(one) => `${one.route}/${one.name}`} empty="No route." columns=${[["route", (one) => one.route], ["backend", (one) => one.name],
          ["share", (one) => html`<svg width="90" height="12" role="img" aria-label=${`${one.weight} percent`}><rect class="bar" width=${.9 * one.weight} height="12" /></svg> ${number(one.weight, 1)} %`, "number"],
          ["fallback", (one) => one.fallback || "–"],
          ["", (one) => one.weight === 100 ? null : html`<${Action} role=${role} label=${`Promote ${one.name}`} done=${done}
            says=${`All requests of ${one.route} go to ${one.name}, in every gateway within a second. The change can be rolled back.`}
            ...${change("/admin/routing/promote", { route: one.route, backend: one.name })} />`]]} />`}<//>
    <h3>Canary</h3><${Canary} role=${role} done=${done} />
    <h3>History</h3>
    <${Asked} state=${history}>${(data) => html`<${Table} rows=${data.revisions} by=${(one) => one.revision} empty="No revision." columns=${[
      ["revision", (one) => one.revision, "number"], ["at (UTC)", (one) => at(one.created_at)], ["by", (one) => one.author], ["comment", (one) => one.comment || one.action],
      ["changes", (one) => one.parent ? html`<${Diff} a=${one.parent} b=${one.revision} />` : "–"],
      ["", (one) => html`<${Action} role=${role} label=${`Roll back to ${one.revision}`} done=${done}
        says=${`Every route gets its configuration of revision ${one.revision}, in every gateway within a second. This makes a new revision, which can be rolled back.`}
        ...${change("/admin/routing/rollback", { to: one.revision })} />`],
    ]} />`}<//>`;
}

function Diff({ a, b }) {
  const [open, set] = useState(false);
  return html`<button aria-expanded=${open ? "true" : "false"} onClick=${() => set(!open)}>${open ? "hide" : "show"}</button>${open ? html`<${DiffShown} a=${a} b=${b} />` : null}`;
}

function DiffShown({ a, b }) {
  const [state] = useAsked(`/admin/routing/diff?a=${a}&b=${b}`);
  return html`<${Asked} state=${state}>${(data) => html`<${Changes} changes=${data.changes} />`}<//>`;
}

// The ends of both intervals on one axis that begins at 0.
function Intervals({ check }) {
  const most = Math.max(check.canary_interval?.[1] ?? 0, check.baseline_interval?.[1] ?? 0, 1e-9);
  const line = (interval, y, name) => interval ? html`<rect class=${name} x=${200 * interval[0] / most} y=${y} width=${Math.max(2, 200 * (interval[1] - interval[0]) / most)} height="7" />` : null;
  return html`<svg width="204" height="20" role="img" aria-label="intervals: canary above, stable below">${line(check.canary_interval, 1, "bar")}${line(check.baseline_interval, 11, "base")}</svg>`;
}

function Canary({ role, done }) {
  const [state, again] = useAsked("/admin/canary");
  const both = () => { again(); done(); };
  const side = (bad, of, interval) => interval ? `${share(bad / of)} (${share(interval[0])} to ${share(interval[1])}) of ${number(of)}` : "no request yet";
  const order = (name, more = {}) => ask(`/admin/canary/${name}`, "POST", { comment: "from the console", ...more });
  return html`<${Asked} state=${state}>${({ canary, driven_by }) => canary ? html`
    <p><b>${canary.backend}</b> on ${canary.route}: ${canary.phase.replaceAll("_", " ")} since ${at(canary.since)} (UTC)${canary.reason ? `: ${canary.reason}` : ""}. Driven by ${driven_by}.</p>
    <${Cards} figures=${[
      ["share now", canary.percent === null ? "–" : `${number(canary.percent, 1)} %`],
      ["step", `${canary.step} of ${canary.steps.length}`],
      ["next step", !canary.waiting_for ? "none" : canary.step < canary.steps.length ? `${number(canary.steps[canary.step], 1)} %` : "end of the canary"],
      ["waits for", canary.waiting_for ?? "nothing"],
      ["requests of the canary", number(canary.canary_requests)],
    ]} />
    <${Table} rows=${Object.entries(canary.checks)} empty="No request has been judged in this step." columns=${[
      ["bad requests in this step", ([name]) => name],
      ["canary, with its 95 % interval", ([, one]) => side(one.canary_bad, one.canary, one.canary_interval)],
      ["stable, with its 95 % interval", ([, one]) => side(one.baseline_bad, one.baseline, one.baseline_interval)],
      ["both", ([, one]) => html`<${Intervals} check=${one} />`],
      ["evidence against it; bound for rollback", ([, one]) => html`<span class=${one.log10_e > .5 * one.log10_bound ? "bad" : ""}>${number(one.log10_e, 2)}; ${number(one.log10_bound, 2)}</span>`, "number"],
    ]} />
    ${canary.phase === "running" || canary.phase === "paused" ? html`<div class="row">
      ${canary.phase === "running"
        ? html`<${Action} role=${role} label="Pause the canary" done=${both} says=${`${canary.backend} stays at its share of ${canary.route}, and nothing is judged until it is resumed.`} run=${() => order("pause")} />`
        : html`<${Action} role=${role} label="Resume the canary" done=${both} says=${`${canary.backend} is judged again from now on.`} run=${() => order("resume")} />`}
      <${Action} role=${role} label="Abort the canary" done=${both} says=${`${canary.route} gets its weights from before the canary back, at once.`}
        preview=${() => order("abort", { dry_run: true })} run=${() => order("abort")} /></div>` : null}`
    : html`<p class="quiet">No canary runs. <code>sluice canary start</code> begins one.</p>`}<//>`;
}
