// What the views share: asking the gateway, words, tables, actions.
import { html, useCallback, useEffect, useState } from "./preact.js";

// Asking

export async function ask(path, method = "GET", body) {
  const headers = body === undefined ? {} : { "content-type": "application/json" };
  const response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) })
    .catch(() => { throw new Error("the gateway cannot be reached"); });
  const text = await response.text();
  let told = null;
  try { told = text ? JSON.parse(text) : null; } catch { told = { error: { message: text.slice(0, 300) } }; }
  if (!response.ok) {
    if (response.status === 401 && path !== "/console/session") dispatchEvent(new Event("unauthorized"));
    const error = new Error(told?.error?.message ?? `the gateway answered ${response.status}`);
    error.status = response.status;
    throw error;
  }
  return told;
}

export function useAsked(path) {
  const [state, set] = useState({ loading: true });
  const load = useCallback(() => {
    let later, left = false;
    const again = () => ask(path).then(
      (data) => left || set({ data }),
      (error) => {
        if (left) return;
        set({ error: error.status === 404 && path.startsWith("/v1/")
          ? new Error("This port serves operators alone (server.admin_port): the view works at a gateway without it.") : error });
        if (!error.status) later = setTimeout(again, 2000);
      },
    );
    again();
    return () => { left = true; clearTimeout(later); };
  }, [path]);
  useEffect(load, [load]);
  return [state, load];
}

// Words

export const number = (value, digits = 0) => value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
export const share = (value) => value === null || value === undefined ? "–" : `${number(value * 100, 1)} %`;
export const ms = (value) => value === null || value === undefined ? "–" : `${number(value, value < 10 ? 1 : 0)} ms`;
export const at = (time) => new Date(typeof time === "number" ? time * 1000 : time).toISOString().replace("T", " ").slice(0, 19);
export const dollars = (nano) => nano === null || nano === undefined ? "–" : `$ ${number(nano / 1e9, 4)}`;

// Parts

// `by` names a row whose cells hold a state, such as an open question: the state stays with it when rows come and go.
export function Table({ columns, rows, empty, onRow, by }) {
  if (!rows.length) return html`<p class="quiet">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="group" aria-label=${`table of ${columns.slice(0, 3).map(([name]) => name).join(", ")}`}><table>
    <thead><tr>${columns.map(([name, , kind]) => html`<th scope="col" class=${kind ?? ""}>${name || "action"}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${by?.(row)}>${columns.map(([, value, kind], place) => html`<td class=${kind ?? ""}>${
      onRow && place === 0 ? html`<a href=${onRow(row)}>${value(row)}</a>` : value(row)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

export function Cards({ figures }) {
  return html`<div class="cards">${figures.map(([name, value, kind]) => html`<div class="card"><b class=${kind ?? ""}>${value}</b><span>${name}</span></div>`)}</div>`;
}

export function Asked({ state, children }) {
  if (state.error) return html`<p class="bad" role="alert">${state.error.message}</p>`;
  return state.loading ? html`<p class="quiet">loading…</p>` : children(state.data);
}

const shown = (value) => typeof value === "string" ? value : JSON.stringify(value, null, 1);

export function Changes({ changes }) {
  return html`<${Table} rows=${changes} empty="Nothing changes." columns=${[
    ["setting", (one) => one.path],
    ["before", (one) => one.before === null ? "–" : html`<del>${shown(one.before)}</del>`],
    ["after", (one) => one.after === null ? "–" : html`<ins>${shown(one.after)}</ins>`],
  ]} />`;
}

// A new element is in the document only after its ref was called.
const focus = (element) => queueMicrotask(() => element?.focus());

// With `preview`, the action is offered once a dry run has shown what it changes; `run` gets the dry run's answer.
export function Action({ label, says, run, done, role, preview }) {
  const [step, set] = useState("");
  const [dry, setDry] = useState(null);
  if (role === "viewer") return null;
  const open = () => {
    setDry(null);
    set("asked");
    preview?.().then(setDry, (error) => set(error.message));
  };
  if (step === "asked") return html`<div class="confirm" role="alertdialog" aria-label=${label} tabindex="-1" ref=${focus} onKeyDown=${(event) => event.key === "Escape" && set(null)}><p>${says}</p>
    ${preview ? dry ? html`<${Changes} changes=${dry.changes} />` : html`<p class="quiet">loading…</p>` : null}<div class="row">
    ${preview && !dry ? null : html`<button class="danger" onClick=${() => { set("runs"); run(dry).then(() => { set(""); done(); }, (error) => { set(error.message); done(); }); }}>${label}</button>`}
    <button onClick=${() => set(null)}>Leave it as it is</button></div></div>`;
  return html`<span><button ref=${step === null ? focus : null} onClick=${open} disabled=${step === "runs"}>${label}</button>
    ${step && step !== "runs" ? html` <span class="bad" role="alert">${step}</span>` : null}</span>`;
}
